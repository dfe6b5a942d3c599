"""Images of a zip without unpacking it: its directory is read entry by entry.

The standard library's reader keeps an object a member, in every process that opens the archive, and refuses an archive
for a single name that is not UTF-8; two million members would be more than a gigabyte. Here memory does not grow with
them. A zip whose end is missing has no directory; its members are then found by their own headers, one after another,
as far as these say how long they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.byte_ranges import DEFLATED, LOCAL_SIGNATURE, STORED, Stamp, ZipPart, stamp_of
from opal_deploy.inference.sources.items import Item, Skipped
from opal_deploy.inference.sources.members import MAX_MEMBER, ArchiveError, member_item, oversized, wanted

# APPNOTE 4.3.16, 4.3.15, 4.3.14, 4.3.12, 4.3.7
_END = struct.Struct("<4s4H2LH")
_END_64_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_END_SIGNATURE, _ENTRY_SIGNATURE = b"PK\x05\x06", b"PK\x01\x02"
_LARGEST_COMMENT = 0xFFFF
_IN_EXTRA_FIELD = 0xFFFFFFFF

_ENCRYPTED, _SIZE_FOLLOWS = 1 << 0, 1 << 3
_METHODS = {9: "deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "xz", 98: "PPMd", 99: "AES"}
_UNIX, _TYPE_BITS, _REGULAR = 3, 0xF000, 0x8000


@dataclass(frozen=True)
class _Entry:
    name: str
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    header: int
    # of the Unix system that packed it; 0 where unknown
    file_type: int = 0


def zip_items(archive: Path, stream: BinaryIO, skipped: Skipped) -> Iterator[Item]:
    """Its images in the directory's order; links and what is no image by its name are counted in `skipped`.

    Raises:
        Damaged: after the members before the damage.
        OSError: reading was refused.
    """
    stamp = stamp_of(stream)
    for entry in _entries(stream, stamp[0]):
        if entry.name.endswith("/"):
            continue
        if not wanted(entry.name) or entry.file_type not in (0, _REGULAR):
            skipped.add(Path(entry.name))
            continue
        problem = _problem(entry)
        content = None if problem else _part(archive, entry, stamp)
        yield member_item(archive, entry.name, content, problem)


def _part(archive: Path, entry: _Entry, stamp: Stamp) -> ZipPart:
    return ZipPart(archive, entry.header, entry.packed, entry.size, entry.method, entry.crc, stamp)


def _problem(entry: _Entry) -> ImageError | None:
    if entry.flags & _ENCRYPTED:
        return ImageError("encrypted_member", "it is encrypted; unpack it with its password")
    if entry.method not in (STORED, DEFLATED):
        method = _METHODS.get(entry.method, f"method {entry.method}")
        return ImageError("unsupported_member", f"it is compressed with {method}; expected stored or deflated members")
    if max(entry.size, entry.packed) > MAX_MEMBER:
        return oversized(max(entry.size, entry.packed))
    if entry.method == STORED and entry.size != entry.packed:
        return ImageError("corrupt_image", f"it is stored, and {entry.size} bytes take {entry.packed}")
    return None


def _entries(stream: BinaryIO, length: int) -> Iterator[_Entry]:
    found = _directory(stream, length)
    if found is None:
        yield from _by_local_headers(stream, length)
        raise ArchiveError("its end is missing, and with it the directory of its members")
    start, count, shift = found
    stream.seek(start)
    for number in range(count):
        fixed = stream.read(_ENTRY.size)
        if len(fixed) < _ENTRY.size or not fixed.startswith(_ENTRY_SIGNATURE):
            raise ArchiveError(f"its directory is damaged after {number} of {count} members")
        values = _ENTRY.unpack(fixed)
        made_by, flags, method = values[1], values[3], values[4]
        crc, packed, size, name_length, extra_length, comment_length = values[7:13]
        outside, header = values[15:17]
        rest = stream.read(name_length + extra_length + comment_length)
        if len(rest) < name_length + extra_length + comment_length:
            raise ArchiveError(f"its directory is damaged after {number} of {count} members")
        extra = rest[name_length : name_length + extra_length]
        size, packed, header = _wide(extra, [size, packed, header])
        file_type = (outside >> 16) & _TYPE_BITS if made_by >> 8 == _UNIX else 0
        yield _Entry(_name(rest[:name_length]), flags, method, crc, packed, size, header + shift, file_type)


def _directory(stream: BinaryIO, length: int) -> tuple[int, int, int] | None:
    """Where the directory begins, how many entries it has, and how far bytes before the archive shift its offsets."""
    tail_start = max(0, length - _END.size - _LARGEST_COMMENT)
    stream.seek(tail_start)
    tail = stream.read()
    at = tail.rfind(_END_SIGNATURE)
    if at < 0 or len(tail) - at < _END.size:
        return None
    _, _, _, _, count, size, offset, _ = _END.unpack_from(tail, at)
    end = tail_start + at
    if end >= _END_64_LOCATOR.size + _END_64.size:
        stream.seek(end - _END_64_LOCATOR.size)
        locator = _END_64_LOCATOR.unpack(stream.read(_END_64_LOCATOR.size))
        if locator[0] == b"PK\x06\x07":
            end -= _END_64_LOCATOR.size + _END_64.size
            stream.seek(end)
            record = _END_64.unpack(stream.read(_END_64.size))
            if record[0] != b"PK\x06\x06":
                raise ArchiveError("the record of its 64-bit directory is not where it should be")
            count, size, offset = record[7:10]
    start = end - size
    if start < 0 or offset > start:
        raise ArchiveError("its directory does not lie inside it")
    return start, count, start - offset


def _by_local_headers(stream: BinaryIO, length: int) -> Iterator[_Entry]:
    at = 0
    while True:
        stream.seek(at)
        fixed = stream.read(_LOCAL.size)
        if len(fixed) < _LOCAL.size or not fixed.startswith(LOCAL_SIGNATURE):
            return
        _, _, flags, method, _, _, crc, packed, size, name_length, extra_length = _LOCAL.unpack(fixed)
        rest = stream.read(name_length + extra_length)
        size, packed = _wide(rest[name_length:], [size, packed])
        end = at + _LOCAL.size + name_length + extra_length + packed
        if flags & _SIZE_FOLLOWS or end > length:
            # where it ends is written behind it, or it does not end
            return
        yield _Entry(_name(rest[:name_length]), flags, method, crc, packed, size, at)
        at = end


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """`values` with those that did not fit 32 bits taken from the extra field, where they stand in this order."""
    if _IN_EXTRA_FIELD not in values:
        return values
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            field = extra[at + 4 : at + 4 + length]
            wide = iter([int.from_bytes(field[i : i + 8], "little") for i in range(0, len(field) - 7, 8)])
            return [next(wide, value) if value == _IN_EXTRA_FIELD else value for value in values]
        at += 4 + length
    return values


def _name(raw: bytes) -> str:
    """A member's name. Zips that do not say UTF-8 are mostly UTF-8 all the same; other bytes are escaped reversibly."""
    return raw.decode("utf-8", "surrogateescape")
