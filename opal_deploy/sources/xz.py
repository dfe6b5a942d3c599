"""The decompressed bytes of xz files, in bounded memory."""

from __future__ import annotations

import io
import lzma
import os
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# for a stream's dictionary: xz -9 needs 65 MiB, and a header may claim 4 GiB
XZ_MEMORY = 256 << 20
_CHUNK = 1 << 20


class XzReader(io.RawIOBase):
    """The decompressed bytes of an xz file, in bounded memory, which `lzma.open` cannot guarantee."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._restart()

    def _restart(self) -> None:
        self._file.seek(0)
        self._position = 0
        self._decompressor: lzma.LZMADecompressor | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET:
            raise io.UnsupportedOperation("seeks from the beginning only")
        if offset < self._position:
            self._restart()
        while self._position < offset and self.read(min(_CHUNK, offset - self._position)):
            pass
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = b""
        while not data:
            decompressor, packed = self._decompressor, b""
            if decompressor is None or decompressor.eof:
                # zeros may stand between streams
                packed = (b"" if decompressor is None else decompressor.unused_data).lstrip(b"\0")
                while not packed and (chunk := self._file.read(_CHUNK)):
                    packed = chunk if decompressor is None else chunk.lstrip(b"\0")
                if not packed:
                    return 0
                decompressor = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            elif decompressor.needs_input and not (packed := self._file.read(_CHUNK)):
                raise EOFError("it ends inside an xz stream")
            data = decompressor.decompress(packed, len(view))
            self._decompressor = decompressor
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def open_xz(file: BinaryIO) -> BinaryIO:
    """Open a file of one or more xz streams; seeking back reads it from the beginning again."""
    return cast(BinaryIO, io.BufferedReader(XzReader(file)))
