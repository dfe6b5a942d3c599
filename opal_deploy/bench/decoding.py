"""Compare our decode paths with plain Pillow: pixel differences and speed.

The reference is written with Pillow alone: open, apply the EXIF orientation, convert to RGB, resize.
"""

from __future__ import annotations

import contextlib
import itertools
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
from opal_deploy.preprocess.decode import Decoding, decode_for_input
from opal_deploy.preprocess.resize import to_input

Pixels = NDArray[np.uint8]
DecodePath = Callable[[Path, tuple[int, int]], Pixels]


@dataclass(frozen=True)
class DecodePathResult:
    """One decode path against plain Pillow.

    Attributes:
        name: of the decode path.
        images: number of images compared.
        largest, mean: absolute differences in counts of 0-255.
        share_equal: share of the values that are equal, 0 ... 1.
        pillow_per_second, path_per_second: images per second on one thread.
        pillow_cpu_milliseconds, path_cpu_milliseconds: CPU time an image, less disturbed by other processes.
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
        """Return the result for JSON."""
        return asdict(self)


class _Stopwatch:
    """Wall and CPU seconds of this thread, summed over blocks."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> None:
        self._wall_start, self._cpu_start = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._wall_start
        self.cpu += time.thread_time() - self._cpu_start


@dataclass
class _PixelDifference:
    """Differences of two sets of pixels, summed over images."""

    images: int = 0
    largest: int = 0
    total: int = 0
    equal: int = 0
    count: int = 0

    def add(self, pixels: Pixels, expected: Pixels) -> None:
        difference = np.abs(pixels.astype(np.int16) - expected.astype(np.int16))
        self.images += 1
        self.largest = max(self.largest, int(difference.max()))
        self.total += int(difference.sum())
        self.equal += int((difference == 0).sum())
        self.count += difference.size

    def result(self, name: str, path: _Stopwatch, pillow: _Stopwatch) -> DecodePathResult:
        return DecodePathResult(
            name,
            self.images,
            self.largest,
            mean=self.total / self.count if self.count else 0.0,
            share_equal=self.equal / self.count if self.count else 1.0,
            pillow_per_second=_ratio(self.images, pillow.wall),
            path_per_second=_ratio(self.images, path.wall),
            pillow_cpu_milliseconds=_ratio(1000 * pillow.cpu, self.images),
            path_cpu_milliseconds=_ratio(1000 * path.cpu, self.images),
        )


def compare_paths(
    files: list[Path], size: tuple[int, int], progress: Callable[[int, int], None] = lambda done, total: None
) -> list[DecodePathResult]:
    """Compare each decode path with plain Pillow on every readable image, timed alternately.

    Args:
        files: images.
        size: (height, width) to resize to.
        progress: called after each image with images done and in all, over all paths.
    """
    done, total = itertools.count(1), len(files) * len(DECODE_PATHS)

    def report() -> None:
        progress(next(done), total)

    return [_compare_path(name, decode, files, size, report) for name, decode in DECODE_PATHS.items()]


def _compare_path(
    name: str, decode: DecodePath, files: list[Path], size: tuple[int, int], report: Callable[[], None]
) -> DecodePathResult:
    path_time, pillow_time = _Stopwatch(), _Stopwatch()
    difference = _PixelDifference()
    # the first image imports the libraries
    for file in files[:1]:
        with contextlib.suppress(ImageError):
            decode(file, size)
    for file in files:
        report()
        try:
            with path_time:
                pixels = decode(file, size)
        except ImageError:
            continue
        with pillow_time:
            expected = _decode_with_pillow(file, size)
        difference.add(pixels, expected)
    return difference.result(name, path_time, pillow_time)


def _decode(decoding: Decoding, file: Path, size: tuple[int, int]) -> Pixels:
    image, geometry = decode_for_input(file, size, decoding=decoding)
    return to_input(image, geometry, size, decoding)


def _decode_with_pillow(file: Path, size: tuple[int, int]) -> Pixels:
    with Image.open(file) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(upright.resize(size[::-1], Image.Resampling.BILINEAR))


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0


# the decode paths of `infer` and of training
DECODE_PATHS: dict[str, DecodePath] = {decoding.value: partial(_decode, decoding) for decoding in Decoding}
