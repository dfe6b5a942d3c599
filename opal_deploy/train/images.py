"""From samples to batches: decode, crop, resize, augment.

An image goes through `preprocess` as everywhere else (EXIF orientation, box, antialiased resize); only the augmentation
is added. Resized images are kept in memory where they fit, so that later epochs decode nothing. The content of an epoch
depends on seed, epoch and position only, not on the number of worker processes.

The augmentation is the paper's, as its authors coded it (Supp. B.2):

    resize to 232x232 -> geometric TrivialAugment -> horizontal flip -> random 95 to 100 % of the area, to 228x228
    -> photometric TrivialAugment -> random 224x224 crop

TrivialAugment (Müller and Hutter, 2021), as in torchvision's TrivialAugmentWide: one operation drawn uniformly, its
strength one of 31 from none to the strongest, its sign by a coin. torchvision's own transforms draw from a global
generator; here all random numbers come from the caller's, so an image's augmentation depends on nothing else.

Random erasing (Zhong et al., AAAI 2020) then covers a rectangle in half of the images with one colour: a slot that only
knows a class by two parts together fails where one of them is covered.

With regions that the attention is kept off, images have a fourth channel, the share of each pixel that is kept off,
0 ... 255: whatever moves the pixels moves it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from opal_deploy.datasets.samples import Sample, shorten_list
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import Progress
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_input
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.train.regions import Regions

# (epoch, position): worker processes learn the epoch from the key
ImageKey = tuple[int, int]
ImageItem = tuple[NDArray[np.uint8], int]

# first words of the seeds, so that no two streams of random numbers coincide
_ORDER_STREAM, _AUGMENT_STREAM = 0, 1

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

# random erasing: how often, the rectangle's share of the image, and its height over its width
_ERASED, _ERASED_AREA, _ERASED_ASPECT = 0.5, (0.02, 0.25), (0.3, 3.3)

# epochs whose images are not augmented: the images themselves, and their mirror images
WHOLE, MIRRORED = 0, -1

# typed as functions of tensors; they take and return PIL images too
F: Any = functional


@dataclass(frozen=True)
class PaperAugmentation:
    """The augmentation from uint8 [H1, W1, 3], already resized to `resize_size`, to uint8 [H0, W0, 3].

    A fourth channel, for regions, moves with the pixels and keeps its values.

    Attributes:
        input_size: (H0, W0).
        erase: whether random erasing follows.
    """

    input_size: tuple[int, int] = (_REFERENCE_SIZE, _REFERENCE_SIZE)
    erase: bool = False

    @property
    def resize_size(self) -> tuple[int, int]:
        """(H1, W1), the size before augmentation: 232 for 224."""
        return _scale_size(self.input_size, _RESIZE_SIZE)

    @property
    def crop_size(self) -> tuple[int, int]:
        """(H, W) after the random resized crop: 228 for 224."""
        return _scale_size(self.input_size, _CROP_SIZE)

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
        size = list(self.crop_size)
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

    Returns:
        Applies it. Uncovered corners are black and pixels are moved by nearest neighbour, as in torchvision's
        TrivialAugment.
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
    if choice in (1, 2, 3):
        adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_sharpness)[choice - 1]
        adjusted = adjust(image, 1.0 + _sample_signed(rng, _MAX_LIGHT_CHANGE))
    elif choice == 4:
        adjusted = F.adjust_saturation(image, 1.0 + _sample_signed(rng, _MAX_COLOR_CHANGE))
    elif choice == 5:
        adjusted = F.posterize(image, 8 - round(_sample_strength(rng, 6.0)))
    elif choice == 6:
        adjusted = F.autocontrast(image)
    elif choice == 7:
        adjusted = F.equalize(image)
    return adjusted


def sample_resized_crop(image: Image.Image, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw (top, left, rows, cols) by the rule of torchvision's RandomResizedCrop.

    At 95 % of the area most aspect ratios do not fit; after ten failed draws the whole image is taken.
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


class TrainImages(Dataset[ImageItem | UsageError]):
    """Images uint8 [H0, W0, 3], RGB, with labels, by (epoch, position); with regions uint8 [H0, W0, 4].

    Epochs are counted from 1; in `WHOLE` and `MIRRORED` images are not augmented.

    Attributes:
        samples: the samples.
        augmentation: None for evaluation.
        regions: one per sample that the attention is kept off, as the fourth channel; None without.
        resize_size: (H, W) that images are resized to before augmentation.
    """

    def __init__(
        self,
        samples: list[Sample],
        input_size: tuple[int, int],
        *,
        augmentation: PaperAugmentation | None = None,
        regions: Regions | None = None,
        seed: int = 0,
    ) -> None:
        self.samples = samples
        self.augmentation = augmentation
        self.regions = regions
        self.resize_size = input_size if augmentation is None else augmentation.resize_size
        self._seed = seed
        self._cache: NDArray[np.uint8] | None = None

    @property
    def cache_bytes(self) -> int:
        """The memory that caching every resized image takes."""
        return len(self.samples) * math.prod(self._shape)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return (*self.resize_size, 3 if self.regions is None else 4)

    def fill_cache(self, progress: Progress) -> None:
        """Decode every image once, in threads, and keep the resized images.

        Raises:
            UsageError: names every image that cannot be decoded or has another size than its mask.
        """
        cache = np.empty((len(self.samples), *self._shape), np.uint8)
        errors = []
        with ThreadPoolExecutor(available_cpus()) as pool:
            for index, pixels in enumerate(pool.map(self._load, range(len(self.samples)))):
                if isinstance(pixels, UsageError):
                    errors.append(str(pixels))
                else:
                    cache[index] = pixels
                progress(index + 1, len(self.samples), "reading images")
        if errors:
            raise UsageError(f"{len(errors)} image(s) cannot be used: {shorten_list(errors)}")
        self._cache = cache

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: ImageKey) -> ImageItem | UsageError:
        epoch, index = key
        pixels = self._load(index) if self._cache is None else self._cache[index]
        if isinstance(pixels, UsageError):
            # returned, not raised: a worker process would turn it into a traceback of many lines
            return pixels
        if self.augmentation is not None and epoch in (WHOLE, MIRRORED):
            pixels = self.augmentation.keep(pixels, mirrored=epoch == MIRRORED)
        elif self.augmentation is not None:
            pixels = self.augmentation(pixels, np.random.default_rng((_AUGMENT_STREAM, self._seed, epoch, index)))
        if self.regions is not None and self.regions.outside:
            # only now: the black corners that augmentation leaves are outside the object, too
            pixels = np.dstack([pixels[..., :3], 255 - pixels[..., 3]])
        return pixels, self.samples[index].label

    def _load(self, index: int) -> NDArray[np.uint8] | UsageError:
        sample = self.samples[index]
        try:
            image = decode(sample.path)
            geometry = compute_geometry(image, sample.box)
            pixels = to_input(image, geometry, self.resize_size)
            if self.regions is None:
                return pixels
            return np.dstack([pixels, self.regions.draw(index, geometry, self.resize_size)])
        except ImageError as error:
            return UsageError(f"{sample.path}: {error}; remove or replace this image")
        except UsageError as error:
            return UsageError(f"{sample.path}: {error}")


class Batches:
    """Iterates once over images as (uint8 [N, H0, W0, 3], labels int64 [N]) tensors; with regions of 4 channels.

    Attributes:
        images: the images.
        workers: number of worker processes that decode and augment.
        epoch: determines order and augmentation; set it before each pass.
        first_step: the first batch of the pass, where an earlier process did those before it.
    """

    def __init__(
        self,
        images: TrainImages,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
        workers: int = 0,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Build the loader.

        Args:
            images: the images.
            batch_size: N, over all processes.
            shuffle_seed: seed of the order; None keeps the samples' order.
            workers: number of worker processes that decode and augment.
            rank, size: this process takes image `rank` of each global batch and every `size`-th after it.
        """
        self.images, self.workers = images, workers
        self.epoch = 0
        self.first_step = 0
        self._rank, self._size = rank, size
        self._batch_size = batch_size
        self._shuffle_seed = shuffle_seed
        self._loader: DataLoader[ImageItem | UsageError] = DataLoader(
            images,
            batch_sampler=_BatchSampler(self),  # its keys are pairs, not numbers
            collate_fn=_collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            # each pass draws a seed for its workers; resuming within an epoch adds a pass, so the seed must not come
            # from the generator that stochastic depth draws from
            generator=torch.Generator().manual_seed(0),
        )

    def plan(self) -> list[list[ImageKey]]:
        """Return the keys of this epoch's global batches."""
        order = np.arange(len(self.images))
        if self._shuffle_seed is not None:
            order = np.random.default_rng((_ORDER_STREAM, self._shuffle_seed, max(self.epoch, 0))).permutation(order)
        keys = [(self.epoch, int(index)) for index in order]
        batches = [keys[i : i + self._batch_size] for i in range(0, len(keys), self._batch_size)]
        if self._shuffle_seed is not None and len(batches) > 1 and len(batches[-1]) < 2 * self._size:
            # batch normalisation has no variance of a single image with a single cell
            batches[-2:] = [batches[-2] + batches[-1]]
        return batches

    def local_plan(self) -> list[list[ImageKey]]:
        """Return this process's share of `plan`, from batch `first_step` on."""
        shares = [batch[self._rank :: self._size] for batch in self.plan()[self.first_step :]]
        return [share for share in shares if share]

    def image_files(self, step: int) -> list[Path]:
        """Return the image files of one global batch of this epoch."""
        return [self.images.samples[index].path for _, index in self.plan()[step]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._loader:
            if isinstance(batch, UsageError):
                raise batch
            yield batch


class _BatchSampler:
    """The local plan as the DataLoader's batch sampler."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[ImageKey]]:
        return iter(self._batches.local_plan())

    def __len__(self) -> int:
        return len(self._batches.local_plan())


def _collate(items: list[ImageItem | UsageError]) -> tuple[Tensor, Tensor] | UsageError:
    pairs: list[ImageItem] = []
    for item in items:
        if isinstance(item, UsageError):
            return item
        pairs.append(item)
    images = torch.from_numpy(np.stack([pixels for pixels, _ in pairs]))
    return images, torch.tensor([label for _, label in pairs])


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return float32 [N, 3, H0, W0] of uint8 [N, H0, W0, 3], equal to `preprocess.resize.normalise` bit by bit.

    The result's memory stays NHWC, as channels-last convolutions expect.
    """
    scaled = images.permute(0, 3, 1, 2).float() / 255.0
    shape = (1, 3, 1, 1)
    return (scaled - scaled.new_tensor(mean).view(shape)) / scaled.new_tensor(std).view(shape)
