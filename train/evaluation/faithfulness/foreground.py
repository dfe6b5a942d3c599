"""Which cells show the thing itself: a control that also removes empty sky would be too easy to beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.demo import Annotation, cell_foreground
from opal_deploy.demo.evidence import FOREGROUND
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import Box
from opal_deploy.train.data.samples import Sample


@dataclass(frozen=True)
class Foreground:
    """Attributes:
    name: what the control's random cells are, for a person.
    cells: a picture's number in its data set and how it was laid out -> bool [H * W].
    """

    name: str
    cells: Callable[[int, Geometry], NDArray[np.bool_]]


def known(
    samples: list[Sample], annotations: list[Annotation] | None, grid: tuple[int, int], *, boxes: bool
) -> Foreground:
    """The best that is known of these pictures: drawn masks, else boxes, else nothing, and then every cell counts.

    A cell counts from a quarter of foreground on; a picture without any such cell counts whole.

    Args:
        samples: N pictures.
        annotations: of the generated set's N pictures; None for other sets.
        grid: (H, W).
        boxes: pictures are cropped to their boxes, so that every cell is in the box.
    """
    everywhere = np.ones(grid[0] * grid[1], np.bool_)
    if annotations is not None:
        masks = annotations
        return Foreground(
            "random cells of the creature (a quarter foreground or more, by the drawn masks)",
            lambda index, _: _enough(cell_foreground(masks[index], grid)),
        )
    if all(sample.box is None for sample in samples):
        return Foreground("random cells of the whole picture (no foreground is known)", lambda *_: everywhere)
    if boxes:
        return Foreground("random cells (pictures are cropped to their boxes)", lambda *_: everywhere)

    def in_box(index: int, geometry: Geometry) -> NDArray[np.bool_]:
        box = samples[index].box
        return everywhere if box is None else _enough(_share_in_box(box, geometry, grid))

    return Foreground("random cells of the annotated box (a quarter inside or more)", in_box)


def _enough(shares: NDArray[np.float64]) -> NDArray[np.bool_]:
    counted: NDArray[np.bool_] = (shares >= FOREGROUND - 1e-9).ravel()
    return counted if counted.any() else np.ones_like(counted)


def _share_in_box(box: Box, geometry: Geometry, grid: tuple[int, int]) -> NDArray[np.float64]:
    """[H, W]: which share of each cell of the whole picture lies in a box."""

    def along(low: float, high: float, length: int, cells: int) -> NDArray[np.float64]:
        edges = np.linspace(0, length, cells + 1)
        shared = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
        return np.asarray(shared.clip(min=0) * (cells / length), dtype=np.float64)

    rows = along(box[1], box[3], geometry.height, grid[0])
    return np.outer(rows, along(box[0], box[2], geometry.width, grid[1]))
