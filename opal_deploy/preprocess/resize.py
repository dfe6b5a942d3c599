"""From an image to a model's input: crop, resize to H0 x W0, normalise; and to an image to draw on.

As the paper's authors evaluate: straight to the input size, aspect ratio not kept, antialiased bilinear (Pillow's, or
cykooz.resizer's, which differs by at most 1 count); or by another rule of `artifact.preprocessing`. The crop comes
first, so that pixels outside the box do not bleed in at its edge.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.preprocessing import InputForm, ResizeRule
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.preprocess.geometry import Geometry

try:
    import cykooz_resizer
except Exception:  # no wheel, or one that does not load on this processor: Pillow can do it
    cykooz_resizer = None

# limits of an image to draw on: enough for a screen, and bounded memory per image in flight
MAX_DISPLAY_PIXELS, MAX_DISPLAY_SIDE = 2_000_000, 4096

# a filter has two 8-byte weights per pixel of a side: on a longer side, whole pixels are averaged first
_MAX_SIDE = 1_000_000
_thread_local = threading.local()
# grey of a letterbox's bars
BARS = 114
# the brightest value of 12 bits read as 16
_NEARLY_BLACK = 16


def is_nearly_black(pixels: NDArray[np.uint8]) -> bool:
    """Return whether an image, its bars left out, uses a sixteenth of its range at most, as 12-bit data do."""
    return bool(pixels.min() <= _NEARLY_BLACK and np.where(pixels == BARS, 0, pixels).max() <= _NEARLY_BLACK)


def fit_input(
    image: Image.Image, geometry: Geometry, form: InputForm, decoding: Decoding = Decoding.default, *, bars: int = BARS
) -> tuple[NDArray[np.uint8], Geometry]:
    """Crop and resize an image to a model's input; return that, uint8 [H0, W0, 3], RGB, and the part that it shows.

    The part is in whole pixels; with a letterbox it reaches beyond the image, to the ends of the bars.

    Args:
        image: RGB, oriented, whole; or the smaller version from `decode_scaled`, without a crop.
        geometry: the crop, in pixels of the whole image.
        form: (H0, W0) and the resize rule.
        decoding: with `exact`, Pillow resizes; otherwise a faster library may.
        bars: grey of a letterbox's bars, 0 ... 255.
    """
    region, (x0, y0, x1, y1) = image, geometry.crop
    if geometry.crop != (0, 0, geometry.width, geometry.height):
        region = image.crop(geometry.crop)
    if max(region.size) > _MAX_SIDE:
        region = region.reduce((-(-region.width // _MAX_SIDE), -(-region.height // _MAX_SIDE)))
    (width, height), (left, top) = form.rule.fit((x1 - x0, y1 - y0), form.size)
    if form.rule == ResizeRule() and decoding is not Decoding.exact:
        faster = _resize_faster(region, (width, height))
        if faster is not None:
            return faster, geometry
    # Pillow's filters have the names of the rule's
    resized = region.resize((width, height), Image.Resampling[form.rule.filter.upper()])
    if form.rule.kind == "squash":
        return np.asarray(resized), geometry
    right, bottom = left + form.width, top + form.height
    across, down = (x1 - x0) / width, (y1 - y0) / height
    shown = (
        round(x0 + left * across), round(y0 + top * down), round(x0 + right * across), round(y0 + bottom * down)
    )  # fmt: skip
    if form.rule.kind == "letterbox":
        barred = Image.new("RGB", (form.width, form.height), (bars,) * 3)
        barred.paste(resized, (-left, -top))
        return np.asarray(barred), replace(geometry, crop=shown)
    shown = max(x0, shown[0]), max(y0, shown[1]), min(x1, shown[2]), min(y1, shown[3])
    return np.asarray(resized.crop((left, top, right, bottom))), replace(geometry, crop=shown)


def _resize_faster(image: Image.Image, size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """Resize an RGB image to `size` = (width, height), within 1 count of Pillow; None if Pillow has to do it.

    cykooz.resizer resizes the rows, which are most of the work: they differ by 1 where a value lies halfway. Pillow
    resizes the columns: with both done by the library, one image in 500 had a value that was off by 2.
    """
    if cykooz_resizer is None or size[0] >= image.width:
        return None
    if not hasattr(_thread_local, "resizer"):
        # one per thread, since it keeps buffers
        bilinear = cykooz_resizer.ResizeAlg.convolution(cykooz_resizer.FilterType.bilinear)
        options = cykooz_resizer.ResizeOptions(resize_alg=bilinear, use_alpha=False)
        _thread_local.resizer = cykooz_resizer.Resizer(), options
    resizer, options = _thread_local.resizer
    narrow = Image.new("RGB", (size[0], image.height))
    resizer.resize_pil(image, narrow, options)
    return np.asarray(narrow.resize(size, Image.Resampling.BILINEAR))


def display_size(width: int, height: int) -> tuple[int, int]:
    """Return the (width, height) of an image to draw on: its own up to 2 megapixels and 4096 pixels per side."""
    share = min(1.0, MAX_DISPLAY_SIDE / max(width, height), math.sqrt(MAX_DISPLAY_PIXELS / (width * height)))
    return max(1, math.floor(width * share)), max(1, math.floor(height * share))


def to_display(image: Image.Image) -> Image.Image:
    """Return an RGB image reduced to its `display_size`, or itself if it is not larger."""
    size = display_size(*image.size)
    # whole pixels are averaged first, which takes a fraction of the time and memory
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def normalise(images: NDArray[np.uint8], mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Return float32 [N, 3, H0, W0], `(v / 255 - mean) / std` by channel, for images uint8 [N, H0, W0, 3]."""
    scaled = images.astype(np.float32) / np.float32(255.0)
    normalised = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))
