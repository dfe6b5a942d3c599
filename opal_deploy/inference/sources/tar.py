"""Images in a tar, plain or compressed; `tarfile` reads the headers."""

from __future__ import annotations

import bz2
import gzip
import lzma
import posixpath
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources import members
from opal_deploy.inference.sources.byte_ranges import ByteRange, FileFingerprint
from opal_deploy.inference.sources.items import Item, Skipped
from opal_deploy.inference.sources.members import ArchiveError, is_image_member, member_item, oversized
from opal_deploy.preprocess.decode import Source
from opal_deploy.records.names import escape_name

Decompressor = Callable[[BinaryIO], object]
DECOMPRESSORS: tuple[Decompressor, ...] = (gzip.open, bz2.open, lzma.open)
# bytes of a header's long name or attributes
_MAX_TAR_HEADER = 1 << 20

_CHUNK = 1 << 20


class _HeaderReader:
    """The stream from which `TarFile` reads headers.

    `TarFile.next` returns None at the end and for a damaged header; the last block that it read tells which.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell
        self.last_block = b""

    def read(self, size: int) -> bytes:
        """Read a block, or the data of a header that holds a long name or attributes of the next member."""
        if size > _MAX_TAR_HEADER:
            raise ArchiveError(f"a header claims {size:,} bytes for a name or attributes")
        self.last_block = self._stream.read(size)
        return self.last_block


def _open_tar(reader: _HeaderReader) -> tarfile.TarFile:
    """Open a tar, which reads its first header."""
    return tarfile.TarFile(fileobj=cast(BinaryIO, reader), encoding="utf-8", errors="surrogateescape")


def is_tar(stream: BinaryIO, decompress: Decompressor | None) -> bool:
    """Return whether a stream is a tar, once it is decompressed."""
    try:
        _open_tar(_HeaderReader(_decompressed(stream, decompress)))
    except Exception:  # parsers and decompressors raise nearly anything for another kind of file
        return False
    return True


def _decompressed(stream: BinaryIO, decompress: Decompressor | None) -> BinaryIO:
    stream.seek(0)
    return stream if decompress is None else cast(BinaryIO, decompress(stream))


def _tar_members(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the header of every member.

    Raises:
        ArchiveError: a header is damaged or missing.
    """
    last_offset = -1
    stream.seek(0)
    reader = _HeaderReader(stream)
    try:
        tar = _open_tar(reader)
        while (member := tar.next()) is not None:
            # a negative size would lead back to earlier members, for ever
            if member.size < 0 or member.offset_data <= last_offset:
                raise ArchiveError(f"the header of {escape_name(member.name)} is damaged")
            last_offset = member.offset_data
            # TarFile keeps every header that it has read
            tar.members.clear()  # type: ignore[attr-defined]
            yield member
    except ArchiveError:
        raise
    except Exception as error:  # as in `is_tar`
        raise ArchiveError(str(error) or type(error).__name__) from None
    if not reader.last_block:
        raise ArchiveError("it ends without the mark of its end")
    if reader.last_block != bytes(tarfile.BLOCKSIZE):
        raise ArchiveError("a header is damaged")


def read_tar(archive: Path, file: BinaryIO, decompress: Decompressor | None, skipped: Skipped) -> Iterator[Item]:
    """Yield a tar's images in its order; devices and what is no image by its name are counted in `skipped`.

    Raises:
        ArchiveError: after the members before the damage; also for a wrong checksum of a compressed tar, which comes
            after the data.
    """
    stream = _decompressed(file, decompress)
    fingerprint = FileFingerprint.read(file)
    link_targets: dict[str, ByteRange | ImageError] | None = None
    for member in _tar_members(stream):
        if decompress is None and member.offset_data + member.size > fingerprint.size:
            raise ArchiveError(f"it ends inside {escape_name(member.name)}")
        if member.isdir():
            continue
        is_link = member.islnk() or member.issym()
        if not is_image_member(member.name) or not (is_link or member.isreg()):
            skipped.add(Path(member.name))
            continue
        content: Source | ImageError
        if not is_link:
            content = _locate(archive, member, fingerprint)
            if decompress is not None and isinstance(content, ByteRange):
                content = _read_member(stream, member)
        elif decompress is not None:
            content = _unsupported_link(member, "and a compressed tar is read only once; unpack it")
        else:
            if link_targets is None:
                link_targets = _index_files(archive, stream, fingerprint)
            missing = _unsupported_link(member, "which is no file in the archive")
            content = link_targets.get(_target_name(member), missing)
        yield member_item(archive, member.name, content)
    if decompress is not None:
        _check_end(stream)


def _locate(archive: Path, member: tarfile.TarInfo, fingerprint: FileFingerprint) -> ByteRange | ImageError:
    if member.issparse():
        return ImageError("unsupported_member", "it is stored as a sparse file; pack it again without -S")
    if member.size > members.MAX_MEMBER:
        return oversized(member.size)
    return ByteRange(archive, fingerprint, member.offset_data, member.size, member.size)


def _index_files(archive: Path, stream: BinaryIO, fingerprint: FileFingerprint) -> dict[str, ByteRange | ImageError]:
    """Return the files of a plain tar by their normalised names, which a link may name before they come."""
    files = {}
    # whoever reads the members in their order comes to the damage too
    with suppress(ArchiveError):
        for member in _tar_members(stream):
            if member.isreg():
                files[posixpath.normpath(member.name)] = _locate(archive, member, fingerprint)
    return files


def _target_name(link: tarfile.TarInfo) -> str:
    """Return the normalised name that a link leads to; a hard link names a path in the archive."""
    folder = "" if link.islnk() else posixpath.dirname(link.name)
    return posixpath.normpath(posixpath.join(folder, link.linkname))


def _unsupported_link(link: tarfile.TarInfo, why: str) -> ImageError:
    return ImageError("unsupported_member", f"it is a link to {escape_name(link.linkname)}, {why}")


def _read_member(stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    try:
        stream.seek(member.offset_data)
        data = stream.read(member.size)
    except Exception as error:  # as in `is_tar`
        raise ArchiveError(f"inside {escape_name(member.name)}: {error}") from None
    if len(data) < member.size:
        raise ArchiveError(f"it ends inside {escape_name(member.name)}")
    return data


def _check_end(stream: BinaryIO) -> None:
    """Read a compressed tar to its end, where the checksum of its bytes is."""
    try:
        while stream.read(_CHUNK):
            pass
    except Exception as error:  # as in `is_tar`
        raise ArchiveError(f"{error or type(error).__name__}; images before may not be what was packed") from None
