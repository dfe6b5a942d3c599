"""Images that an export is verified on and int8 is calibrated with: photographs or generated creatures, not noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.files import without_folders
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.datasets.registry import find_recorded_dataset
from opal_deploy.datasets.samples import DataSet, Sample, list_images
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.export.options import ExportOptions
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import fit_input
from opal_deploy.synthetic import draw_example

Pixels = NDArray[np.uint8]
Result = TypeVar("Result", Outputs, Reference)

# a lower precision is judged on the first of these numbers of images, and on more while the result is inconclusive
SAMPLE_SIZES = (64, 192, 576)
# drawing one takes as long as a small network's pass, and more of them tell little about photographs
MAX_CREATURES = 192
# one, two, and an odd number: a graph that fixed its batch size, or mixes the images of a batch, fails one of them
BATCHES = (1, 2, 7)
MAX_CALIBRATION_IMAGES = 128
MIN_CALIBRATION_IMAGES = 16
# share of a folder for calibration, if the rest has to judge the result
_CALIBRATION_SHARE = 2 / 3
_SPLITS = {"val": "validation", "test": "test", "train": "training"}


@dataclass(frozen=True)
class VerificationImages:
    """Images resized for a model: uint8 [N, H0, W0, 3], RGB, the path or description of each, and one of all."""

    pixels: Pixels
    names: tuple[str, ...]
    description: str


class ImagePool:
    """Photographs or generated creatures in a fixed order, read as they are needed and then kept.

    `place` is the name of the photographs' folder or data set; None for creatures, MAX_CREATURES at most.
    """

    def __init__(
        self, form: InputForm, photographs: Iterable[tuple[Sample, str]] = (), place: str | None = None
    ) -> None:
        """Make a pool of photographs with their splits, empty if they have none; the label is not used.

        They are read when they are asked for, and skipped if they cannot be.
        """
        self.form = form
        self.place = place
        # pixels, name, split and, of a photograph, its sample
        self._read: list[tuple[Pixels, str, str, Sample | None]] = []
        self._unread = self._draw() if place is None else self._decode(photographs)

    def first(self, count: int) -> VerificationImages:
        """Return the first `count` images, or as many as there are."""
        self._read += islice(self._unread, max(0, count - len(self._read)))
        images = self._read[:count]
        stacked = np.stack([image[0] for image in images]) if images else np.empty((0, *self.form.size, 3), np.uint8)
        description = f"{len(images)} generated creatures"
        if self.place is not None:
            splits = Counter(split for _, _, split, _ in images if split)
            parts = ", ".join(f"{number} {split}" for split, number in splits.items())
            description = f"{len(images)} images from {self.place}{f' ({parts})' if parts else ''}"
        return VerificationImages(stacked, tuple(name for _, name, _, _ in images), description)

    def read_original(self, number: int) -> Image.Image:
        """Return image `number`, not resized, as the model's crop leaves it; a creature is drawn larger."""
        sample = self._read[number][3]
        if sample is None:
            height, width = self.form.size
            return Image.fromarray(draw_example(number, height * 3 // 2, width * 2))
        image = decode(sample.path)
        return image.crop(compute_geometry(image.size, sample.box).crop)

    def _draw(self) -> Iterator[tuple[Pixels, str, str, None]]:
        for number in range(MAX_CREATURES):
            yield draw_example(number, *self.form.size), f"creature {number}", "", None

    def _decode(self, photographs: Iterable[tuple[Sample, str]]) -> Iterator[tuple[Pixels, str, str, Sample]]:
        for sample, split in photographs:
            try:
                image = decode(sample.path)
                pixels, _ = fit_input(image, compute_geometry(image.size, sample.box), self.form)
            except ImageError:
                continue
            yield pixels, str(sample.path), split, sample


@dataclass(frozen=True)
class ImageChoice:
    """Images to verify on and, for int8, others to measure its ranges on; none is in both."""

    verification: ImagePool
    calibration: VerificationImages | None = None


def choose_images(
    metadata: Metadata, options: ExportOptions, *, calibrate: bool, torchvision: bool = True, model: Path | None = None
) -> ImageChoice:
    """Choose the images to verify on and, for int8, those to calibrate with.

    Verification takes the photographs of `options.images`; else of the model's data set if it still exists, validation
    images first; else the rest of `options.calibrate`; else creatures. Calibration takes the photographs of
    `options.calibrate`, else training images.

    Without `torchvision`, data sets that torchvision reads, which imports torch, are left out. `model` is the source's
    file, see `find_root`.

    Raises:
        UsageError: a folder is missing or has too few readable images.
    """
    data = None
    if (options.verify and options.images is None) or (calibrate and options.calibrate is None):
        data = find_recorded_dataset(metadata.training, metadata.class_names, model, torchvision=torchvision)
        root = without_folders((metadata.training.get("data") or {}).get("root"))
        if data is None and root and options.images is None and options.calibrate is None:
            options.log(
                f"The images that it was trained on ({root}) are not here any more; `export --images` names others"
            )
        if data is not None and metadata.crop is None:
            data = data.without_crops()
    calibration = _choose_calibration_images(metadata, options, data) if calibrate else None
    chosen = options.images or (options.calibrate if calibrate and data is None else None)
    folder = None if chosen is None else Path(chosen)
    used = {Path(name).resolve() for name in calibration.names} if calibration else set()
    if folder is not None:
        samples = [Sample(path, 0) for path in list_images(folder) if not used or path.resolve() not in used]
        pool = ImagePool(metadata.form, [(sample, "") for sample in _interleave(samples)], folder.name)
    elif data is not None:
        photographs = [
            (sample, name)
            for split, name in _SPLITS.items()
            for sample in _interleave(getattr(data, split))
            if not used or sample.path.resolve() not in used
        ]
        pool = ImagePool(metadata.form, photographs, data.root.name)
    else:
        return ImageChoice(ImagePool(metadata.form), calibration)
    readable = len(pool.first(SAMPLE_SIZES[0]).names)
    if readable < sum(BATCHES):
        besides = " besides those that it is calibrated with" if calibration else ""
        raise UsageError(f"{pool.place}: {readable} readable images{besides}; at least {sum(BATCHES)} are needed")
    return ImageChoice(pool, calibration)


def _choose_calibration_images(metadata: Metadata, options: ExportOptions, data: DataSet | None) -> VerificationImages:
    """Return at most MAX_CALIBRATION_IMAGES images of a folder, or training images; UsageError if there are few."""
    count, kept = MAX_CALIBRATION_IMAGES, ""
    if options.calibrate is not None:
        folder = Path(options.calibrate)
        paths = list_images(folder)
        judging = options.images or (None if data else folder)
        if options.verify and judging is not None and Path(judging).resolve() == folder.resolve():
            count = min(count, int(_CALIBRATION_SHARE * len(paths)))
            kept = " (a third of the folder is kept to judge the result; --images gives others)"
        samples, split, place = [Sample(path, 0) for path in paths], "", folder.name
    elif data is not None:
        samples, split, place = data.train, _SPLITS["train"], data.root.name
    else:
        raise UsageError("--precision int8 needs --calibrate DIR, a folder of photographs such as the model will see")
    photographs = [(sample, split) for sample in _interleave(samples, [count])]
    images = ImagePool(metadata.form, photographs, place).first(count)
    if len(images.names) < MIN_CALIBRATION_IMAGES:
        raise UsageError(f"{place}: {len(images.names)} readable images{kept}; int8 needs {MIN_CALIBRATION_IMAGES}")
    return images


def _interleave(samples: Sequence[Sample], sizes: Sequence[int] = SAMPLE_SIZES) -> list[Sample]:
    """Return samples reordered so that the first n, for each n in these numbers, are spread evenly over all."""
    ordered: list[Sample] = []
    left = list(samples)
    for size in sizes:
        count = min(size - len(ordered), len(left))
        chosen = {len(left) * index // count for index in range(count)}
        ordered += [left[index] for index in sorted(chosen)]
        left = [sample for index, sample in enumerate(left) if index not in chosen]
    return ordered + left


def run_in_batches(run: Callable[[Pixels], Result], pixels: Pixels, join: Callable[[list[Result]], Result]) -> Result:
    """Return the joined results of `run` on uint8 [N, H0, W0, 3] in batches of 1, 2, 7, 7, 7, ..."""
    parts: list[Result] = []
    start = 0
    while start < len(pixels):
        size = BATCHES[min(len(parts), len(BATCHES) - 1)]
        parts.append(run(pixels[start : start + size]))
        start += size
    return join(parts)
