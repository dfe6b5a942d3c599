"""Bytes inside a larger file: a member of an uncompressed tar, or of a zip.

They are small and picklable: whoever decodes a member, in whatever process, opens the archive itself. An archive that
was changed since it was listed gives no bytes at all, for they might be those of another picture.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import open_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# size and time of last change
Stamp = tuple[int, int]

STORED, DEFLATED = 0, 8
# signature, 22 bytes that the central directory repeats, lengths of name and extra field
LOCAL_HEADER = struct.Struct("<4s22xHH")
LOCAL_SIGNATURE = b"PK\x03\x04"


def stamp_of(stream: BinaryIO) -> Stamp:
    """What tells that a file is still the one that was listed."""
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class FilePart:
    """`length` bytes of a file from `offset` on.

    Attributes:
        stamp: of the file when it was listed; None: not compared.
    """

    path: Path
    offset: int
    length: int
    stamp: Stamp | None = None

    @property
    def size(self) -> int:
        """Bytes that a reader gets."""
        return self.length

    def open(self) -> BinaryIO:
        """The bytes as a seekable stream.

        Raises:
            ImageError: not_found, not_a_file, unreadable.
        """
        return _window(_opened(self.path, self.stamp), self.offset, self.length)


@dataclass(frozen=True)
class ZipPart:
    """A member of a zip, stored or deflated.

    Attributes:
        header: offset of its local header.
        packed: bytes that it takes in the archive. size: bytes that a reader gets.
        method: STORED or DEFLATED. crc: of the bytes that a reader gets.
        stamp: of the archive when it was listed.
    """

    path: Path
    header: int
    packed: int
    size: int
    method: int
    crc: int
    stamp: Stamp | None = None

    def open(self) -> BinaryIO:
        """The member's bytes as a seekable stream; a deflated one's are checked against its checksum.

        Raises:
            ImageError: not_found, not_a_file, unreadable, truncated_image, corrupt_image.
        """
        stream = _opened(self.path, self.stamp)
        try:
            stream.seek(self.header)
            header = stream.read(LOCAL_HEADER.size)
            if len(header) < LOCAL_HEADER.size or not header.startswith(LOCAL_SIGNATURE):
                raise ImageError("corrupt_image", "the archive has no member where its directory says")
            _, name, extra = LOCAL_HEADER.unpack(header)
            start = self.header + LOCAL_HEADER.size + name + extra
            if self.method == STORED:
                return _window(stream, start, self.size)
            stream.seek(start)
            packed = stream.read(self.packed)
        except BaseException as error:
            stream.close()
            if isinstance(error, OSError):
                raise ImageError("unreadable", f"cannot be read: {error.strerror or error}") from None
            raise
        stream.close()
        return io.BytesIO(self._inflated(packed))

    def _inflated(self, packed: bytes) -> bytes:
        if len(packed) < self.packed:
            raise ImageError("truncated_image", "the archive ends inside it")
        try:
            # never more than it claims: the claim was compared with the limit
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, self.size + 1)
        except zlib.error as error:
            raise ImageError("corrupt_image", f"it cannot be inflated: {error}") from None
        if len(data) != self.size or zlib.crc32(data) != self.crc:
            raise ImageError("corrupt_image", "its bytes are not those of the archive's checksum")
        return data


def _opened(path: Path, stamp: Stamp | None) -> BinaryIO:
    stream = open_file(path)
    if stamp is not None and stamp_of(stream) != stamp:
        stream.close()
        raise ImageError("unreadable", f"{path.name} was changed while its members were read")
    return stream


def _window(stream: BinaryIO, start: int, length: int) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_Window(stream, start, length), 1 << 16))


class _Window(io.RawIOBase):
    """Part of a file as a file; closes what it looks into."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}, before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        if not wanted:
            return 0
        self._stream.seek(self._start + self._at)
        data = self._stream.read(len(wanted))
        wanted[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
