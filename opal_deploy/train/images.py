"""From samples to batches: decode, crop, resize, augment; start at `prepare_images`.

An image goes through `preprocess` as everywhere else (EXIF orientation, box, the resize rule); only the augmentation is
added. Every image is decoded once before the first step, and kept in memory if all fit. The content of an epoch
depends on (seed, epoch, image) only, not on the number of worker processes.

With `--keep-off`, images have a fourth channel, the share of each pixel that the attention is kept off, 0 ... 255:
whatever moves the pixels moves it too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from opal_deploy.artifact.preprocessing import InputForm, ResizeRule
from opal_deploy.datasets.checks import MAX_IMAGES, THUMBNAIL, compute_thumbnail, find_near_copies
from opal_deploy.datasets.samples import DataSet, Sample, display_path, pluralize, shorten_list
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.evaluation.inputs import annotate
from opal_deploy.logs import Log, Progress, WarningLine
from opal_deploy.preprocess.decode import Decoding, decode
from opal_deploy.preprocess.geometry import Box, Geometry, compute_geometry
from opal_deploy.preprocess.resize import fit_input, is_nearly_black
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.train import machine
from opal_deploy.train.augmentation import PaperAugmentation
from opal_deploy.train.options import TrainOptions

# (epoch, position): worker processes learn the epoch from the key
ImageKey = tuple[int, int]
ImageItem = tuple[NDArray[np.uint8], int]

# first words of the seeds, so that no two streams of random numbers coincide
_ORDER_STREAM, _AUGMENT_STREAM = 0, 1
# epochs whose images are not augmented: the images themselves, and their mirror images; others are counted from 1
WHOLE, MIRRORED = 0, -1
# images per forward pass of validation and tests
EVALUATION_BATCH = 64
MEGABYTE = 1 << 20


@dataclass(frozen=True, eq=False)
class TrainImages(Dataset[ImageItem]):
    """Images uint8 [H0, W0, 3], RGB, with labels, by (epoch, position); with regions uint8 [H0, W0, 4]."""

    samples: list[Sample]
    input_size: tuple[int, int]  # (H0, W0)
    augmentation: PaperAugmentation | None = None  # None for evaluation
    # for each sample the boxes that the attention is kept off, as the fourth channel; None without
    regions: Sequence[Sequence[Box]] | None = None
    seed: int = 0  # of the augmentation
    pixels: NDArray[np.uint8] | None = None  # the resized images [N, H1, W1, 3 or 4], if they are kept in memory
    thumbnails: NDArray[np.float32] | None = None  # [N, 768], where `find_near_copies` looks
    rule: ResizeRule = field(default_factory=ResizeRule)

    @property
    def form(self) -> InputForm:
        """(H1, W1), an image's size before augmentation, and the rule for it, which shows the same part of an image."""
        if self.augmentation is None:
            return InputForm(*self.input_size, self.rule)
        height, width = self.augmentation.resize_size
        short = round(self.rule.short * min(height, width) / min(self.input_size))
        return InputForm(height, width, replace(self.rule, short=short))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H1, W1, 3 or 4), an image's shape before augmentation."""
        return (*self.form.size, 3 if self.regions is None else 4)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: ImageKey) -> ImageItem:
        epoch, index = key
        try:
            pixels = self.load(index) if self.pixels is None else self.pixels[index]
        except ImageError as error:
            raise UsageError(f"{self.samples[index].path}: {error}; remove or replace this image") from None
        if self.augmentation is not None and epoch in (WHOLE, MIRRORED):
            pixels = self.augmentation.keep(pixels, mirrored=epoch == MIRRORED)
        elif self.augmentation is not None:
            pixels = self.augmentation(pixels, np.random.default_rng((_AUGMENT_STREAM, self.seed, epoch, index)))
        return pixels, self.samples[index].label

    def load(self, index: int) -> NDArray[np.uint8]:
        """Return an image of `shape`; raise ImageError if it cannot be decoded."""
        sample, form = self.samples[index], self.form
        image = decode(sample.path)
        geometry = compute_geometry(image.size, sample.box)
        pixels, _ = fit_input(image, geometry, form)
        return pixels if self.regions is None else np.dstack([pixels, draw_region(self.regions[index], geometry, form)])


def read_regions(data: DataSet, file: Path) -> list[tuple[Box, ...]]:
    """Return the boxes of each training image in a COCO file; raise UsageError if it is damaged or has no boxes."""
    return [image.boxes for image in annotate(data, data.train, boxes=True, parts=False, objects=file).images]


def draw_region(boxes: Sequence[Box], geometry: Geometry, form: InputForm) -> NDArray[np.uint8]:
    """Return the share of each pixel that lies in a box, uint8 [H, W], 0 ... 255, of a cropped and resized image."""
    covered = np.zeros((geometry.height, geometry.width, 3), np.uint8)
    for box in boxes:
        x0, y0, x1, y1 = (max(round(edge), 0) for edge in box)
        covered[y0:y1, x0:x1] = 255
    region, _ = fit_input(Image.fromarray(covered), geometry, form, Decoding.exact, bars=0)
    return region[..., 0]


def read_images(
    images: TrainImages, progress: Progress, *, keep: bool, fabric: Fabric | None = None
) -> tuple[TrainImages, list[str], list[str]]:
    """Decode images in threads, once; return those that can be decoded, why others cannot, and the nearly black ones.

    With `keep` the resized images stay in memory; else each process of `fabric`, if it is given, decodes its share.
    """
    rank, size = (0, 1) if keep or fabric is None else (fabric.global_rank, fabric.world_size)
    pixels = np.empty((len(images), *images.shape), np.uint8) if keep else None
    alone = fabric is None or fabric.world_size == 1
    thumbnails = np.empty((len(images), THUMBNAIL), np.float32) if alone and len(images) <= MAX_IMAGES else None
    problems: dict[int, str] = {}
    black: list[str] = []

    def read(index: int) -> None:
        try:
            resized = images.load(index)
            if pixels is not None:
                pixels[index] = resized
            if is_nearly_black(resized[..., :3]):
                black.append(str(images.samples[index].path))
            if thumbnails is not None:
                thumbnails[index] = compute_thumbnail(resized)
        except ImageError as error:
            problems[index] = f"{images.samples[index].path} ({error})"

    with ThreadPoolExecutor(available_cpus()) as pool:
        for done, _ in enumerate(pool.map(read, range(rank, len(images), size)), 1):
            progress(done, len(images), "reading images")
    problems = {index: text for share in machine.gather(fabric, problems) for index, text in share.items()}
    black = sorted(path for share in machine.gather(fabric, black) for path in share)
    images = replace(images, pixels=pixels, thumbnails=thumbnails)
    if problems:
        kept, regions = [index for index in range(len(images)) if index not in problems], images.regions
        images = replace(
            images,
            samples=[images.samples[index] for index in kept],
            regions=None if regions is None else [regions[index] for index in kept],
            pixels=None if pixels is None else pixels[kept],
            thumbnails=None if thumbnails is None else thumbnails[kept],
        )
    return images, [problems[index] for index in sorted(problems)], black


class Batches:
    """Iterates once over images as (uint8 [N, H0, W0, 3], labels int64 [N]) tensors; with regions of 4 channels.

    Global batches have `batch_size` images, without `shuffle_seed` in the samples' order. `share` is the number of this
    process, which takes its images of each batch, and that of all processes. `workers` processes decode and augment.
    `epoch` determines order and augmentation: set it before each pass.
    """

    def __init__(
        self, images: TrainImages, batch_size: int, *,
        shuffle_seed: int | None = None, workers: int = 0, share: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        self.images, self.workers, self.epoch = images, workers, 0
        self._batch_size, self._shuffle_seed, (self._rank, self._size) = batch_size, shuffle_seed, share
        self._keys: list[list[ImageKey]] = []  # those of the current pass
        self._loader: DataLoader[ImageItem] = DataLoader(
            images, batch_sampler=self._keys, collate_fn=_collate, num_workers=workers,
            persistent_workers=workers > 0, pin_memory=torch.cuda.is_available(),
            # the seed of the workers must not come from the generator that stochastic depth draws from
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

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
        self._keys[:] = self.local_plan()
        try:
            yield from self._loader
        except UsageError as error:
            # a worker process adds its traceback
            raise UsageError(str(error).strip().rpartition("UsageError: ")[2]) from None


def _collate(items: list[ImageItem]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*items, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


class Loaders(NamedTuple):
    """This process's batches of each split; `val` and `test` are None without one."""

    train: Batches
    val: Batches | None
    test: Batches | None
    copied: NDArray[np.bool_] | None  # [N], near copies of training images in `test`; None where not looked for


def prepare_images(
    data: DataSet, options: TrainOptions, fabric: Fabric, progress: Progress, log: Log
) -> tuple[DataSet, Loaders, dict[str, Any]]:
    """Decode every image; return the data set of those that can be, its batches, and entries of config.json.

    Images that cannot be decoded are left out with a warning. Where all fit into `--cache-megabytes`, they are kept.

    UsageError: no images are left, or too few for the processes.
    """
    splits = _define_splits(data, options, log)
    # every process caches all images, because its share of them changes with each epoch
    room = options.cache_megabytes * MEGABYTE / machine.local_processes()
    cached = sum(len(images) * math.prod(images.shape) for images in splits[:2]) <= room
    keeps = zip(splits, (cached, cached, False), strict=True)
    decoded = [read_images(images, progress, keep=keep, fabric=fabric) for images, keep in keeps]
    (train, val, test), problems, black = zip(*decoded, strict=True)
    _warn_of_images([*itertools.chain(*problems)], [*itertools.chain(*black)], log)
    if not len(train) or (data.val and not len(val)):
        raise UsageError(f"{data.root}: no training or no validation image can be decoded; replace them")
    copied = _warn_of_copies(train, test, "test", data.root, log)
    _warn_of_copies(train, val, "validation", data.root, log)
    batch_size, workers = options.batch_size or 1, options.workers
    if min(batch_size, len(train)) < 2 * fabric.world_size:
        raise UsageError(
            f"batches of {batch_size} from {len(train)} images over {fabric.world_size} process(es): "
            "each needs at least 2 images; give a larger --batch-size, or start fewer processes"
        )
    if workers is None:
        workers = machine.default_num_workers(fabric.device, cached)
    share, once = (fabric.global_rank, fabric.world_size), 0 if fabric.device.type == "cpu" else workers
    loaders = Loaders(
        Batches(train, batch_size, shuffle_seed=options.seed, workers=workers, share=share),
        Batches(val, EVALUATION_BATCH, workers=0 if cached else workers, share=share) if len(val) else None,
        Batches(test, EVALUATION_BATCH, workers=once, share=share) if len(test) else None,
        copied,
    )
    data = replace(data, train=train.samples, val=val.samples, test=test.samples)
    return data, loaders, {"workers": workers, "cached": cached}


def _define_splits(data: DataSet, options: TrainOptions, log: Log) -> list[TrainImages]:
    """Return the images of train, val and test, not yet decoded."""
    augmentation = regions = None
    if options.augment != "none":
        augmentation = PaperAugmentation(options.input_size, erase=options.augment == "erase")
    if options.keep_off is not None:
        regions = read_regions(data, Path(options.keep_off))
        log(f"keeping the attention off regions of {sum(map(bool, regions)):,} of {len(data.train):,} images")
    size, rule = options.input_size, options.resize_rule
    train = TrainImages(data.train, size, augmentation, regions, options.seed, rule=rule)
    return [train, *(TrainImages(samples, size, rule=rule) for samples in (data.val, data.test))]


def _warn_of_images(problems: list[str], black: list[str], log: Log) -> None:
    if problems:
        log(WarningLine(
            f"warning: left out {len(problems)} image(s) that cannot be decoded: {shorten_list(problems)}; replace or "
            "remove them"
        ))  # fmt: skip
    if black:
        log(WarningLine(
            f"warning: {len(black)} image(s) are nearly black, with no value above a sixteenth of the range: "
            f"{shorten_list(black)}; scale 12-bit data in 16-bit files first, for inference too"
        ))  # fmt: skip


def _warn_of_copies(
    train: TrainImages, other: TrainImages, name: str, root: Path, log: Log
) -> NDArray[np.bool_] | None:
    """Return which images of another split are near copies of training images, bool [N], and warn; see `Loaders`."""
    if train.thumbnails is None or other.thumbnails is None:
        return None
    nearest = find_near_copies(train.thumbnails, other.thumbnails)
    copied = nearest >= 0
    if pairs := [
        " = ".join(display_path(sample.path, root) for sample in (other.samples[copy], train.samples[nearest[copy]]))
        for copy in np.flatnonzero(copied)
    ]:
        log(WarningLine(
            f"warning: {pluralize(len(pairs), 'near copy', 'near copies')} of training images among the {name} "
            "images (saved again, resized, or of one burst), which flatters the accuracy; "
            f"keep copies in one split: {shorten_list(pairs)}"
        ))  # fmt: skip
    return copied


def normalize(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return float32 [N, 3, H0, W0] of uint8 [N, H0, W0, 3], equal to `preprocess.resize.normalise` bit by bit.

    The result's memory stays NHWC, as channels-last convolutions expect.
    """
    scaled = images.permute(0, 3, 1, 2).float() / 255.0
    shape = (1, 3, 1, 1)
    return (scaled - scaled.new_tensor(mean).view(shape)) / scaled.new_tensor(std).view(shape)
