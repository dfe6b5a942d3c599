"""Bytes inside a larger file: a member of an uncompressed tar, or of a zip.

A `ByteRange` is small and picklable, so that whichever process decodes a member opens the archive by itself. Members of
a zip are not opened with `zipfile`, which would read the directory of the whole archive in each of these processes.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import open_file

# APPNOTE 4.3.7: signature, flags, method, CRC-32, packed size, size, lengths of name and extra field
_LOCAL_HEADER = struct.Struct("<4s2xHH4xLLLHH")
LOCAL_SIGNATURE = b"PK\x03\x04"


class FileFingerprint(NamedTuple):
    """Size in bytes and time of the last change of a file: another fingerprint, another content."""

    size: int
    mtime_ns: int

    @classmethod
    def read(cls, stream: BinaryIO) -> FileFingerprint:
        """Return the fingerprint of an opened file."""
        status = os.fstat(stream.fileno())
        return cls(status.st_size, status.st_mtime_ns)


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
        path: the archive.
        fingerprint: of the archive when it was listed.
        offset: of the first byte; of the local header for a zip's member.
        length: bytes in the archive, without the header.
        size: bytes that `open` gives; other than `length` where these are deflated.
        zipped: whether a zip's local header comes before the bytes.
        deflated: whether the bytes in the archive are a raw deflate stream.
        crc: CRC-32 of the bytes that `open` gives; None where the archive has no checksum.
    """

    path: Path
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
        with open_file(self.path) as stream:
            if FileFingerprint.read(stream) != self.fingerprint:
                raise ImageError("unreadable", f"{self.path.name} was changed while its members were read")
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
