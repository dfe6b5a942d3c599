"""Two libraries that do Pillow's work faster: simplejpeg (libjpeg-turbo) decodes, cykooz.resizer (Rust) resizes.

The package requires both; where one cannot be imported (no wheel for the platform), Pillow does its work, and
`missing_libraries` reports it. simplejpeg gives Pillow's pixels bit for bit for the files that it is given here;
cykooz.resizer is within 1 count of Pillow, see `resize`.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_TASKS = {"simplejpeg": "JPEG files are decoded", "cykooz_resizer": "images are resized"}
_thread_local = threading.local()


def decode_jpeg(data: bytes, at_least: tuple[int, int] | None = None) -> Image.Image | None:
    """Return an undamaged JPEG of one or three components as an RGB image; None if Pillow has to decode it.

    `at_least` = (height, width) allows a half, a quarter or an eighth of the size that is not smaller.
    """
    simplejpeg = _library("simplejpeg")
    if simplejpeg is None:
        return None
    height, width = at_least or (0, 0)
    # between half and full size, scaled decoding takes longer than decoding everything
    factor = 2.0 if at_least else 1.0
    try:
        # strict: a warning of the decoder is an error, which Pillow may judge in its own way
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, min_factor=factor, strict=True)
    except Exception:
        return None
    return Image.frombuffer("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGB", 0, 1)


def resize(image: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """Resize an RGB image to `size` = (width, height): uint8 [height, width, 3], within 1 count of Pillow.

    Pillow resizes rows, rounds, then resizes columns. The library resizes the rows, which are most of the work: they
    differ by 1 where a value lies halfway. Pillow resizes the columns, which adds no difference; with both done by the
    library, one image in 500 had a value that was off by 2. None if Pillow has to resize.
    """
    library = _library("cykooz_resizer")
    if library is None or size[0] >= image.width:
        return None
    if not hasattr(_thread_local, "resizer"):
        # one per thread, since it keeps buffers
        bilinear = library.ResizeAlg.convolution(library.FilterType.bilinear)
        _thread_local.resizer = library.Resizer(), library.ResizeOptions(resize_alg=bilinear, use_alpha=False)
    resizer, options = _thread_local.resizer
    narrow = Image.new("RGB", (size[0], image.height))
    resizer.resize_pil(image, narrow, options)
    return np.asarray(narrow.resize(size, Image.Resampling.BILINEAR))


def missing_libraries() -> list[str]:
    """Return one line for each library that cannot be imported here."""
    return [
        f"{name} cannot be imported, so {work} by Pillow alone: the same results, more slowly"
        for name, work in _TASKS.items()
        if _library(name) is None
    ]


@cache
def _library(name: str) -> Any:
    try:
        if name == "simplejpeg":
            import simplejpeg

            return simplejpeg
        import cykooz_resizer

        return cykooz_resizer
    except Exception:  # no wheel, or one that does not load on this processor: Pillow can do it
        return None
