"""From samples to batches: decode, crop, squash, augment.

A picture goes through `preprocess` as everywhere else (EXIF orientation, box, antialiased squash); only then may the
augmentation touch it. Squashed pictures are kept in memory where they fit, so that later epochs decode nothing. What
an epoch looks like depends on seed, epoch and position alone, not on the number of worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from opal_deploy.datasets.samples import ProgressCallback, Sample, shorten_list
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_input
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.train.transforms import PaperAugmentation

# (epoch, position): the key by which a batch asks for a picture, so that worker processes need no other word of it
ImageKey = tuple[int, int]
ImageItem = tuple[NDArray[np.uint8], int]

# first words of the seeds, so that no two streams of random numbers coincide
_ORDER, _AUGMENT = 0, 1


class TrainImages(Dataset[ImageItem | UsageError]):
    """Pictures uint8 [H0, W0, 3], RGB, with labels, by (epoch, position).

    Attributes:
        samples: what it reads.
        squash_size: (H, W) that pictures are squashed to before augmentation.
        augmentation: None for evaluation.
    """

    def __init__(
        self,
        samples: list[Sample],
        input_size: tuple[int, int],
        *,
        augmentation: PaperAugmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.samples = samples
        self.augmentation = augmentation
        self.squash_size = input_size if augmentation is None else augmentation.resize_size
        self._seed = seed
        self._cache: NDArray[np.uint8] | None = None

    @property
    def cache_bytes(self) -> int:
        """What keeping every squashed picture takes."""
        return len(self.samples) * self.squash_size[0] * self.squash_size[1] * 3

    def fill_cache(self, report: ProgressCallback) -> None:
        """Decode everything once, in threads, and keep it.

        Raises:
            UsageError: names every picture that cannot be decoded.
        """
        cache = np.empty((len(self.samples), *self.squash_size, 3), np.uint8)
        bad = []
        with ThreadPoolExecutor(available_cpus()) as pool:
            for index, pixels in enumerate(pool.map(self._load, self.samples)):
                if isinstance(pixels, UsageError):
                    bad.append(str(pixels))
                else:
                    cache[index] = pixels
                report(index + 1, len(self.samples), "reading pictures")
        if bad:
            raise UsageError(f"{len(bad)} picture(s) cannot be decoded, remove or replace them: {shorten_list(bad)}")
        self._cache = cache

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: ImageKey) -> ImageItem | UsageError:
        epoch, index = key
        pixels = self._load(self.samples[index]) if self._cache is None else self._cache[index]
        if isinstance(pixels, UsageError):
            # returned, not raised: a worker process would turn it into a traceback of many lines
            return pixels
        if self.augmentation is not None:
            pixels = self.augmentation(pixels, np.random.default_rng((_AUGMENT, self._seed, epoch, index)))
        return pixels, self.samples[index].label

    def _load(self, sample: Sample) -> NDArray[np.uint8] | UsageError:
        try:
            image = decode(sample.path)
            return to_input(image, compute_geometry(image, sample.box), self.squash_size)
        except ImageError as error:
            return UsageError(f"{sample.path}: {error}; remove or replace this picture")


class Batches:
    """Iterates once over `pictures` as (images uint8 [N, H0, W0, 3], labels int64 [N]) tensors.

    `epoch` picks order and augmentation; set it before each pass. Unshuffled, it keeps the samples' order.

    Attributes:
        epoch: see above.
        first: the batch to begin with; those before it were done by an earlier process.
    """

    def __init__(
        self,
        pictures: TrainImages,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
        workers: int = 0,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Args: rank, size: take each global batch's every `size`-th picture, from the `rank`-th on."""
        self.pictures = pictures
        self.epoch = 0
        self.first = 0
        self._rank, self._size = rank, size
        self._batch_size = batch_size
        self._shuffle_seed = shuffle_seed
        self._loader: DataLoader[ImageItem | UsageError] = DataLoader(
            pictures,
            batch_sampler=_BatchSampler(self),  # its keys are pairs, not numbers
            collate_fn=_collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            # each pass draws a seed for its workers: not from the generator that stochastic depth draws from, since a
            # run that is continued within an epoch begins a pass more
            generator=torch.Generator().manual_seed(0),
        )

    def plan(self) -> list[list[ImageKey]]:
        """The keys of this epoch's global batches."""
        order = np.arange(len(self.pictures))
        if self._shuffle_seed is not None:
            order = np.random.default_rng((_ORDER, self._shuffle_seed, self.epoch)).permutation(order)
        keys = [(self.epoch, int(index)) for index in order]
        batches = [keys[i : i + self._batch_size] for i in range(0, len(keys), self._batch_size)]
        if self._shuffle_seed is not None and len(batches) > 1 and len(batches[-1]) < 2 * self._size:
            # batch normalisation knows no variance of a single picture with a single cell
            batches[-2:] = [batches[-2] + batches[-1]]
        return batches

    def share(self) -> list[list[ImageKey]]:
        """What this process takes of `plan`, from batch `first` on."""
        shares = [batch[self._rank :: self._size] for batch in self.plan()[self.first :]]
        return [share for share in shares if share]

    def files(self, number: int) -> list[Path]:
        """The pictures of global batch `number` of this epoch."""
        return [self.pictures.samples[index].path for _, index in self.plan()[number]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._loader:
            if isinstance(batch, UsageError):
                raise batch
            yield batch


class _BatchSampler:
    """What a DataLoader calls a batch sampler."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[ImageKey]]:
        return iter(self._batches.share())

    def __len__(self) -> int:
        return len(self._batches.share())


def _collate(items: list[ImageItem | UsageError]) -> tuple[Tensor, Tensor] | UsageError:
    good = [item for item in items if not isinstance(item, UsageError)]
    for item in items:
        if isinstance(item, UsageError):
            return item
    images = torch.from_numpy(np.stack([pixels for pixels, _ in good]))
    return images, torch.tensor([label for _, label in good])


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [N, H0, W0, 3] to float32 [N, 3, H0, W0] on the same device: `preprocess.normalise`, value by value.

    The result's memory stays NHWC, which is what channels-last convolutions want.
    """
    scaled = images.permute(0, 3, 1, 2).float() / 255.0
    shape = (1, 3, 1, 1)
    return (scaled - scaled.new_tensor(mean).view(shape)) / scaled.new_tensor(std).view(shape)
