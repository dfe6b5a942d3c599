"""Images in a tar, plain or compressed; `tarfile` reads the headers.

A compressed tar's checksums follow the data, so it is read to its end before its first image is yielded, and once
more for its images.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import IO, TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias, cast

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import Source
from opal_deploy.records.names import escape_name
from opal_deploy.sources import members
from opal_deploy.sources.image import InputImage, Location, SpooledMember
from opal_deploy.sources.items import Skipped, is_image_name
from opal_deploy.sources.members import (
    MAX_HELD,
    ArchiveError,
    ByteRange,
    Link,
    changed,
    is_hidden,
    member_items,
    normalize_name,
    open_archive,
    oversized,
    parents,
    resolve_link,
)
from opal_deploy.sources.xz import XZ_MEMORY, open_xz
from opal_deploy.storage.files import FileFingerprint

if TYPE_CHECKING:
    pass

Decompressor = Callable[[BinaryIO], object]
# bytes in a header for a long name or attributes
_MAX_TAR_HEADER = 1 << 20
# bytes of linked images in a compressed tar
_MAX_LINKED = 1 << 30

_CHUNK = 1 << 20


DECOMPRESSORS: dict[str, Decompressor] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": open_xz}
_XZ_SIGNATURE = b"\xfd7zXZ\0"
# of what they read
_SIGNATURES = (b"\x1f\x8b", b"BZh", _XZ_SIGNATURE)


class _HeaderReader:
    """The stream from which `TarFile` reads headers; `last_block` tells the end of the tar from a damaged header."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell = stream.seek, stream.tell
        self.last_block = b""

    def read(self, size: int) -> bytes:
        """Read a block, or the data of a header with a long name or attributes."""
        if size > _MAX_TAR_HEADER:
            raise ArchiveError(f"a header claims {size:,} bytes for a name or attributes")
        self.last_block = self._stream.read(size)
        return self.last_block


def _open_tar(reader: _HeaderReader) -> tarfile.TarFile:
    """Open a tar, which reads its first header."""
    return tarfile.TarFile(fileobj=cast(BinaryIO, reader), encoding="utf-8", errors="surrogateescape")


def is_tar(stream: BinaryIO, decompress: Decompressor | None) -> bool:
    """Return whether a stream is a tar after decompression; raise ImageError if it cannot be read."""
    try:
        _open_tar(_HeaderReader(_decompressed(stream, decompress)))
    except ImageError:
        raise
    except Exception as error:  # parsers and decompressors raise nearly anything for other files
        if isinstance(error, RecursionError):
            raise ArchiveError("its first member has thousands of names or attributes") from None
        if isinstance(error, lzma.LZMAError) and "limit" in str(error):
            raise ArchiveError(
                f"to decompress it takes more than {XZ_MEMORY >> 20} MiB of memory; pack it again with xz -9 or less"
            ) from None
        return False
    return True


def describe_other(stream: BinaryIO) -> str | None:
    """Return a description of a compressed file that is not a tar, with advice; None for any other file.

    Raises:
        ImageError: the file cannot be read.
    """
    for name, decompress in DECOMPRESSORS.items():
        try:
            head = _decompressed(stream, decompress).read(len(_XZ_SIGNATURE))
        except ImageError:
            raise
        except Exception:  # as in `is_tar`
            continue
        if head.startswith(_SIGNATURES):
            return f"it is compressed twice, with {name} on the outside; decompress it once and give the result"
        if head:  # an empty file counts as gzip
            return f"it is compressed with {name}, but what is inside is not a tar; decompress it and give the result"
    return None


def _decompressed(stream: BinaryIO, decompress: Decompressor | None) -> BinaryIO:
    stream.seek(0)
    return stream if decompress is None else cast(BinaryIO, decompress(stream))


def _tar_members(stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield every member's header, including those of further tars after the first one's end; raise ArchiveError."""
    start: int | None = 0
    while start is not None:
        yield from _members_from(stream, start)
        # zeros mark the end; on a damaged disk they may stand for a header, with members after them
        start = _find_block(stream)


def _members_from(stream: BinaryIO, start: int) -> Iterator[tarfile.TarInfo]:
    """Yield the headers from `start` to the block of zeros that marks the end."""
    last_offset = -1
    stream.seek(start)
    reader = _HeaderReader(stream)
    try:
        tar = _open_tar(reader)
        while (member := tar.next()) is not None:
            # a negative size would lead back to earlier members in an endless loop
            if member.size < 0 or member.offset_data <= last_offset:
                raise ArchiveError(f"the header of {escape_name(member.name)} is damaged")
            last_offset = member.offset_data
            # TarFile keeps every header that it has read
            tar.members.clear()  # type: ignore[attr-defined]
            yield member
    except (ArchiveError, ImageError):
        raise
    except Exception as error:  # as in `is_tar`
        raise ArchiveError(str(error) or type(error).__name__) from None
    if not reader.last_block:
        raise ArchiveError("it ends without the mark of its end")
    if reader.last_block != bytes(tarfile.BLOCKSIZE):
        raise ArchiveError("a header is damaged" if start == 0 else "bytes that are no member follow its end")


def _find_block(stream: BinaryIO) -> int | None:
    """Return the offset of the next whole block that is not all zeros; None if there is none."""
    offset = stream.tell()
    while chunk := stream.read(_CHUNK):
        zeros = len(chunk) - len(chunk.lstrip(b"\0"))
        block = zeros // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
        if zeros < len(chunk):
            return offset + block if len(chunk) - block >= tarfile.BLOCKSIZE else None
        offset += len(chunk)
    return None


def read_tar(
    archive: Location, file: BinaryIO, decompress: Decompressor | None, skipped: Skipped
) -> Iterator[InputImage]:
    """Yield a tar's images in their order; `skipped` counts other members.

    Raises:
        ArchiveError: after the members before the damage; before any member if a compressed tar is cut or altered.
        ImageError: `unreadable`: the tar changed meanwhile.
    """
    fingerprint = FileFingerprint.read(file)
    stream = _decompressed(file, decompress)
    if decompress is not None:
        _check_checksums(stream)
    targets: _LinkTargets | None = None
    with ExitStack() as stack:
        for member in _tar_members(stream):
            if decompress is None and member.offset_data + member.size > fingerprint.size:
                raise ArchiveError(f"it ends inside {escape_name(member.name)}")
            if member.isdir():
                continue
            link = _read_link(member)
            if is_hidden(member.name) or not (is_image_name(member.name) or link):
                skipped.add(Path(member.name))
                continue
            content: Source | ImageError | None
            if link is None:
                content = _locate(archive, member, fingerprint)
                if decompress is not None and isinstance(content, ByteRange):
                    content = _hold_member(stream, member)
            else:
                if targets is None:
                    spool = None if decompress is None else stack.enter_context(TemporaryFile())
                    targets = _LinkTargets(archive, decompress, fingerprint, spool)
                content = targets.find(member, link)
                # a byte range checks this when it is opened
            if decompress is not None and FileFingerprint.read(file) != fingerprint:
                raise changed(archive)
            yield from member_items(archive, member.name, content, skipped)


def _read_link(member: tarfile.TarInfo) -> Link | None:
    return Link(member.linkname, hard=member.islnk()) if member.islnk() or member.issym() else None


def _locate(archive: Location, member: tarfile.TarInfo, fingerprint: FileFingerprint) -> ByteRange | ImageError:
    if not member.isreg():
        return ImageError("unsupported_member", "it is a device, a pipe or a part of a file, not a whole file")
    if member.issparse():
        return ImageError("unsupported_member", "it is stored as a sparse file; pack it again without -S")
    if member.size > members.MAX_MEMBER:
        return oversized(member.size)
    return ByteRange(archive, fingerprint, member.offset_data, member.size, member.size)


class _Spooled(NamedTuple):
    """The place of a linked image in the temporary file for a compressed tar."""

    offset: int
    size: int


_Target: TypeAlias = ByteRange | _Spooled | SpooledMember | ImageError | bytes


class _LinkTargets:
    """The targets of a tar's links.

    The tar is read twice for them: once for the links, once for their targets. Memory holds one entry per link.
    """

    def __init__(
        self,
        archive: Location,
        decompress: Decompressor | None,
        fingerprint: FileFingerprint,
        spool: IO[bytes] | None,
    ) -> None:
        """Read the tar at `archive`; `spool` keeps linked images of a compressed tar; raise ImageError."""
        self._archive, self._fingerprint = archive, fingerprint
        self._links: dict[str, Link] = {}
        # the target at each path; a hard link keeps the one that existed when it was made
        self._contents: dict[str, _Target] = {}
        self._hard_contents: dict[int, _Target] = {}
        # folders that links lead to
        self._folders = {""}
        self._spool, self._spooled_bytes = spool, 0
        with open_archive(archive, fingerprint) as file:
            stream = _decompressed(file, decompress)
            self._read_targets(stream, self._read_links(stream))

    def find(self, member: tarfile.TarInfo, link: Link) -> Source | ImageError | None:
        """Return a link's target: an image or its error, b"" for another file, None for a folder."""
        try:
            path = resolve_link(normalize_name(member.name), link, self._links)
        except ImageError as error:
            return error
        target = self._hard_contents.get(member.offset, self._contents.get(path))
        if target is None:
            return None if path in self._folders else link.error("which is not in the archive")
        if isinstance(target, _Spooled):
            assert self._spool is not None  # it was written there
            self._spool.seek(target.offset)
            return self._spool.read(target.size)
        return target

    def _read_links(self, stream: BinaryIO) -> dict[str, bool]:
        """Return the paths that links lead to, and whether one of their links has an image's name."""
        names: list[tuple[str, Link]] = []
        # reading the members in order meets the damage, too
        with suppress(ArchiveError):
            for member in _tar_members(stream):
                name, link = normalize_name(member.name), _read_link(member)
                if link is None:
                    # it takes the place of an earlier link
                    self._links.pop(name, None)
                else:
                    self._links[name] = link
                    names.append((name, link))
        paths: dict[str, bool] = {}
        for name, link in names:
            with suppress(ImageError):
                path = resolve_link(name, link, self._links)
                paths[path] = paths.get(path, False) or is_image_name(name)
        return paths

    def _read_targets(self, stream: BinaryIO, paths: dict[str, bool]) -> None:
        with suppress(ArchiveError):
            for member in _tar_members(stream):
                name, link = normalize_name(member.name), _read_link(member)
                if link is not None and link.hard:
                    with suppress(ImageError, KeyError):
                        self._hard_contents[member.offset] = self._contents[resolve_link(name, link, self._links)]
                elif member.isreg() and name in paths:
                    self._contents[name] = self._keep(stream, member) if paths[name] else b""
                self._folders.update(path for path in parents(name, itself=member.isdir()) if path in paths)

    def _keep(self, stream: BinaryIO, member: tarfile.TarInfo) -> _Target:
        content = _locate(self._archive, member, self._fingerprint)
        if self._spool is None or isinstance(content, ImageError):
            return content
        if self._spooled_bytes + member.size > _MAX_LINKED:
            reason = f"links in this compressed tar lead to more than {_MAX_LINKED:,} bytes; unpack it"
            return ImageError("unsupported_member", reason)
        held = _hold_member(stream, member)
        self._spooled_bytes += member.size
        if not isinstance(held, bytes):
            return held
        offset = self._spool.seek(0, os.SEEK_END)
        self._spool.write(held)
        return _Spooled(offset, member.size)


def _hold_member(stream: BinaryIO, member: tarfile.TarInfo) -> bytes | SpooledMember | ImageError:
    """Return a compressed tar's member, in memory or, if it is large, in a temporary file."""
    pieces = _read_pieces(stream, member)
    if member.size <= MAX_HELD or sys.platform != "linux":
        return b"".join(pieces)
    try:
        return SpooledMember(pieces, member.size)
    except OSError as error:
        # reading raises none
        reason = f"{gettempdir()}: no room for it ({error.strerror or error}); set TMPDIR"
        return ImageError("unreadable", reason)


def _read_pieces(stream: BinaryIO, member: tarfile.TarInfo) -> Iterator[bytes]:
    """Yield a member's bytes in pieces; raise ArchiveError if they cannot be read."""
    offset, end = member.offset_data, member.offset_data + member.size
    while offset < end:
        try:
            stream.seek(offset)
            piece = stream.read(min(_CHUNK, end - offset))
        except ImageError:
            raise
        except Exception as error:  # as in `is_tar`
            raise ArchiveError(f"inside {escape_name(member.name)}: {error}") from None
        if not piece:
            raise ArchiveError(f"it ends inside {escape_name(member.name)}")
        offset += len(piece)
        yield piece


def _check_checksums(stream: BinaryIO) -> None:
    """Read a compressed tar to its end, which checks its checksums; xz files may have none."""
    try:
        stream.seek(0)
        while stream.read(_CHUNK):
            pass
    except ImageError:
        raise
    except Exception as error:  # as in `is_tar`
        reason = str(error).rstrip(".") or type(error).__name__
        raise ArchiveError(f"{reason}; any of its images may be altered, so none is answered") from None
