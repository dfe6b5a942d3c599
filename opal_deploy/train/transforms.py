"""The paper's augmentation of training images, as its authors coded it (Supp. B.2).

    resize to 232x232 -> geometric TrivialAugment -> horizontal flip -> random 95 to 100 % of the area, to 228x228
    -> photometric TrivialAugment -> random 224x224 crop

TrivialAugment (Müller and Hutter, 2021), as in torchvision's TrivialAugmentWide: one operation drawn uniformly, its
strength one of 31 from none to the strongest, its sign by a coin. All random numbers come from the caller's generator,
so an image's augmentation depends on nothing else; torchvision's own transforms draw from a global generator, which is
why they are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

# the authors' sizes for an input of 224 pixels; other inputs scale them
_REFERENCE_SIZE = 224
_RESIZE_SIZE = 232
_CROP_SIZE = 228
_MAX_TRANSLATE = 16.0

_MAX_SHEAR = 0.5
_MAX_ROTATE = 60.0
_MAX_LIGHT_CHANGE = 0.5
_MAX_COLOR_CHANGE = 0.02
_AREA_RANGE = (0.95, 1.0)
_ASPECT_RANGE = (3 / 4, 4 / 3)
_CROP_ATTEMPTS = 10
_NUM_STRENGTHS = 31

Operation = Callable[[Image.Image, np.random.Generator], Image.Image]


@dataclass(frozen=True)
class PaperAugmentation:
    """The augmentation from uint8 [H1, W1, 3], already resized to `resize_size`, to uint8 [H0, W0, 3].

    Attributes:
        input_size: (H0, W0).
    """

    input_size: tuple[int, int] = (_REFERENCE_SIZE, _REFERENCE_SIZE)

    @property
    def resize_size(self) -> tuple[int, int]:
        """(H1, W1), the size before augmentation: 232 for 224."""
        return _scale_size(self.input_size, _RESIZE_SIZE)

    @property
    def crop_size(self) -> tuple[int, int]:
        """(H, W) after the random resized crop: 228 for 224."""
        return _scale_size(self.input_size, _CROP_SIZE)

    def __call__(self, pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return one randomly augmented image; `pixels` is not changed."""
        height, width = self.input_size
        max_shift = (_MAX_TRANSLATE * width / _REFERENCE_SIZE, _MAX_TRANSLATE * height / _REFERENCE_SIZE)
        image = apply_geometric(Image.fromarray(pixels), rng, max_shift)
        if rng.random() < 0.5:
            image = F.horizontal_flip(image)
        top, left, rows, cols = sample_resized_crop(image, rng)
        image = F.resized_crop(image, top, left, rows, cols, list(self.crop_size), InterpolationMode.BILINEAR)
        image = apply_photometric(image, rng)
        top = int(rng.integers(image.height - height + 1))
        left = int(rng.integers(image.width - width + 1))
        return np.asarray(image.crop((left, top, left + width, top + height)))


def apply_geometric(
    image: Image.Image, rng: np.random.Generator, max_shift: tuple[float, float] = (16.0, 16.0)
) -> Image.Image:
    """Apply one of identity, shear (up to 0.5), translation (up to `max_shift` = (x, y) pixels), rotation (up to 60°).

    Uncovered corners are black and pixels are moved by nearest neighbour, as in torchvision's TrivialAugment.
    """
    choice = int(rng.integers(6))
    if choice == 1:
        return _affine(image, shear=(math.degrees(math.atan(_sample_signed(rng, _MAX_SHEAR))), 0.0))
    if choice == 2:
        return _affine(image, shear=(0.0, math.degrees(math.atan(_sample_signed(rng, _MAX_SHEAR)))))
    if choice == 3:
        return _affine(image, translate=(int(_sample_signed(rng, max_shift[0])), 0))
    if choice == 4:
        return _affine(image, translate=(0, int(_sample_signed(rng, max_shift[1]))))
    if choice == 5:
        return _as_pil(F.rotate(image, _sample_signed(rng, _MAX_ROTATE), InterpolationMode.NEAREST))
    return image


def apply_photometric(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Apply identity, brightness, contrast, sharpness, color, posterize (to 8 ... 2 bits), autocontrast, equalize."""
    choice = int(rng.integers(8))
    if choice == 1:
        return _as_pil(F.adjust_brightness(image, 1.0 + _sample_signed(rng, _MAX_LIGHT_CHANGE)))
    if choice == 2:
        return _as_pil(F.adjust_contrast(image, 1.0 + _sample_signed(rng, _MAX_LIGHT_CHANGE)))
    if choice == 3:
        return _as_pil(F.adjust_sharpness(image, 1.0 + _sample_signed(rng, _MAX_LIGHT_CHANGE)))
    if choice == 4:
        return _as_pil(F.adjust_saturation(image, 1.0 + _sample_signed(rng, _MAX_COLOR_CHANGE)))
    if choice == 5:
        return _as_pil(F.posterize(image, 8 - round(_sample_strength(rng, 6.0))))
    if choice == 6:
        return _as_pil(F.autocontrast(image))
    if choice == 7:
        return _as_pil(F.equalize(image))
    return image


def _affine(
    image: Image.Image, *, shear: tuple[float, float] = (0.0, 0.0), translate: tuple[int, int] = (0, 0)
) -> Image.Image:
    # TrivialAugment shears about the top left corner
    return _as_pil(
        F.affine(
            image, angle=0.0, translate=list(translate), scale=1.0, shear=list(shear),
            interpolation=InterpolationMode.NEAREST, center=[0.0, 0.0],
        )
    )  # fmt: skip


def sample_resized_crop(image: Image.Image, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw (top, left, rows, cols) by the rule of torchvision's RandomResizedCrop.

    At 95 % of the area most aspect ratios do not fit; when ten draws fail, the whole image is taken.
    """
    width, height = image.size
    # for inputs that are not square, ratios are relative to the image's own
    low, high = (math.log(ratio * width / height) for ratio in _ASPECT_RANGE)
    for _ in range(_CROP_ATTEMPTS):
        area = width * height * rng.uniform(*_AREA_RANGE)
        ratio = math.exp(rng.uniform(low, high))
        cols, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < cols <= width and 0 < rows <= height:
            return int(rng.integers(height - rows + 1)), int(rng.integers(width - cols + 1)), rows, cols
    return 0, 0, height, width


def _sample_strength(rng: np.random.Generator, maximum: float) -> float:
    # torchvision's float32: half of 16 pixels is 7.9999995, which is a shift of 7
    return float(torch.linspace(0.0, maximum, _NUM_STRENGTHS)[int(rng.integers(_NUM_STRENGTHS))])


def _sample_signed(rng: np.random.Generator, maximum: float) -> float:
    strength = _sample_strength(rng, maximum)
    return -strength if rng.random() < 0.5 else strength


def _scale_size(input_size: tuple[int, int], size: int) -> tuple[int, int]:
    height, width = input_size
    return round(height * size / _REFERENCE_SIZE), round(width * size / _REFERENCE_SIZE)


def _as_pil(image: Any) -> Image.Image:
    result: Image.Image = image
    return result
