"""Do our decode paths give plain Pillow's pixels, and how fast?

The reference is written out here with Pillow alone: open, apply EXIF orientation, convert to RGB, resize.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import MAX_PIXELS, Decoding, decode_for_input
from opal_deploy.preprocess.gpu import GpuDecoder, read_header
from opal_deploy.preprocess.resize import to_input

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class DecodePathResult:
    """One decode path against plain Pillow.

    Attributes:
        name: of the path. images: compared. largest, mean: absolute differences in counts of 0-255.
        share_equal: of the values, those that do not differ at all.
        per_second: pictures a second on one thread, Pillow's own and this path's.
        cpu_milliseconds: processor time a picture, which other work on the machine disturbs less; likewise.
    """

    name: str
    images: int
    largest: int
    mean: float
    share_equal: float
    pillow_per_second: float
    path_per_second: float
    pillow_cpu_milliseconds: float
    path_cpu_milliseconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _decode(decoding: Decoding, path: Path, size: tuple[int, int]) -> Pixels:
    image, geometry = decode_for_input(path, size, decoding=decoding)
    return to_input(image, geometry, size, decoding)


def _decode_with_pillow(path: Path, size: tuple[int, int]) -> Pixels:
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(upright.resize(size[::-1], Image.Resampling.BILINEAR))


# every way in which `infer` and the trainer come by their pixels on the CPU
DECODE_PATHS: dict[str, Callable[[Path, tuple[int, int]], Pixels]] = {
    decoding.value: partial(_decode, decoding) for decoding in Decoding if decoding is not Decoding.gpu
}
# files a call of the GPU's decoder
_GPU_BATCH = 64


class _Stopwatch:
    """Seconds by the clock and of the processor, summed over blocks.

    `whole_process`: the processor time of all its threads, not of this one; a library's own belong to it.
    """

    def __init__(self, *, whole_process: bool = False) -> None:
        self.wall = self.cpu = 0.0
        self._processor = time.process_time if whole_process else time.thread_time

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), self._processor()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._wall
        self.cpu += self._processor() - self._cpu


@dataclass
class _Difference:
    """Of two sets of pixels, summed over pictures."""

    images: int = 0
    largest: int = 0
    total: int = 0
    equal: int = 0
    count: int = 0

    def add(self, found: Pixels, expected: Pixels) -> None:
        difference = np.abs(found.astype(np.int16) - expected.astype(np.int16))
        self.images += 1
        self.largest = max(self.largest, int(difference.max()))
        self.total += int(difference.sum())
        self.equal += int((difference == 0).sum())
        self.count += difference.size

    def result(self, name: str, ours: _Stopwatch, pillow: _Stopwatch) -> DecodePathResult:
        return DecodePathResult(
            name,
            self.images,
            self.largest,
            mean=self.total / self.count if self.count else 0.0,
            share_equal=self.equal / self.count if self.count else 1.0,
            pillow_per_second=_ratio(self.images, pillow.wall),
            path_per_second=_ratio(self.images, ours.wall),
            pillow_cpu_milliseconds=_ratio(1000 * pillow.cpu, self.images),
            path_cpu_milliseconds=_ratio(1000 * ours.cpu, self.images),
        )


def compare_cpu_paths(paths: list[Path], size: tuple[int, int]) -> list[DecodePathResult]:
    """Each decode path on the CPU against plain Pillow on every picture that Pillow can read; timed alternately."""
    return [_against_pillow(name, decoder, paths, size) for name, decoder in DECODE_PATHS.items()]


def _against_pillow(
    name: str, decoder: Callable[[Path, tuple[int, int]], Pixels], paths: list[Path], size: tuple[int, int]
) -> DecodePathResult:
    ours, pillow = _Stopwatch(), _Stopwatch()
    difference = _Difference()
    # the libraries are imported by the first picture, whatever becomes of it
    for path in paths[:1]:
        with contextlib.suppress(ImageError):
            decoder(path, size)
    for path in paths:
        try:
            with ours:
                found = decoder(path, size)
        except ImageError:
            continue
        with pillow:
            expected = _decode_with_pillow(path, size)
        difference.add(found, expected)
    return difference.result(name, ours, pillow)


def compare_gpu_path(paths: list[Path], size: tuple[int, int], gpu: GpuDecoder) -> DecodePathResult:
    """The GPU's decode path, in batches from files in memory, against plain Pillow on every picture that it takes.

    Processor time is that of the whole process here: the codec has threads of its own.
    """
    ours, pillow = _Stopwatch(whole_process=True), _Stopwatch()
    difference = _Difference()
    for start in range(0, len(paths), _GPU_BATCH):
        batch = paths[start : start + _GPU_BATCH]
        with ours:
            headers = [(path, read_header(path.read_bytes(), None, MAX_PIXELS)) for path in batch]
            files = [(path, file) for path, file in headers if file is not None]
            pictures = gpu.decode([file for _, file in files])
            taken = [(path, file, one) for (path, file), one in zip(files, pictures, strict=True) if one is not None]
            if not taken:
                continue
            found = gpu.resize_to_inputs([one for *_, one in taken], [file.geometry for _, file, _ in taken], size)
        for (path, *_), pixels in zip(taken, found, strict=True):
            with pillow:
                expected = _decode_with_pillow(path, size)
            difference.add(pixels, expected)
    return difference.result(f"gpu ({gpu.device})", ours, pillow)


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0
