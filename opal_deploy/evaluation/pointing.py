"""The pointing game (Zhang et al. 2018): whether the evidence of correct predictions lies on the object and its parts.

A cell of the evidence hits a region if its centre lies in it (for a part annotated as a point: near it, see
`annotations.MARGIN`). The share of hits is compared with its exact expectation for random cells: all cells of the
image for the object, and the cells whose centre lies in the object for parts, since a method that merely finds the
object scores like these.

Zhang et al., Top-Down Neural Attention by Excitation Backprop, International Journal of Computer Vision 126, 2018. They
point once per image, at a map's maximum; here every slot of the predicted class points once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.evaluation.inputs import Annotations, ImageAnnotation, Points
from opal_deploy.evaluation.metrics import Figures, Mean, mean_with_interval
from opal_deploy.preprocess.geometry import Geometry

if TYPE_CHECKING:
    from opal_deploy.evaluation.session import EvaluationResult


@dataclass(frozen=True)
class Share(Mean):
    """The mean over images of the share of an image's cells that hit, 0 ... 1, and that of random cells."""

    random: float

    def __str__(self) -> str:
        mean, low, high, random = (f"{100 * value:.1f}" for value in (self.mean, self.low, self.high, self.random))
        return f"{mean} % [{low}, {high}] (random {random} %)"


@dataclass(frozen=True)
class PointingGame(Figures):
    """The pointing game over the correct predictions of a data set."""

    images: int  # correct predictions with an annotated object or parts
    images_without_annotation: int  # correct predictions that are left out
    cells_per_image: float
    object: Share | None  # hits in the object; None if no object is known
    part: Share | None  # on any part
    distinguishing_part: Share | None
    rules: str

    def describe(self) -> Iterator[str]:
        """Yield the shares, and the rules by which they were counted."""
        titles = {"object": "in the object", "part": "on a part", "distinguishing_part": "on a distinguishing part"}
        shares = ", ".join(f"{title} {share}" for name, title in titles.items() if (share := getattr(self, name)))
        yield f"pointing game, {self.images:,} correct predictions, {self.cells_per_image:.4g} cells each: {shares}"
        left_out = self.images_without_annotation
        note = f"; {left_out:,} correct predictions without annotation left out" if left_out else ""
        yield f"  [95 % interval over images]; {self.rules}{note}"


def count_hits(
    annotation: ImageAnnotation, points: Points, geometry: Geometry, grid: CellGrid
) -> dict[str, tuple[float, float]]:
    """Return the share of one image's evidence that hits, and of random cells, by the fields of `PointingGame`.

    What is not annotated is left out.

    Args:
        points: [m, 2], centres (x, y) of the evidence's cells in pixels of the whole image.
        grid: all cells, for the random ones.
    """
    cells, hits = grid.centres(geometry.crop), dict[str, list[Any]]()
    if annotation.has_object:
        hits["object"] = [annotation.in_object(places) for places in (points, cells)]
    if annotation.parts:
        foreground = cells[annotation.foreground(geometry, grid)]
        on_parts = [annotation.on_parts(places, geometry) for places in (points, foreground)]
        hits["part"] = [on_part.any(axis=1) for on_part in on_parts]
        known = [part.distinguishing for part in annotation.parts]
        if any(flag is not None for flag in known):
            chosen = np.array(known, np.bool_)
            hits["distinguishing_part"] = [on_part[:, chosen].any(axis=1) for on_part in on_parts]
    return {name: (float(own.mean()), float(random.mean())) for name, (own, random) in hits.items()}


def play_pointing_game(
    result: EvaluationResult, annotations: Annotations, metadata: Metadata, *, correct_only: bool = True
) -> PointingGame | None:
    """Return the pointing game of an evaluated model; `annotations` has one entry per image.

    None if no correct prediction has an annotation, or if single cells are not the model's evidence. Without
    `correct_only` the label's slots count for wrong predictions, too.
    """
    argmax, class_map = result.outputs.argmax, metadata.class_map
    if metadata.evidence != "exact" or argmax is None:
        return None
    counted = np.flatnonzero((result.outputs.logits.argmax(axis=1) == result.labels) | (not correct_only)).tolist()
    pairs: dict[str, list[tuple[float, float]]] = {"object": [], "part": [], "distinguishing_part": []}
    sizes = []
    for number in counted:
        annotation, geometry, label = annotations.images[number], result.geometries[number], int(result.labels[number])
        points = metadata.cells.centres(geometry.crop)[argmax[number, class_map.channels(label)]]
        hits = count_hits(annotation, points, geometry, metadata.cells)
        sizes += [len(points)] if hits else []
        for name, pair in hits.items():
            pairs[name].append(pair)
    if not sizes:
        return None
    shares: dict[str, Share | None] = dict.fromkeys(pairs)
    for name, known in pairs.items():
        if known:
            own, random = zip(*known, strict=True)
            shares[name] = Share(**mean_with_interval(own).to_dict(), random=float(np.mean(random)))
    rules = "; ".join(filter(None, (annotations.part_rule, f"random {annotations.foreground}")))
    cells_per_image, left_out = float(np.mean(sizes)), len(counted) - len(sizes)
    return PointingGame(len(sizes), left_out, cells_per_image, **shares, rules=rules)
