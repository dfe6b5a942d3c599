"""The regions of training images that the attention is kept off: `train --keep-off`.

They come from a file (stamps, scale bars, borders), or are everything outside the objects of the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.datasets.masks import draw_segmentations
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.annotations import ImageAnnotation, annotate, has_creatures
from opal_deploy.preprocess.geometry import Box, Geometry
from opal_deploy.sources.annotations import CocoObject, read_objects
from opal_deploy.train.options import OUTSIDE


@dataclass(frozen=True)
class Regions:
    """The regions of N images.

    Attributes:
        images: N annotations, whose boxes or mask are the region that is kept off or, with `outside`, the object; an
            image without any has no region.
        outside: everything but the annotated object is kept off.
    """

    images: Sequence[ImageAnnotation]
    outside: bool = False

    def __len__(self) -> int:
        """The number of images with a region."""
        return sum(image.has_object for image in self.images)

    def draw(self, index: int, geometry: Geometry, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Draw the annotation of an image as the model sees it, cropped and resized.

        Returns:
            uint8 [H, W] of `size`, the share of each pixel that lies in the annotation, 0 ... 255. With `outside`, an
            image without an object is all object.

        Raises:
            UsageError: a mask does not have the image's size.
        """
        annotation = self.images[index]
        if annotation.mask is None:
            covered = _draw_boxes(annotation.boxes, geometry, size)
            everything = self.outside and not annotation.boxes
            return np.full(size, 255, np.uint8) if everything else covered
        mask = annotation.mask()
        if mask.shape != (geometry.height, geometry.width):
            raise UsageError(
                f"its mask has {mask.shape[1]}x{mask.shape[0]} pixels, the image as a viewer shows it "
                f"{geometry.width}x{geometry.height}; expected the same size"
            )
        height, width = size
        image = Image.fromarray(mask.astype(np.uint8) * np.uint8(255)).crop(geometry.crop)
        return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def read_regions(data: DataSet, keep_off: str) -> Regions:
    """Return the regions of a data set's training images.

    Args:
        keep_off: a COCO file, or `outside`.

    Raises:
        UsageError: the file is damaged or has none of the images; or the data set's objects are unknown.
    """
    if keep_off != OUTSIDE:
        return Regions(_read_file(Path(keep_off), data))
    if data.crop is not None:
        raise UsageError(
            f"--keep-off {OUTSIDE}: images of {data.root} are cropped to their boxes, so nothing of them is outside; "
            "add --no-boxes to train on whole images"
        )
    regions = Regions(annotate(data, data.train, boxes=True, parts=has_creatures(data)).images, outside=True)
    if not len(regions):
        raise UsageError(
            f"--keep-off {OUTSIDE}: {data.root} has no boxes or masks of its objects; give a COCO file of regions"
        )
    return regions


def _read_file(path: Path, data: DataSet) -> list[ImageAnnotation]:
    objects = read_objects(path)
    regions = []
    for sample in data.train:
        names = objects.matches(sample.path.as_posix())
        # an ambiguous name is ignored
        things = objects[names[0]] if len(names) == 1 else []
        boxes = tuple(thing.box for thing in things)
        mask = None
        if any(thing.segmentation for thing in things):
            mask = partial(_draw_mask, path, sample.path.name, things)
        regions.append(ImageAnnotation(data.class_names[sample.label], boxes, mask))
    if not any(region.boxes for region in regions):
        raise UsageError(
            f"--keep-off {path}: no regions for any of the {len(regions):,} training images, such as "
            f"{data.train[0].path.name}; expected a file_name that ends the image's path"
        )
    return regions


def _draw_mask(path: Path, name: str, things: Sequence[CocoObject]) -> NDArray[np.bool_]:
    """Return the pixels of an image's regions, bool [H, W]; those without a segmentation are their boxes."""
    size = things[0].size
    if size is None:
        raise UsageError(f"{path}: no height and width of {name}; masks need them")
    try:
        covered = draw_segmentations([thing.segmentation for thing in things if thing.segmentation], size)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise UsageError(
            f"{path}: a damaged segmentation of {name} ({error}); expected polygons or run lengths"
        ) from None
    boxes = [thing.box for thing in things if not thing.segmentation]
    return covered | (_draw_boxes(boxes, Geometry.whole(size[1], size[0]), size) > 127)


def _draw_boxes(boxes: Sequence[Box], geometry: Geometry, size: tuple[int, int]) -> NDArray[np.uint8]:
    left, top, right, bottom = geometry.crop
    covered = np.zeros(size)
    for x0, y0, x1, y1 in boxes:
        rows = _overlap(y0, y1, top, bottom, size[0])
        columns = _overlap(x0, x1, left, right, size[1])
        covered = np.maximum(covered, np.outer(rows, columns))
    return np.round(covered * 255).astype(np.uint8)


def _overlap(start: float, end: float, low: int, high: int, pixels: int) -> NDArray[np.float64]:
    """Return the share of each of `pixels` equal parts of [low, high] that lies in [start, end]."""
    edges = np.clip((np.array([start, end]) - low) * pixels / (high - low), 0, pixels)
    parts = np.arange(pixels)
    shares: NDArray[np.float64] = np.clip(np.minimum(parts + 1, edges[1]) - np.maximum(parts, edges[0]), 0, 1)
    return shares
