"""Members of archives: which of them are images, what stands for one as an item, and where links between them lead."""

from __future__ import annotations

import io
import posixpath
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.items import Skipped, is_image_name
from opal_deploy.inference.types import InputImage, Location
from opal_deploy.preprocess.decode import Source, open_file
from opal_deploy.records.names import escape_name
from opal_deploy.storage.files import READ_AHEAD_BYTES, FileFingerprint

# APPNOTE 4.3.7: signature, flags, method, CRC-32, packed size, size, lengths of name and extra field
_LOCAL_HEADER = struct.Struct("<4s2xHH4xLLLHH")
LOCAL_SIGNATURE = b"PK\x03\x04"
# the header itself, a name and an extra field of ordinary length; a member of more bytes is read by two requests
_HEADER_SLACK, _MAX_AHEAD = 1024, 64 << 20


def open_archive(
    archive: Location, fingerprint: FileFingerprint | None = None, read_ahead: int = READ_AHEAD_BYTES
) -> BinaryIO:
    """Open an archive; one that has a URL is read by ranges.

    Args:
        archive: its path or URL.
        fingerprint: when it was listed; None: it is listed now.
        read_ahead: bytes that a request asks for at least, where it has a URL.

    Raises:
        ImageError: not_found, not_a_file, unreadable: also where it is no longer the one that was listed.
    """
    if not isinstance(archive, Path):
        return replace(archive, fingerprint=fingerprint or archive.fingerprint).open_ranges(read_ahead)
    stream = open_file(archive)
    if fingerprint is not None and FileFingerprint.read(stream) != fingerprint:
        stream.close()
        raise changed(archive)
    return stream


def changed(archive: Location) -> ImageError:
    """Return the error of an archive whose members may be others than were listed."""
    return ImageError("unreadable", f"{archive.name} was changed while its members were read")


class ZipLocalHeader(NamedTuple):
    """The header in front of a zip member's bytes."""

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
        """Return the header at `offset` and leave the stream at the member's name; None if there is no header."""
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
        offset: of the first byte; of the local header for a zip's member.
        length: bytes in the archive, without the header.
        size: bytes that `open` gives; other than `length` where these are deflated.
        zipped: whether a zip's local header comes before the bytes.
        deflated: whether the bytes in the archive are a raw deflate stream.
        crc: CRC-32 of the bytes that `open` gives; None where the archive has no checksum.
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
        """Return the checked bytes as a seekable stream in memory.

        Raises:
            ImageError: not_found, not_a_file, unreadable (also: the archive was changed since it was listed, so that
                the bytes might be those of another image), truncated_image, corrupt_image.
            OSError: reading failed.
        """
        # with what follows the header of a zip's member, all of it comes by one request
        ahead = self.length + _HEADER_SLACK if self.zipped else 1
        with open_archive(self.path, self.fingerprint, min(ahead, _MAX_AHEAD)) as stream:
            stream.seek(self.offset + (self._header_length(stream) if self.zipped else 0))
            data = stream.read(self.length)
        if len(data) < self.length:
            raise ImageError("truncated_image", "the archive ends inside it")
        if self.deflated:
            data = self._inflate(data)
        if len(data) != self.size or (self.crc is not None and zlib.crc32(data) != self.crc):
            raise ImageError("corrupt_image", "its bytes do not have the size and the checksum in the archive")
        return io.BytesIO(data)

    def _header_length(self, stream: BinaryIO) -> int:
        header = ZipLocalHeader.read(stream, self.offset)
        if header is None:
            raise ImageError("corrupt_image", "the archive has no member where its directory says")
        return header.length

    def _inflate(self, data: bytes) -> bytes:
        try:
            # one byte more than stated at most: the stated size was compared with the limit, the real one was not
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.size + 1)
        except zlib.error as error:
            raise ImageError("corrupt_image", f"it cannot be inflated: {error}") from None


# 100 megapixels of 16-bit RGB fit; no photograph takes more
MAX_MEMBER = 512 << 20

# links on the way to one file, as on Linux, and characters of a path, as on macOS
_MAX_LINKS, MAX_PATH = 40, 1024
_OUTSIDE = "which lies outside the archive; pack what it leads to"


class ArchiveError(Exception):
    """An archive cannot be read on from here; the message says where and why."""


def is_hidden(name: str) -> bool:
    """Return whether a member or one of its folders is hidden, as the file `__MACOSX/._x.jpg` is."""
    return any(part.startswith(".") and part not in (".", "..") for part in re.split(r"[/\\]", name))


def member_items(
    archive: Location, name: str, content: Source | ImageError | None, skipped: Skipped
) -> Iterator[InputImage]:
    """Yield a member as an item; count it where it is none: a link to a folder, or to a file but no image by its name.

    A member's name is only a label: `..`, a leading slash or a NUL lead nowhere.

    Args:
        archive: its path or URL.
        name: of the member.
        content: where its bytes are, or what is wrong with it; None: it is a link to a folder in the archive.
        skipped: counts what is no item.
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
    """Return the error of a member of more than `MAX_MEMBER` bytes."""
    return ImageError(
        "oversized_member", f"it claims {size:,} bytes, over the limit of {MAX_MEMBER:,} for an image in an archive"
    )


class Link(NamedTuple):
    """A link between members.

    Attributes:
        target: as the archive has it.
        hard: the target is a path in the archive, not one from the folder of the link.
    """

    target: str
    hard: bool

    def error(self, why: str) -> ImageError:
        """Return the error of a link that is not followed."""
        kind = "hard" if self.hard else "symbolic"
        # a path of any length may be claimed
        return ImageError("unsupported_member", f"it is a {kind} link to {escape_name(self.target[:200])}, {why}")


def normalize_name(name: str) -> str:
    """Return a member's path from the archive's root, by which links find it."""
    return posixpath.normpath(name).lstrip("/")


def parents(path: str, *, itself: bool) -> Iterator[str]:
    """Yield the folders that a normalised path lies in, and `itself` where it is one."""
    # a header may claim a name of a million folders
    if len(path) <= MAX_PATH:
        folder = path if itself else posixpath.dirname(path)
        while folder not in ("", "/"):
            yield folder
            folder = posixpath.dirname(folder)


def resolve_link(name: str, link: Link, links: Mapping[str, Link]) -> str:
    """Return the normalised path that a link leads to, through any others; nothing may be there.

    Args:
        name: of the link, normalised.
        link: where it leads.
        links: all of the archive, by their normalised names.

    Raises:
        ImageError: unsupported_member: it leads out of the archive, or in a circle.
    """
    # the path as far as it is walked, and its parts still to walk, the next one last
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
