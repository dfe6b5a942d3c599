"""Members of archives: their bytes, as ranges of the archive, their names, and the links between them.

A `ByteRange` is small and picklable, so that the process that decodes a member opens the archive itself. Members of a
zip are not opened with `zipfile`, which would read the whole directory in each of these processes."""

from __future__ import annotations

import io
import posixpath
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, BinaryIO, NamedTuple, cast

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import Source, open_file
from opal_deploy.records.names import escape_name
from opal_deploy.sources.image import InputImage, Location
from opal_deploy.sources.items import Skipped, is_image_name
from opal_deploy.storage.files import READ_AHEAD_BYTES, FileFingerprint

# APPNOTE 4.3.7: signature, flags, method, CRC-32, packed size, size, lengths of name and extra field
_LOCAL_HEADER = struct.Struct("<4s2xHH4xLLLHH")
LOCAL_SIGNATURE = b"PK\x03\x04"
# a request covers the header and an ordinary name and extra field; a longer member takes two requests
_HEADER_SLACK, _MAX_AHEAD = 1024, 64 << 20
# larger images wait in a temporary file for their decoder
MAX_HELD = 16 << 20
_CHUNK = 1 << 18


def open_archive(
    archive: Location, fingerprint: FileFingerprint | None = None, read_ahead: int = READ_AHEAD_BYTES
) -> BinaryIO:
    """Open an archive, if remote by ranges of at least `read_ahead` bytes; raise ImageError if it has changed."""
    if not isinstance(archive, Path):
        return replace(archive, fingerprint=fingerprint or archive.fingerprint).open_ranges(read_ahead)
    stream = open_file(archive)
    if fingerprint is not None and FileFingerprint.read(stream) != fingerprint:
        stream.close()
        raise changed(archive)
    return stream


def changed(archive: Location) -> ImageError:
    """Return the error of an archive that changed after its members were listed."""
    return ImageError("unreadable", f"{archive.name} was changed while its members were read")


class ZipLocalHeader(NamedTuple):
    """The header before a zip member's bytes."""

    flags: int
    method: int
    crc: int
    packed_size: int
    size: int
    name_length: int
    extra_length: int

    @property
    def length(self) -> int:
        """Bytes of the header with name and extra field."""
        return _LOCAL_HEADER.size + self.name_length + self.extra_length

    @classmethod
    def read(cls, stream: BinaryIO, offset: int) -> ZipLocalHeader | None:
        """Return the header at `offset` and leave the stream at the member's name; None if there is none."""
        if not 0 <= offset <= FileFingerprint.read(stream).size:
            return None
        stream.seek(offset)
        data = stream.read(_LOCAL_HEADER.size)
        if len(data) < _LOCAL_HEADER.size or not data.startswith(LOCAL_SIGNATURE):
            return None
        return cls(*_LOCAL_HEADER.unpack(data)[1:])


@dataclass(frozen=True)
class ByteRange:
    """An image's bytes inside an archive.

    Attributes:
        path: the archive, or its URL.
        fingerprint: of the archive when it was listed.
        offset: of the first byte; for a zip's member, of the local header.
        length: bytes in the archive, without the header.
        size: bytes after inflating.
        zipped: a zip's local header precedes the bytes.
        deflated: the bytes are a raw deflate stream.
        crc: CRC-32 of the `size` bytes; None: the archive has no checksum.
    """

    path: Location
    fingerprint: FileFingerprint
    offset: int
    length: int
    size: int
    zipped: bool = False
    deflated: bool = False
    crc: int | None = None

    def open(self) -> BinaryIO:
        """Return the checked bytes as a stream, in memory or in a temporary file if they are many.

        Raises:
            ImageError: they are damaged, or the archive has changed. OSError: they cannot be read or kept.
        """
        # one request gets the header and all bytes of a zip's member
        ahead = self.length + _HEADER_SLACK if self.zipped else 1
        size = crc = 0
        with ExitStack() as stack:
            kept = io.BytesIO() if self.size <= MAX_HELD else TemporaryFile()  # noqa: SIM115 (on the stack)
            target: IO[bytes] = stack.enter_context(kept)
            with open_archive(self.path, self.fingerprint, min(ahead, _MAX_AHEAD)) as stream:
                stream.seek(self.offset + (self._header_length(stream) if self.zipped else 0))
                for piece in self._read_pieces(stream):
                    size, crc = size + len(piece), zlib.crc32(piece, crc)
                    if size > self.size:
                        break
                    target.write(piece)
            if size != self.size or (self.crc is not None and crc != self.crc):
                raise ImageError("corrupt_image", "its bytes do not have the size and the checksum in the archive")
            target.seek(0)
            stack.pop_all()
        return cast(BinaryIO, target)

    def _read_pieces(self, stream: BinaryIO) -> Iterator[bytes]:
        """Yield the bytes, inflated, in pieces of bounded size."""
        remaining = self.length
        inflater = zlib.decompressobj(-zlib.MAX_WBITS) if self.deflated else None
        while remaining:
            data = stream.read(min(_CHUNK, remaining))
            if not data:
                raise ImageError("truncated_image", "the archive ends inside it")
            remaining -= len(data)
            if inflater is None:
                yield data
                continue
            while data:
                try:
                    yield inflater.decompress(data, _CHUNK)
                except zlib.error as error:
                    raise ImageError("corrupt_image", f"it cannot be inflated: {error}") from None
                data = inflater.unconsumed_tail

    def _header_length(self, stream: BinaryIO) -> int:
        header = ZipLocalHeader.read(stream, self.offset)
        if header is None:
            raise ImageError("corrupt_image", "the archive has no member where its directory says")
        return header.length


# 100 megapixels of 16-bit RGB fit
MAX_MEMBER = 512 << 20

# links on the way to one file, as on Linux, and characters of a path, as on macOS
_MAX_LINKS, MAX_PATH = 40, 1024
_OUTSIDE = "which lies outside the archive; pack what it leads to"


class ArchiveError(Exception):
    """The rest of an archive cannot be read; the message says where and why."""


def is_hidden(name: str) -> bool:
    """Return whether a member or one of its folders is hidden, such as `__MACOSX/._x.jpg`."""
    return any(part.startswith(".") and part not in (".", "..") for part in re.split(r"[/\\]", name))


def member_items(
    archive: Location, name: str, content: Source | ImageError | None, skipped: Skipped
) -> Iterator[InputImage]:
    """Yield a member that is an image or has an error; count any other member.

    The name is only a label: `..`, a leading slash or a NUL have no effect.

    Args:
        archive: its path or URL.
        name: of the member.
        content: the member's bytes, or its error; None: a link to a folder in the archive.
        skipped: counts the other members.
    """
    path = Path(f"{archive}/{name}") if isinstance(archive, Path) else archive.child(name)
    if content is None:
        skipped.add_folder_link(Path(name))
    elif isinstance(content, ImageError):
        yield InputImage.at(path, name, content)
    elif is_image_name(name):
        yield InputImage.at(path, name, source=content)
    else:
        skipped.add(Path(name))


def oversized(size: int) -> ImageError:
    """Return the error of a member with more than `MAX_MEMBER` bytes."""
    return ImageError(
        "oversized_member", f"it claims {size:,} bytes, over the limit of {MAX_MEMBER:,} for an image in an archive"
    )


class Link(NamedTuple):
    """A link to `target`: a path in the archive if it is a hard link, else one from the link's folder."""

    target: str
    hard: bool

    def error(self, why: str) -> ImageError:
        """Return the error of a link that is not followed."""
        kind = "hard" if self.hard else "symbolic"
        # a path of any length may be claimed
        return ImageError("unsupported_member", f"it is a {kind} link to {escape_name(self.target[:200])}, {why}")


def normalize_name(name: str) -> str:
    """Return a member's path from the archive's root, as links find it."""
    return posixpath.normpath(name).lstrip("/")


def parents(path: str, *, itself: bool) -> Iterator[str]:
    """Yield the folders around a normalised path, and the path `itself` if it is a folder."""
    # a header may claim a name of a million folders
    if len(path) <= MAX_PATH:
        folder = path if itself else posixpath.dirname(path)
        while folder not in ("", "/"):
            yield folder
            folder = posixpath.dirname(folder)


def resolve_link(name: str, link: Link, links: Mapping[str, Link]) -> str:
    """Return the normalised path that a link leads to, through other links; it need not exist.

    Args:
        name: of the link, normalised.
        link: where it leads.
        links: all links in the archive, by normalised name.

    Raises:
        ImageError: `unsupported_member`: it leads out of the archive, or in a circle.
    """
    # the path so far, and the parts that remain, the next one last
    resolved, remaining = name.split("/"), list[str]()
    followed = characters = 0
    current: Link | None = link
    while current is not None or remaining:
        if current is not None:
            followed, characters = followed + 1, characters + len(current.target)
            if followed > _MAX_LINKS or characters > MAX_PATH:
                raise link.error("which leads in a circle")
            if current.target.startswith("/") and not current.hard:
                raise link.error(_OUTSIDE)
            resolved = [] if current.hard else resolved[:-1]
            remaining += current.target.split("/")[::-1]
            current = None
            continue
        part = remaining.pop()
        if part == "..":
            if not resolved:
                raise link.error(_OUTSIDE)
            resolved.pop()
        elif part not in ("", "."):
            resolved.append(part)
            current = links.get("/".join(resolved))
    return "/".join(resolved)
