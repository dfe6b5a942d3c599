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
from opal_deploy.preprocess.decode import Decoding, decode_for
from opal_deploy.preprocess.resize import to_input

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class PathResult:
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


def _ours(decoding: Decoding, path: Path, size: tuple[int, int]) -> Pixels:
    image, geometry = decode_for(path, size, decoding=decoding)
    return to_input(image, geometry, size, decoding)


def _pillow(path: Path, size: tuple[int, int]) -> Pixels:
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(upright.resize(size[::-1], Image.Resampling.BILINEAR))


# every way in which `infer` and the trainer come by their pixels
PATHS: dict[str, Callable[[Path, tuple[int, int]], Pixels]] = {
    decoding.value: partial(_ours, decoding) for decoding in Decoding
}


class _Stopwatch:
    """Seconds by the clock and of the processor, summed over blocks."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.thread_time() - self._cpu


def compare(paths: list[Path], size: tuple[int, int]) -> list[PathResult]:
    """Each decode path against plain Pillow on every picture that Pillow can read; the two timed alternately."""
    return [_against_pillow(name, decoder, paths, size) for name, decoder in PATHS.items()]


def _against_pillow(
    name: str, decoder: Callable[[Path, tuple[int, int]], Pixels], paths: list[Path], size: tuple[int, int]
) -> PathResult:
    ours, pillow = _Stopwatch(), _Stopwatch()
    largest, total, equal, count, images = 0, 0, 0, 0, 0
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
            expected = _pillow(path, size)
        difference = np.abs(found.astype(np.int16) - expected.astype(np.int16))
        largest = max(largest, int(difference.max()))
        total, equal = total + int(difference.sum()), equal + int((difference == 0).sum())
        count, images = count + difference.size, images + 1
    return PathResult(
        name,
        images,
        largest,
        mean=total / count if count else 0.0,
        share_equal=equal / count if count else 1.0,
        pillow_per_second=_ratio(images, pillow.wall),
        path_per_second=_ratio(images, ours.wall),
        pillow_cpu_milliseconds=_ratio(1000 * pillow.cpu, images),
        path_cpu_milliseconds=_ratio(1000 * ours.cpu, images),
    )


def _ratio(value: float, by: float) -> float:
    return value / by if by else 0.0
