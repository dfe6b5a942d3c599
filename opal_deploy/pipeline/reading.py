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
from opal_deploy.preprocess.decode import open_file

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Pillow asks for 64 KiB at a time
_BLOCK = 1 << 16


def opener(clock: StageClock) -> Callable[[Path], BinaryIO]:
    """`open_file` whose time, and that of every read of the file it returns, counts as the clock's stage `read`."""
    if isinstance(clock, NullClock):
        return open_file

    def opened(path: Path) -> BinaryIO:
        with clock.stage("read"):
            stream = open_file(path)
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
