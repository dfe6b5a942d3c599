"""Bytes inside a larger file: a member of an uncompressed tar, or of a zip.

A `ByteRange` is small and picklable, so that whichever process decodes a member opens the archive by itself. Members of
a zip are not opened with `zipfile`, which would read the directory of the whole archive in each of these processes.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from opal_deploy.errors import ImageError
from opal_deploy.inference.sources.items import Location
from opal_deploy.preprocess.decode import open_file
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
