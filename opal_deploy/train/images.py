"""From samples to batches: decode, crop, resize, augment.

An image goes through `preprocess` as everywhere else (EXIF orientation, box, antialiased resize); only the augmentation
is added. Resized images are kept in memory where they fit, so that later epochs decode nothing. The content of an epoch
depends on seed, epoch and position only, not on the number of worker processes.

With regions that the attention is kept off, images have a fourth channel, the share of each pixel that is kept off,
0 ... 255: whatever moves the pixels moves it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from opal_deploy.datasets.samples import Sample, shorten_list
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
