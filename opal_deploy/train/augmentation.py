"""The paper's augmentation, and random erasing.

The augmentation as the authors coded it (Supp. B.2):

    resize to 232x232 -> geometric TrivialAugment -> horizontal flip -> random 95 to 100 % of the area, to 228x228
    -> photometric TrivialAugment -> random 224x224 crop

TrivialAugment (Müller and Hutter, 2021), as in torchvision's TrivialAugmentWide: one operation drawn uniformly, its
strength one of 31 from none to the strongest, its sign by a coin. torchvision's own transforms draw from a global
generator; here all random numbers come from the caller's, so an image's augmentation depends on nothing else.

Random erasing (Zhong et al., AAAI 2020) then covers a rectangle in half of the images with one colour: a slot that only
knows a class by two parts together fails where one of them is covered.
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
from torchvision.transforms.v2 import functional

# the authors' sizes for an input of 224 pixels; other inputs scale them
_REFERENCE_SIZE, _RESIZE_SIZE, _CROP_SIZE, _MAX_TRANSLATE = 224, 232, 228, 16.0
# shear as a tangent, rotation in degrees, changes of brightness, contrast and sharpness, and of saturation, as shares
_MAX_SHEAR, _MAX_ROTATE, _MAX_LIGHT_CHANGE, _MAX_COLOR_CHANGE = 0.5, 60.0, 0.5, 0.02
_AREA_RANGE, _ASPECT_RANGE, _CROP_ATTEMPTS = (0.95, 1.0), (3 / 4, 4 / 3), 10
_NUM_STRENGTHS = 31

# random erasing: how often, the rectangle's share of the image, and its height over its width
_ERASED, _ERASED_AREA, _ERASED_ASPECT = 0.5, (0.02, 0.25), (0.3, 3.3)

# typed as functions of tensors; they take and return PIL images too
F: Any = functional


@dataclass(frozen=True)
class PaperAugmentation:
    """The augmentation from uint8 [H1, W1, 3], already resized to `resize_size`, to uint8 [H0, W0, 3] of `input_size`.

    A fourth channel, for regions, moves with the pixels and keeps its values.
    """

    input_size: tuple[int, int] = (_REFERENCE_SIZE, _REFERENCE_SIZE)
    erase: bool = False

    @property
    def resize_size(self) -> tuple[int, int]:
        """(H1, W1), the size before augmentation: 232 for 224."""
        return _scale_size(self.input_size, _RESIZE_SIZE)

    def keep(self, pixels: NDArray[np.uint8], *, mirrored: bool) -> NDArray[np.uint8]:
        """Return the image as it is, or its mirror image, at `input_size`."""
        height, width = self.input_size
        resized = [np.asarray(Image.fromarray(channel).resize((width, height))) for channel in np.rollaxis(pixels, 2)]
        whole = np.dstack(resized)
        return whole[:, ::-1] if mirrored else whole

    def __call__(self, pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Return one randomly augmented image; `pixels` is not changed."""
        height, width = self.input_size
        max_shift = (_MAX_TRANSLATE * width / _REFERENCE_SIZE, _MAX_TRANSLATE * height / _REFERENCE_SIZE)
        # the photograph, and its region if there is one: they move together
        images = [Image.fromarray(pixels[..., :3])]
        if pixels.shape[2] == 4:
            images.append(Image.fromarray(pixels[..., 3]))
        move = sample_geometric(rng, max_shift)
        images = [move(image) for image in images]
        if rng.random() < 0.5:
            images = [F.horizontal_flip(image) for image in images]
        top, left, rows, cols = sample_resized_crop(images[0], rng)
        size = list(_scale_size(self.input_size, _CROP_SIZE))
        images = [F.resized_crop(image, top, left, rows, cols, size, InterpolationMode.BILINEAR) for image in images]
        images[0] = apply_photometric(images[0], rng)
        top = int(rng.integers(images[0].height - height + 1))
        left = int(rng.integers(images[0].width - width + 1))
        augmented = np.dstack([np.asarray(image.crop((left, top, left + width, top + height))) for image in images])
        if self.erase and rng.random() < _ERASED:
            erase_rectangle(augmented, rng)
        return augmented


def erase_rectangle(pixels: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Cover a rectangle of an image, uint8 [H, W, 3 or 4], with one colour, in place; a fourth channel stays."""
    height, width = pixels.shape[:2]
    area = rng.uniform(*_ERASED_AREA) * height * width
    low, high = map(math.log, _ERASED_ASPECT)
    aspect = math.exp(rng.uniform(low, high))
    rows, cols = min(int(math.sqrt(area * aspect)), height - 1), min(int(math.sqrt(area / aspect)), width - 1)
    top, left = int(rng.integers(height - rows)), int(rng.integers(width - cols))
    pixels[top : top + rows, left : left + cols, :3] = rng.integers(256, size=3, dtype=np.uint8)


def sample_geometric(
    rng: np.random.Generator, max_shift: tuple[float, float] = (16.0, 16.0)
) -> Callable[[Image.Image], Image.Image]:
    """Draw one of identity, shear (up to 0.5), translation (up to `max_shift` = (x, y) pixels), rotation (up to 60°).

    The function returned applies it: by nearest neighbour with black corners, as torchvision's TrivialAugment does.
    """
    choice = int(rng.integers(6))
    if choice == 0:
        return lambda image: image
    if choice == 5:
        angle = _sample_signed(rng, _MAX_ROTATE)
        return lambda image: F.rotate(image, angle, InterpolationMode.NEAREST)
    shear, translate = [0.0, 0.0], [0, 0]
    if choice in (1, 2):
        shear[choice - 1] = math.degrees(math.atan(_sample_signed(rng, _MAX_SHEAR)))
    else:
        translate[choice - 3] = int(_sample_signed(rng, max_shift[choice - 3]))
    # TrivialAugment shears about the top left corner
    return lambda image: F.affine(image, 0.0, translate, 1.0, shear, InterpolationMode.NEAREST, center=[0.0, 0.0])


def apply_photometric(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Apply identity, brightness, contrast, sharpness, color, posterize (to 8 ... 2 bits), autocontrast, equalize."""
    choice = int(rng.integers(8))
    adjusted: Image.Image = image
    if choice in (1, 2, 3, 4):
        adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_sharpness, F.adjust_saturation)[choice - 1]
        adjusted = adjust(image, 1.0 + _sample_signed(rng, _MAX_COLOR_CHANGE if choice == 4 else _MAX_LIGHT_CHANGE))
    elif choice == 5:
        adjusted = F.posterize(image, 8 - round(_sample_strength(rng, 6.0)))
    elif choice == 6:
        adjusted = F.autocontrast(image)
    elif choice == 7:
        adjusted = F.equalize(image)
    return adjusted


def sample_resized_crop(image: Image.Image, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw a crop (top, left, rows, cols) as torchvision's RandomResizedCrop; the whole image after ten failures."""
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
