"""Do our decode paths give plain Pillow's pixels, and how fast?

The reference is written out here with Pillow alone: open, apply EXIF orientation, convert to RGB, resize.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from opal_deploy.errors import ImageError
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.resize import lay_out, to_input

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class PathResult:
    """One decode path against plain Pillow.

    Attributes:
        name: of the path. images: compared. largest, mean: absolute differences in counts of 0-255.
        per_second: pictures a second on one thread, Pillow's own and this path's.
    """

    name: str
    images: int
    largest: int
    mean: float
    pillow_per_second: float
    path_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _ours(path: Path, size: tuple[int, int]) -> Pixels:
    image = decode(path)
    return to_input(image, lay_out(image), size)


def _pillow(path: Path, size: tuple[int, int]) -> Pixels:
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(upright.resize(size[::-1], Image.Resampling.BILINEAR))


# every way in which `infer` and the trainer come by their pixels
PATHS: dict[str, Callable[[Path, tuple[int, int]], Pixels]] = {"default": _ours}


def compare(paths: list[Path], size: tuple[int, int]) -> list[PathResult]:
    """Each decode path against plain Pillow on every picture that Pillow can read; the two timed alternately."""
    results = []
    for name, decoder in PATHS.items():
        largest, total, count, images = 0, 0, 0, 0
        seconds = {"pillow": 0.0, "ours": 0.0}
        for path in paths:
            started = time.perf_counter()
            try:
                found = decoder(path, size)
            except ImageError:
                continue
            middle = time.perf_counter()
            expected = _pillow(path, size)
            seconds["ours"] += middle - started
            seconds["pillow"] += time.perf_counter() - middle
            difference = np.abs(found.astype(np.int16) - expected.astype(np.int16))
            largest = max(largest, int(difference.max()))
            total, count, images = total + int(difference.sum()), count + difference.size, images + 1
        mean = total / count if count else 0.0
        results.append(PathResult(name, images, largest, mean, images / seconds["pillow"], images / seconds["ours"]))
    return results
