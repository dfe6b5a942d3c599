"""Images of a tar, plain or compressed with gzip, bzip2 or xz, without unpacking it.

Members of a plain tar are read where they lie by whoever decodes them. A compressed one is read once, from beginning
to end, and its members' bytes are handed on; memory then holds as many as are in work.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, cast

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.byte_ranges import FilePart, stamp_of
from opal_deploy.inference.sources.items import Item, Skipped
from opal_deploy.inference.sources.members import MAX_MEMBER, ArchiveError, member_item, oversized, wanted
from opal_deploy.records.names import escape_name

_COMPRESSIONS: dict[bytes, Callable[[BinaryIO], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


def tar_items(archive: Path, stream: BinaryIO, skipped: Skipped) -> Iterator[Item]:
    """Its images in the archive's order; links, devices and what is no image by its name are counted in `skipped`.

    Raises:
        Damaged: after the members before the damage.
        OSError: reading was refused.
    """
    with ExitStack() as stack:
        head = stream.read(6)
        stream.seek(0)
        opener = next((found for magic, found in _COMPRESSIONS.items() if head.startswith(magic)), None)
        plain = stream if opener is None else stack.enter_context(cast(BinaryIO, opener(stream)))
        stamp = stamp_of(stream)
        for member in _members(plain):
            end = member.offset_data + member.size
            if opener is None and end > stamp[0]:
                raise ArchiveError(f"it ends inside {escape_name(member.name)}")
            if member.isdir():
                continue
            if not member.isreg() or not wanted(member.name):
                skipped.add(Path(member.name))
            elif member.issparse():
                problem = ImageError("unsupported_member", "it is stored as a sparse file; pack it again without -S")
                yield member_item(archive, member.name, problem=problem)
            elif member.size > MAX_MEMBER:
                yield member_item(archive, member.name, problem=oversized(member.size))
            elif opener is None:
                part = FilePart(archive, member.offset_data, member.size, stamp)
                yield member_item(archive, member.name, part)
            else:
                yield member_item(archive, member.name, _carried(plain, member))


def _members(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Every header, one at a time: a TarFile that iterates keeps them all, and takes a damaged one for the end.

    Raises:
        Damaged: a header is damaged or missing.
    """
    tar, at = None, 0
    while True:
        try:
            if tar is None:
                tar = tarfile.TarFile(fileobj=stream, mode="r", encoding="utf-8", errors="surrogateescape")
                # it has read the first header to see what the file is
                tar.offset = 0
            stream.seek(tar.offset)
            member = tar.tarinfo.fromtarfile(tar)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":
                return
            empty = type(error).__name__ == "EmptyHeaderError"
            raise ArchiveError(
                "it ends without the mark of its end" if empty else f"a header is damaged: {error}"
            ) from None
        except Exception as error:  # parsers and decompressors raise nearly anything for a damaged file
            raise ArchiveError(str(error) or type(error).__name__) from None
        # a negative size would lead back to where we have been, for ever
        if member.size < 0 or tar.offset <= at:
            raise ArchiveError(f"the header of {escape_name(member.name)} is damaged")
        at = tar.offset
        yield member


def _carried(stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    try:
        stream.seek(member.offset_data)
        data = stream.read(member.size)
    except Exception as error:  # as above
        raise ArchiveError(f"inside {escape_name(member.name)}: {error}") from None
    if len(data) < member.size:
        raise ArchiveError(f"it ends inside {escape_name(member.name)}")
    return data
