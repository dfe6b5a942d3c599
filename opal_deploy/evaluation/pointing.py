"""The pointing game (Zhang et al. 2018): whether the evidence of correct predictions lies on the object and its parts.

A cell of the evidence hits a region if its centre lies in it (for a part annotated as a point: near it, see
`annotations.MARGIN`). The share of hits is compared with its exact expectation for random cells: all cells of the
image for the object, and the cells whose centre lies in the object for parts, since a method that merely finds the
object scores like these.

Zhang et al., Top-Down Neural Attention by Excitation Backprop, International Journal of Computer Vision 126, 2018. They
point once per image, at a map's maximum; here every slot of the predicted class points once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.evaluation.inputs import Annotations, ImageAnnotation, Points
from opal_deploy.evaluation.metrics import Figures, Mean, mean_with_interval
from opal_deploy.preprocess.geometry import Geometry

if TYPE_CHECKING:
    from opal_deploy.evaluation.session import EvaluationResult


@dataclass(frozen=True)
class ImageHits:
    """The hits of one image's m cells of evidence on its object and its Q parts, and the shares of cells by chance."""

    annotation: ImageAnnotation
    in_object: NDArray[np.bool_] | None  # [m]; None if no object is known
    on_parts: NDArray[np.bool_]  # [m, Q]
    random_object: float | None  # share of all cells that lie in the object
    chance: NDArray[np.bool_]  # [foreground cells, Q], which cell of the foreground lies on which part

    def share(self, *, distinguishing: bool) -> tuple[float, float]:
        """Return the shares of the evidence and of foreground cells on any part, or on any distinguishing part."""
        chosen = np.array([bool(part.distinguishing) or not distinguishing for part in self.annotation.parts], np.bool_)
        hits, chance = (float(cells[:, chosen].any(axis=1).mean()) for cells in (self.on_parts, self.chance))
        return hits, chance


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


def count_hits(annotation: ImageAnnotation, points: Points, geometry: Geometry, grid: CellGrid) -> ImageHits:
    """Compare the evidence of one image with its annotation.

    Args:
        points: [m, 2], centres (x, y) of the evidence's cells in pixels of the whole image.
        grid: all cells, for the random ones.
    """
    cells = grid.centres(geometry.crop)
    chance = annotation.on_parts(cells[annotation.foreground(geometry, grid)], geometry)
    in_object, random = None, None
    if annotation.has_object:
        in_object, random = annotation.in_object(points), float(annotation.in_object(cells).mean())
    return ImageHits(annotation, in_object, annotation.on_parts(points, geometry), random, chance)


def _share(pairs: Iterable[tuple[float, float]]) -> Share | None:
    """Return the share over pairs of an image's share of hits and its expectation for random cells, if any."""
    shares = list(zip(*pairs, strict=True))
    return Share(**mean_with_interval(shares[0]).to_dict(), random=float(np.mean(shares[1]))) if shares else None


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
    hits = []
    for number in counted:
        annotation, geometry, label = annotations.images[number], result.geometries[number], int(result.labels[number])
        if annotation.has_object or annotation.parts:
            points = metadata.cells.centres(geometry.crop)[argmax[number, class_map.channels(label)]]
            hits.append(count_hits(annotation, points, geometry, metadata.cells))
    if not hits:
        return None
    parted = [hit for hit in hits if hit.annotation.parts]
    known = [hit for hit in parted if any(part.distinguishing is not None for part in hit.annotation.parts)]
    return PointingGame(
        len(hits),
        len(counted) - len(hits),
        float(np.mean([len(hit.on_parts) for hit in hits])),
        _share((float(hit.in_object.mean()), hit.random_object or 0.0) for hit in hits if hit.in_object is not None),
        _share(hit.share(distinguishing=False) for hit in parted),
        _share(hit.share(distinguishing=True) for hit in known),
        "; ".join(filter(None, (annotations.part_rule, f"random {annotations.foreground}"))),
    )


def format_game(game: PointingGame | None) -> Iterator[str]:
    """Yield the shares, and the rules by which they were counted."""
    if game is None:
        yield "pointing game: skipped, no correctly classified image has an annotation"
        return
    titles = {"object": "in the object", "part": "on a part", "distinguishing_part": "on a distinguishing part"}
    shares = ", ".join(f"{title} {share}" for name, title in titles.items() if (share := getattr(game, name)))
    yield f"pointing game, {game.images:,} correct predictions, {game.cells_per_image:.4g} cells each: {shares}"
    left_out = game.images_without_annotation
    note = f"; {left_out:,} correct predictions without annotation left out" if left_out else ""
    yield f"  [95 % interval over images]; {game.rules}{note}"
