"""From samples to batches: decode, crop, resize, augment.

An image goes through `preprocess` as everywhere else (EXIF orientation, box, antialiased resize); only the augmentation
is added. Every image is decoded once before the first step, and kept in memory if all fit. The content of an epoch
depends on (seed, epoch, image) only, not on the number of worker processes.

With regions that the attention is kept off, images have a fourth channel, the share of each pixel that is kept off,
0 ... 255: whatever moves the pixels moves it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import Progress
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_input
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.train.augmentation import PaperAugmentation
from opal_deploy.train.regions import Regions

# (epoch, position): worker processes learn the epoch from the key
ImageKey = tuple[int, int]
ImageItem = tuple[NDArray[np.uint8], int]

# first words of the seeds, so that no two streams of random numbers coincide
_ORDER_STREAM, _AUGMENT_STREAM = 0, 1
# epochs whose images are not augmented: the images themselves, and their mirror images
WHOLE, MIRRORED = 0, -1


@dataclass(frozen=True, eq=False)
class TrainImages(Dataset[ImageItem | UsageError]):
    """Images uint8 [H0, W0, 3], RGB, with labels, by (epoch, position); with regions uint8 [H0, W0, 4].

    Epochs are counted from 1; in `WHOLE` and `MIRRORED` images are not augmented.

    Attributes:
        samples: the samples.
        input_size: (H0, W0).
        augmentation: None for evaluation.
        regions: one per sample that the attention is kept off, as the fourth channel; None without.
        seed: seed of the augmentation.
        pixels: the resized images, uint8 [N, H1, W1, 3 or 4], if they are kept in memory.
    """

    samples: list[Sample]
    input_size: tuple[int, int]
    augmentation: PaperAugmentation | None = None
    regions: Regions | None = None
    seed: int = 0
    pixels: NDArray[np.uint8] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H1, W1, 3 or 4), an image's shape before augmentation."""
        size = self.input_size if self.augmentation is None else self.augmentation.resize_size
        return (*size, 3 if self.regions is None else 4)

    @property
    def num_bytes(self) -> int:
        """The memory that all resized images take."""
        return len(self.samples) * math.prod(self.shape)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: ImageKey) -> ImageItem | UsageError:
        epoch, index = key
        try:
            pixels = self.load(index) if self.pixels is None else self.pixels[index]
        except (ImageError, UsageError) as error:
            # returned, not raised: a worker process would turn it into a traceback of many lines
            return UsageError(f"{self.samples[index].path}: {error}; remove or replace this image")
        if self.augmentation is not None and epoch in (WHOLE, MIRRORED):
            pixels = self.augmentation.keep(pixels, mirrored=epoch == MIRRORED)
        elif self.augmentation is not None:
            pixels = self.augmentation(pixels, np.random.default_rng((_AUGMENT_STREAM, self.seed, epoch, index)))
        if self.regions is not None and self.regions.outside:
            # only now: the black corners that augmentation leaves are outside the object, too
            pixels = np.dstack([pixels[..., :3], 255 - pixels[..., 3]])
        return pixels, self.samples[index].label

    def load(self, index: int) -> NDArray[np.uint8]:
        """Return an image of `shape`.

        Raises:
            ImageError: it cannot be decoded.
            UsageError: its region is damaged or has another size.
        """
        sample, size = self.samples[index], self.shape[:2]
        image = decode(sample.path)
        geometry = compute_geometry(image, sample.box)
        pixels = to_input(image, geometry, size)
        return pixels if self.regions is None else np.dstack([pixels, self.regions.draw(index, geometry, size)])


def read_images(
    images: TrainImages, indices: Iterable[int], progress: Progress, *, keep: bool
) -> tuple[NDArray[np.uint8] | None, dict[int, str]]:
    """Decode images in threads.

    Args:
        images: the images.
        indices: positions of those to decode.
        progress: called with images done.
        keep: whether to return the resized images.

    Returns:
        The resized images by position if `keep`, uint8 [N, H1, W1, 3 or 4], and by position why images cannot be
        decoded.

    Raises:
        UsageError: a region is damaged or has another size than its image.
    """
    pixels = np.empty((len(images), *images.shape), np.uint8) if keep else None
    problems: dict[int, str] = {}

    def read(index: int) -> None:
        try:
            resized = images.load(index)
            if pixels is not None:
                pixels[index] = resized
        except ImageError as error:
            problems[index] = f"{images.samples[index].path} ({error})"
        except UsageError as error:
            raise UsageError(f"{images.samples[index].path}: {error}") from None

    with ThreadPoolExecutor(available_cpus()) as pool:
        for done, _ in enumerate(pool.map(read, indices), 1):
            progress(done, len(images), "reading images")
    return pixels, problems


def leave_out(images: TrainImages, positions: Iterable[int]) -> TrainImages:
    """Return the images without those at some positions."""
    if not (gone := set(positions)):
        return images
    kept = [index for index in range(len(images)) if index not in gone]
    regions = images.regions
    return replace(
        images,
        samples=[images.samples[index] for index in kept],
        regions=None if regions is None else replace(regions, images=[regions.images[index] for index in kept]),
        pixels=None if images.pixels is None else images.pixels[kept],
    )


class Batches:
    """Iterates once over images as (uint8 [N, H0, W0, 3], labels int64 [N]) tensors; with regions of 4 channels.

    Attributes:
        images: the images.
        workers: number of worker processes that decode and augment.
        epoch: determines order and augmentation; set it before each pass.
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
        self.images, self.workers, self.epoch = images, workers, 0
        self._batch_size, self._shuffle_seed, self._rank, self._size = batch_size, shuffle_seed, rank, size
        self._loader: DataLoader[ImageItem | UsageError] = DataLoader(
            images,
            batch_sampler=_LocalPlan(self),  # its keys are pairs, not numbers
            collate_fn=_collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            # the seed of the workers must not come from the generator that stochastic depth draws from
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
        """Return this process's share of `plan`."""
        shares = [batch[self._rank :: self._size] for batch in self.plan()]
        return [share for share in shares if share]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._loader:
            if isinstance(batch, UsageError):
                raise batch
            yield batch


class _LocalPlan:
    """The local plan of the current epoch as the DataLoader's batch sampler."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[ImageKey]]:
        return iter(self._batches.local_plan())

    def __len__(self) -> int:
        return len(self._batches.local_plan())


def _collate(items: list[ImageItem | UsageError]) -> tuple[Tensor, Tensor] | UsageError:
    for item in items:
        if isinstance(item, UsageError):
            return item
    images, labels = zip(*items, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return float32 [N, 3, H0, W0] of uint8 [N, H0, W0, 3], equal to `preprocess.resize.normalise` bit by bit.

    The result's memory stays NHWC, as channels-last convolutions expect.
    """
    scaled = images.permute(0, 3, 1, 2).float() / 255.0
    shape = (1, 3, 1, 1)
    return (scaled - scaled.new_tensor(mean).view(shape)) / scaled.new_tensor(std).view(shape)
