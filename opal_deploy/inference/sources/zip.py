"""Images in a zip.

`zipfile` reads the directory. Only a zip without a readable one is searched here for the headers in front of its
members, because `zipfile` gives nothing of it.
"""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources import members
from opal_deploy.inference.sources.byte_ranges import ByteRange, FileFingerprint, ZipLocalHeader
from opal_deploy.inference.sources.items import Item, Skipped
from opal_deploy.inference.sources.members import ArchiveError, is_image_member, member_item, oversized

_ENCRYPTED, _SIZE_FOLLOWS, _UTF8_NAME = 1 << 0, 1 << 3, 1 << 11
_UNIX = 3
_METHODS = {9: "deflate64", 12: "bzip2", 14: "LZMA", 93: "Zstandard", 95: "xz", 98: "PPMd", 99: "AES"}


def read_zip(archive: Path, stream: BinaryIO, skipped: Skipped) -> Iterator[Item]:
    """Yield a zip's images in its directory's order; what is no image by its name is counted in `skipped`.

    Raises:
        ArchiveError: after the members that can be found without a directory.
        OSError: reading was refused.
    """
    fingerprint = FileFingerprint.read(stream)
    damage: ArchiveError | None = None
    entries: Iterable[zipfile.ZipInfo]
    try:
        with zipfile.ZipFile(stream) as directory:
            entries = directory.infolist()
    except OSError:
        raise
    except Exception as error:  # parsers raise nearly anything for a damaged file
        damage = ArchiveError(f"the directory of its members cannot be read: {error}")
        entries = _search_entries(stream, fingerprint.size)
    for entry in entries:
        name = _entry_name(entry)
        if name.endswith("/"):
            continue
        # the type is known of archives made on Unix
        mode = entry.external_attr >> 16 if entry.create_system == _UNIX else 0
        if not is_image_member(name) or stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFLNK):
            skipped.add(Path(name))
        elif stat.S_ISLNK(mode):
            link = ImageError("unsupported_member", "it is a symbolic link; pack the file itself")
            yield member_item(archive, name, link)
        else:
            yield member_item(archive, name, _check_entry(archive, entry, fingerprint))
    if damage is not None:
        raise damage


def _search_entries(stream: BinaryIO, file_size: int) -> Iterator[zipfile.ZipInfo]:
    """Yield a zip's members by their own headers, one after another, as far as these say how long they are."""
    offset = 0
    while (header := ZipLocalHeader.read(stream, offset)) is not None:
        end = offset + header.length + header.packed_size
        if header.flags & _SIZE_FOLLOWS or end > file_size:
            return
        entry = zipfile.ZipInfo(stream.read(header.name_length).decode("cp437"))
        entry.flag_bits = header.flags & ~_UTF8_NAME
        entry.compress_type, entry.CRC, entry.header_offset = header.method, header.crc, offset
        entry.compress_size, entry.file_size = header.packed_size, header.size
        yield entry
        offset = end


def _entry_name(entry: zipfile.ZipInfo) -> str:
    """Return a member's name, with a NUL in it and as UTF-8, which zips that do not say so mostly are all the same."""
    name = entry.orig_filename
    return name if entry.flag_bits & _UTF8_NAME else name.encode("cp437").decode("utf-8", "surrogateescape")


def _check_entry(archive: Path, entry: zipfile.ZipInfo, fingerprint: FileFingerprint) -> ByteRange | ImageError:
    method, size, packed_size = entry.compress_type, entry.file_size, entry.compress_size
    if entry.flag_bits & _ENCRYPTED:
        return ImageError("encrypted_member", "it is encrypted; unpack it with its password")
    if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        name = _METHODS.get(method, f"method {method}")
        return ImageError("unsupported_member", f"it is compressed with {name}; expected stored or deflated members")
    if max(size, packed_size) > members.MAX_MEMBER:
        return oversized(max(size, packed_size))
    deflated = method == zipfile.ZIP_DEFLATED
    if not deflated and size != packed_size:
        return ImageError("corrupt_image", f"it is stored, and {size} bytes take {packed_size}")
    return ByteRange(
        archive, fingerprint, entry.header_offset, packed_size, size, zipped=True, deflated=deflated, crc=entry.CRC
    )
