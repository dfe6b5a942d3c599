"""Images that an export is verified on and int8 is calibrated with: photographs or generated creatures, not noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.export.options import ExportOptions
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import to_input
from opal_deploy.synthetic import example_images

Pixels = NDArray[np.uint8]
Result = TypeVar("Result", Outputs, Reference)

# creatures have five slots each, so that one cell in 320 is less than the half percent that lower precisions may lose
CREATURES = 64
PHOTOGRAPHS = 64
# one, two, and an odd number: a graph that fixed its batch size, or mixes the images of a batch, fails one of them
BATCHES = (1, 2, 7)
MAX_CALIBRATION_IMAGES = 128
MIN_CALIBRATION_IMAGES = 16
# share of a folder for calibration where the rest of it has to judge the result
_CALIBRATION_SHARE = 2 / 3
_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}


@dataclass(frozen=True)
class VerificationImages:
    """Images resized for a model.

    Attributes:
        pixels: uint8 [N, H0, W0, 3], RGB.
        names: the path of each image, or what it is.
        description: the images as a whole, for reports.
    """

    pixels: Pixels
    names: tuple[str, ...]
    description: str


def choose_images(
    metadata: Metadata, options: ExportOptions, *, calibrate: bool
) -> tuple[VerificationImages, VerificationImages | None]:
    """Return the images to verify on and, for int8, those to calibrate with; no image is in both.

    Args:
        metadata: metadata of the model, for its input size.
        options: the folders.
        calibrate: whether int8 is made.

    Raises:
        UsageError: a folder is missing or has too few readable images.
    """
    if not calibrate:
        return choose_verification_images(metadata, options.images), None
    folder, judging = options.calibrate, options.images or options.calibrate
    shared = options.verify and folder is not None and judging is not None and judging.resolve() == folder.resolve()
    calibration = choose_calibration_images(metadata, folder, share=_CALIBRATION_SHARE if shared else 1.0)
    return choose_verification_images(metadata, judging, [Path(name) for name in calibration.names]), calibration


def choose_verification_images(
    metadata: Metadata, folder: Path | None, excluded: Sequence[Path] = ()
) -> VerificationImages:
    """Return photographs of a folder, spread evenly over it, or generated creatures.

    Args:
        metadata: metadata of the model, for its input size.
        folder: the folder; None for creatures.
        excluded: files that int8's ranges were measured on; they may not judge the result.

    Raises:
        UsageError: fewer than sum(BATCHES) readable images remain.
    """
    if folder is None:
        pixels = example_images(CREATURES, *metadata.input_size)
        names = tuple(f"creature {number}" for number in range(CREATURES))
        return VerificationImages(pixels, names, f"{CREATURES} generated creatures")
    images = read_images(folder, metadata.input_size, PHOTOGRAPHS, excluded)
    if len(images.pixels) < sum(BATCHES):
        besides = " besides those that it is calibrated with" if excluded else ""
        raise UsageError(
            f"{folder}: {len(images.pixels)} readable images{besides}; verification needs at least {sum(BATCHES)}"
        )
    return images


def choose_calibration_images(metadata: Metadata, folder: Path | None, *, share: float = 1.0) -> VerificationImages:
    """Return at most MAX_CALIBRATION_IMAGES images of a folder, and at most a share of it.

    Raises:
        UsageError: no folder, or fewer than MIN_CALIBRATION_IMAGES readable images.
    """
    if folder is None:
        raise UsageError(
            "--precision int8 needs --calibrate DIR, a folder of photographs such as the model will see: "
            "ranges measured on anything else cost accuracy and cells"
        )
    count = min(MAX_CALIBRATION_IMAGES, int(share * len(list_images(folder))))
    images = read_images(folder, metadata.input_size, count)
    if len(images.pixels) < MIN_CALIBRATION_IMAGES:
        kept = " (a third of the folder is kept to judge the result; --pictures gives others)" if share < 1.0 else ""
        raise UsageError(
            f"{folder}: {len(images.pixels)} readable images to calibrate with{kept}; "
            f"at least {MIN_CALIBRATION_IMAGES} are needed"
        )
    return images


def read_images(
    folder: Path, input_size: tuple[int, int], count: int, excluded: Sequence[Path] = ()
) -> VerificationImages:
    """Return at most `count` readable images of a folder and its subfolders, spread evenly over their sorted paths.

    Raises:
        UsageError: no such folder.
    """
    skipped = {path.resolve() for path in excluded}
    paths = [path for path in list_images(folder) if path.resolve() not in skipped]
    pixels: list[Pixels] = []
    names: list[str] = []
    for path in _spread(paths, count):
        if len(pixels) == count:
            break
        try:
            image = decode(path)
        except ImageError:
            continue
        pixels.append(to_input(image, compute_geometry(image), input_size))
        names.append(str(path))
    stacked = np.stack(pixels) if pixels else np.empty((0, *input_size, 3), np.uint8)
    return VerificationImages(stacked, tuple(names), f"{len(pixels)} photographs of {folder.name}")


def list_images(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders whose suffix is an image format's, sorted.

    Raises:
        UsageError: no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of images")
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)


def run_in_batches(run: Callable[[Pixels], Result], pixels: Pixels, join: Callable[[list[Result]], Result]) -> Result:
    """Return the joined results of `run` on uint8 [N, H0, W0, 3] in batches of 1, 2, 7, 7, 7, ..."""
    parts: list[Result] = []
    start = 0
    while start < len(pixels):
        size = BATCHES[min(len(parts), len(BATCHES) - 1)]
        parts.append(run(pixels[start : start + size]))
        start += size
    return join(parts)


def _spread(paths: list[Path], count: int) -> list[Path]:
    """Return all paths: `count` at equal distances first, then the others, which replace unreadable ones."""
    chosen = {len(paths) * index // count for index in range(min(count, len(paths)))}
    rest = [path for index, path in enumerate(paths) if index not in chosen]
    return [paths[index] for index in sorted(chosen)] + rest
