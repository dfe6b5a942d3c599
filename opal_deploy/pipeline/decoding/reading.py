"""Files whose reading is timed apart from their decoding.

A decoder reads as it goes, and what it never asks for is never read: a file of any length may be called .jpg, and a
header that claims too many pixels ends the matter. So reading is timed where it happens, in each call that asks the
system for bytes, and every picture is read exactly as without a clock. (libtiff reads compressed TIFF through the
file's descriptor by itself; that part counts as decoding.)
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from opal_deploy.pipeline.stages import NullClock, StageClock
from opal_deploy.preprocess.decode import Place, open_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Pillow asks for 64 KiB at a time
_BLOCK = 1 << 16


def opener(clock: StageClock) -> Callable[[Place], BinaryIO]:
    """`open_file` whose time, and that of every read of what it returns, counts as the clock's stage `read`."""
    if isinstance(clock, NullClock):
        return open_file

    def opened(place: Place) -> BinaryIO:
        with clock.stage("read"):
            stream = open_file(place)
            if not isinstance(place, Path):
                return cast(BinaryIO, io.BufferedReader(_TimedStream(stream, clock), _BLOCK))
            # a second descriptor of the same open file, which outlives the first
            with stream:
                file = _TimedFile(os.dup(stream.fileno()), clock)
        return cast(BinaryIO, io.BufferedReader(file, _BLOCK))

    return opened


class _TimedFile(io.FileIO):
    def __init__(self, descriptor: int, clock: StageClock) -> None:
        super().__init__(descriptor, "rb")
        self._clock = clock

    def readinto(self, buffer: WriteableBuffer, /) -> int | None:
        with self._clock.stage("read"):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._clock.stage("read"):
            return super().readall()


class _TimedStream(io.RawIOBase):
    """What an Openable opened, which may have no descriptor."""

    def __init__(self, stream: BinaryIO, clock: StageClock) -> None:
        self._stream, self._clock = stream, clock

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        with self._clock.stage("read"):
            found = self._stream.read(len(target))
        target[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._clock.stage("read"):
            return self._stream.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()
