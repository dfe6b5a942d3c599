"""The images of an evaluation with their annotations, and the checks of data, model and options before it.

Annotations are the objects and parts of images, as masks, boxes and points, that evidence is compared with. They come
from the generated data set (masks of the creatures, boxes of their parts, which parts are distinguishing), from CUB
(boxes of the birds, points on their parts), from other data sets with boxes, and from COCO files. Coordinates are
pixels of the whole image as a viewer shows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.metadata import Metadata, check_all_outputs
from opal_deploy.datasets import cub
from opal_deploy.datasets.checks import find_problems
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, Sample, display_path, pluralize, shorten_list
from opal_deploy.errors import UsageError, require
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.logs import Progress, WarningLine, as_progress
from opal_deploy.options import flag_of
from opal_deploy.preprocess.geometry import Box, Geometry
from opal_deploy.sources.annotations import read_objects
from opal_deploy.synthetic import Annotation, read_annotations
from opal_deploy.synthetic.creatures import MAX_SPECIES, list_species
from opal_deploy.synthetic.dataset import PARTS_FILE

Points = NDArray[np.float64]
"""Places in an image, (x, y) in its pixels: float64 [P, 2]."""

# pixels by which a cell's centre may miss a part's point, with the model's view scaled to 224 x 224: the margin of the
# pointing game (Zhang et al. 2018; TorchRay's `PointingGame(tolerance=15)`)
MARGIN, MARGIN_SCALE = 15.0, 224


@dataclass(frozen=True)
class Part:
    """A visible part of an object."""

    places: tuple[tuple[float, ...], ...]  # boxes (x0, y0, x1, y1) around it or points (x, y) on it
    distinguishing: bool | None = None  # whether it distinguishes the object's class from others; None if unknown


@dataclass(frozen=True)
class ImageAnnotation:
    """The annotation of one image; its object and parts may be unknown."""

    label: str
    boxes: tuple[Box, ...] = ()
    # returns the object's pixels, bool [height, width]; takes precedence over `boxes`
    mask: Callable[[], NDArray[np.bool_]] | None = None
    parts: tuple[Part, ...] = ()

    @property
    def has_object(self) -> bool:
        """Whether the object's place is known."""
        return self.mask is not None or bool(self.boxes)

    def in_object(self, points: Points) -> NDArray[np.bool_]:
        """Return which of P points lie in the object, bool [P]; none if no object is known."""
        if self.mask is None:
            return np.asarray(_in_boxes(points, self.boxes).any(axis=1))
        mask = self.mask()
        columns, rows = np.floor(points).astype(np.intp).T
        inside: NDArray[np.bool_] = (columns >= 0) & (columns < mask.shape[1]) & (rows >= 0) & (rows < mask.shape[0])
        inside[inside] = mask[rows[inside], columns[inside]]
        return inside

    def on_parts(self, points: Points, geometry: Geometry) -> NDArray[np.bool_]:
        """Return which of P points hit which of the Q parts, bool [P, Q].

        Args:
            geometry: of the image; the margin is given at the scale of the model's input.
        """
        hits = np.zeros((len(points), len(self.parts)), np.bool_)
        x0, y0, x1, y1 = geometry.crop
        to_input = MARGIN_SCALE / np.array([x1 - x0, y1 - y0], np.float64)
        for number, part in enumerate(self.parts):
            hits[:, number] = _in_boxes(points, [place for place in part.places if len(place) == 4]).any(axis=1)
            for place in (place for place in part.places if len(place) == 2):
                hits[:, number] |= np.hypot(*((points - np.array(place)) * to_input).T) < MARGIN
        return hits

    def foreground(self, geometry: Geometry, grid: CellGrid) -> NDArray[np.bool_]:
        """Return the cells whose centre lies in the object, bool [H * W]; all cells if there are none."""
        inside = self.in_object(grid.centres(geometry.crop))
        return inside if inside.any() else np.ones_like(inside)


@dataclass(frozen=True)
class Annotations:
    """The annotations of a data set's N images."""

    images: list[ImageAnnotation]  # N annotations, some of which may be empty
    foreground: str  # describes the cells of `ImageAnnotation.foreground`: "cells of the annotated boxes"
    part_rule: str = ""
    located: cub.PartLocations | None = None  # CUB's part locations; None for other data sets, or without parts

    @property
    def known(self) -> bool:
        """Whether any image has an annotated object or parts."""
        return any(image.has_object or image.parts for image in self.images)


def annotate(
    data: DataSet, samples: Sequence[Sample], *, boxes: bool, parts: bool, objects: Path | None = None
) -> Annotations:
    """Return the annotations of a data set's samples, row for row.

    Args:
        boxes: images are cropped to the samples' boxes, so that these are not objects within the image.
        objects: COCO file, whose boxes are the objects. If it has the image's class as a category, only the boxes of
            that category count.

    Raises:
        UsageError: the part annotations or the file of objects are damaged, or lack the samples.
    """
    if parts and (data.root / PARTS_FILE).is_file():
        by_image = {annotation.image: annotation for annotation in read_annotations(data.root)}
        names = [display_path(sample.path, data.root).replace("\\", "/") for sample in samples]
        if missing := [name for name in names if name not in by_image]:
            raise UsageError(
                f"{data.root / PARTS_FILE}: it has no annotation of {missing[0]}; remove the image, or use --no-parts"
            )
        known = annotate_creatures([by_image[name] for name in names])
    else:
        places = [sample.object_box if boxes else sample.box for sample in samples]
        foreground = "cells of the whole image (no foreground is known)"
        if boxes and any(sample.box is not None for sample in samples):
            foreground = "cells (images are cropped to their boxes)"
        elif any(box is not None for box in places):
            foreground = "cells of the annotated box (their centre in it)"
        images = [
            ImageAnnotation(data.class_names[sample.label], () if box is None else (box,))
            for sample, box in zip(samples, places, strict=True)
        ]
        known = Annotations(images, foreground)
        if parts and cub.has_parts(data):
            known = _add_cub_parts(known, cub.read_parts(data.root, samples))
    return known if objects is None else _replace_objects(known, objects, samples)


def annotate_creatures(creatures: Sequence[Annotation]) -> Annotations:
    """Return the annotations of generated images: their masks, and the boxes of their visible parts."""
    images = []
    for creature in creatures:
        parts = tuple(Part((part.box,), part.distinguishing) for part in creature.parts.values() if part.visible)
        images.append(ImageAnnotation(creature.species, mask=creature.foreground, parts=parts))
    return Annotations(images, "cells of the creature (their centre in its drawn mask)", "a part is hit within its box")


def _add_cub_parts(known: Annotations, located: cub.PartLocations) -> Annotations:
    """Add the visible parts; a left and a right part are one part with two places, as in part purity."""
    names = [name.removeprefix("left ").removeprefix("right ") for name in located.names]
    images = []
    for image, points, visible in zip(known.images, located.points.tolist(), located.visible.tolist(), strict=True):
        places: dict[str, list[tuple[float, ...]]] = {}
        for name, point, seen in zip(names, points, visible, strict=True):
            if seen:
                places.setdefault(name, []).append(tuple(point))
        images.append(replace(image, parts=tuple(Part(tuple(points)) for points in places.values())))
    rule = f"a part is hit within {MARGIN:g} pixels of its point where the input has {MARGIN_SCALE}x{MARGIN_SCALE}"
    return Annotations(images, known.foreground, rule, located)


def _replace_objects(known: Annotations, path: Path, samples: Sequence[Sample]) -> Annotations:
    objects = read_objects(path)
    matches = [objects.matches(sample.path.as_posix()) for sample in samples]
    # an ambiguous name is ignored
    listed = [objects[names[0]] if len(names) == 1 else [] for names in matches]
    categories = {thing.category for things in listed for thing in things}
    images = []
    for image, things in zip(known.images, listed, strict=True):
        own = [thing for thing in things if thing.category == image.label or image.label not in categories]
        images.append(replace(image, boxes=tuple(thing.box for thing in own), mask=None))
    if not any(image.boxes for image in images):
        raise UsageError(
            f"{path}: no boxes for any of the {len(samples)} images, such as {samples[0].path.name}; expected a "
            "file_name that ends the image's path"
        )
    return replace(known, images=images, foreground=f"cells of the boxes in {path.name} (their centre in one)")


def _in_boxes(points: Points, boxes: Sequence[tuple[float, ...]]) -> NDArray[np.bool_]:
    """Return which of P points lie in which of B boxes, bool [P, B]; left and top edges belong to a box."""
    corners = np.array(boxes, np.float64).reshape(-1, 4)
    return np.asarray(((points[:, None] >= corners[:, :2]) & (points[:, None] < corners[:, 2:])).all(axis=2))


@dataclass(frozen=True)
class EvaluationInputs:
    """The images of one split with their annotations."""

    data: DataSet
    samples: list[Sample]
    annotations: Annotations  # one per sample, for the pointing game; may be empty


def read_inputs(
    data: Path, path: Path, metadata: Metadata, options: EvaluateOptions, *, whole: bool = False
) -> EvaluationInputs:
    """Read a data set's split with the annotations that the options and the data set allow; log warnings.

    With `whole`, all images are decoded, and those that cannot be are left out.

    Raises:
        UsageError: the data set does not fit the options or the model, or annotations are missing or damaged.
    """
    trained_on_all = (metadata.training.get("data") or {}).get("val") == 0
    # classes with a few images cannot be split
    needs_validation = options.split == "val" or (options.split == "train" and not trained_on_all)
    progress = as_progress(options.progress)
    data_set = read_dataset(data, options.dataset, needs_validation=lambda _: needs_validation, progress=progress)
    options.log(f"read as {data_set.describe()}")
    if whole:
        data_set = _leave_out_damaged(data_set, progress)
    samples = data_set.select(options.split)
    if not samples:
        raise UsageError(
            f"{data_set.root}: no {options.split} images; give --split all for all {len(data_set.select('all')):,} if "
            "none was used in training, or --split val for those that `train` sets aside"
        )
    check_classes(path, list(metadata.class_names), data_set)
    warnings = [*data_set.warnings]
    if metadata.crop != (measured := data_set.crop if options.boxes else None):
        names = ["images cropped to boxes" if crop else "whole images" for crop in (metadata.crop, measured)]
        warnings.append(f"{path} was trained on {names[0]} but is measured on {names[1]}; see --boxes and --no-boxes")
    if trained_on_all and data_set.whole is not None:
        warnings.append(
            f"{path} was trained on all images of a data set, perhaps on these; `inspect` has figures of images that "
            "it had not seen"
        )
    for line in warnings:
        options.log(WarningLine(f"warning: {line}"))
    species = {kind.name for kind in list_species(MAX_SPECIES)}
    if options.interventions and not species.issuperset(data_set.class_names):
        raise UsageError(f"{data_set.root}: --interventions draws creatures; it needs a generated data set (`demo`)")
    objects = None if options.annotations is None else Path(options.annotations)
    annotations = annotate(data_set, samples, boxes=options.boxes, parts=options.parts, objects=objects)
    return EvaluationInputs(data_set, samples, annotations)


def _leave_out_damaged(data: DataSet, progress: Progress) -> DataSet:
    """Return the data set without images that cannot be decoded; after the split, which would be another without."""
    damaged = find_problems(data.select("all"), progress, whole=True)
    names = shorten_list([f"{display_path(path, data.root)} ({reason})" for path, reason in damaged.items()])
    warning = f"left out {len(damaged)} image(s) that cannot be decoded: {names}"
    return replace(data.without(damaged), skipped=[*data.skipped, *damaged], warnings=[*data.warnings, warning])


def has_validation_images(metadata: Metadata, inputs: EvaluationInputs, options: EvaluateOptions) -> bool:
    """Return whether training set aside these images and crops, as far as the model's record tells."""
    data = metadata.training.get("data")
    # the model may have been trained on images of a different validation set
    same_images = not isinstance(data, dict) or data.get("val") in (None, len(inputs.samples))
    same_crop = metadata.crop == (inputs.data.crop if options.boxes else None)
    return options.split == "val" and same_images and same_crop


def check_model(path: Path, metadata: Metadata, options: EvaluateOptions) -> None:
    """Raise UsageError for a model without the outputs and the evidence, or with a file, that the options need."""
    check_all_outputs(metadata, str(path), "`evaluate`")
    is_checkpoint = model_kind(path) == "checkpoint"
    for name in ("faithfulness", "attack_outside", "randomise", "interventions", "record"):
        # a classifier's calibration and margins are recorded, its cells are not measured
        known = metadata.evidence == "exact" or (name == "record" and metadata.evidence == "regions")
        if getattr(options, name) and not known:
            raise UsageError(
                f"{path}: no single cell is its evidence (evidence {metadata.evidence}); leave {flag_of(name)} out"
            )
        if getattr(options, name) and name in ("attack_outside", "randomise") and not is_checkpoint:
            raise UsageError(f"{path}: {flag_of(name)} needs the checkpoint that it was exported from")
    if is_checkpoint and (options.interventions or options.faithfulness):
        require("captum", "evaluate", "Grad-CAM")
    if options.record and is_checkpoint and metadata.source.get("format") == "authors":
        raise UsageError(
            f"{path}: a bare state dict cannot store an evaluation; export it, and use --record with the export"
        )


def check_classes(path: Path, class_names: list[str], data_set: DataSet) -> None:
    """Raise UsageError unless the model's classes are the data set's, in the same order."""
    pairs = itertools.zip_longest(class_names, data_set.class_names)
    for number, (model_name, data_name) in enumerate(pairs, 1):
        if model_name != data_name:
            raise UsageError(
                f"{path} knows {pluralize(len(class_names), 'class', 'classes')}, {data_set.root} has "
                f"{len(data_set.class_names)}: number {number} is {model_name!r} in the model and {data_name!r} in the "
                "data set; give the data set that the model was trained on"
            )
