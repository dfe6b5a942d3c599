"""The pointing game (Zhang et al. 2018): whether the evidence of correct predictions lies on the object and its parts.

A cell of the evidence hits a region if its centre lies in it (for a part annotated as a point: near it, see
`annotations.MARGIN`). The share of hits is compared with its exact expectation for random cells: all cells of the
image for the object, and the cells whose centre lies in the object for parts, since a method that merely finds the
object scores like these.

Zhang et al., Top-Down Neural Attention by Excitation Backprop, International Journal of Computer Vision 126, 2018. They
point once per image, at a map's maximum; here every slot of the predicted class points once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.evaluation.annotations import Annotations, ImageAnnotation, Points
from opal_deploy.evaluation.metrics import Figures, Mean, mean_with_interval
from opal_deploy.preprocess.geometry import Geometry

if TYPE_CHECKING:
    from opal_deploy.evaluation.session import EvaluationResult

# the most classes whose parts are printed, and the most parts per class
_MAX_CLASSES, _MAX_PARTS = 20, 3


@dataclass(frozen=True)
class ImageHits:
    """The hits of one image's m cells of evidence on its object and its Q parts, and the shares of cells by chance."""

    annotation: ImageAnnotation
    slots: tuple[int, ...]  # of the cells, length m
    in_object: NDArray[np.bool_] | None  # [m]; None if no object is known
    on_parts: NDArray[np.bool_]  # [m, Q]
    random_object: float | None  # share of all cells that lie in the object
    chance: NDArray[np.bool_]  # [foreground cells, Q], which cell of the foreground lies on which part

    def share(self, *, distinguishing: bool) -> tuple[float, float]:
        """Return the shares of the evidence and of foreground cells on any part, or on any distinguishing part."""
        chosen = self.annotation.distinguishing if distinguishing else slice(None)
        hits, chance = (float(cells[:, chosen].any(axis=1).mean()) for cells in (self.on_parts, self.chance))
        return hits, chance


@dataclass(frozen=True)
class Share(Mean):
    """The mean over images of the share of an image's cells that hit, 0 ... 1, and that of random cells."""

    random: float


@dataclass(frozen=True)
class PartShare(Figures):
    """How often the evidence of a class lies on one part, over the correct predictions in which the part is visible."""

    part: str
    variant: str  # the name of this class's variant of the part, or empty
    distinguishing: bool | None  # whether it distinguishes the class from others; None if unknown
    images: float  # share of images in which at least one cell of the evidence hits it
    evidence: float  # mean share of an image's cells that hit it
    random: float  # expectation of `evidence` for random foreground cells
    slots: dict[int, float]  # share of images in which a slot hits it

    @property
    def title(self) -> str:
        """The name for a person: `boots (feet)`."""
        return f"{self.variant} ({self.part})" if self.variant else self.part


@dataclass(frozen=True)
class PointingGame(Figures):
    """The pointing game over the correct predictions of a data set."""

    images: int  # correct predictions with an annotated object or parts
    images_without_annotation: int  # correct predictions that are left out
    cells_per_image: float
    object: Share | None  # hits in the object; None if no object is known
    part: Share | None  # on any part
    distinguishing_part: Share | None
    classes: dict[str, list[PartShare]]  # the most hit part first; only classes with correct predictions
    rules: str
    confidence: float = 0.95


def count_hits(
    annotation: ImageAnnotation, slots: Sequence[int], points: Points, geometry: Geometry, grid: tuple[int, int]
) -> ImageHits:
    """Compare the evidence of one image with its annotation.

    Args:
        slots: m slots of one class.
        points: [m, 2], centres (x, y) of the evidence's cells in pixels of the whole image.
        grid: (H, W) of the feature map, for the random cells.
    """
    cells = geometry.cell_centres(grid)
    chance = annotation.on_parts(cells[annotation.foreground(geometry, grid)], geometry)
    in_object, random = None, None
    if annotation.has_object:
        in_object, random = annotation.in_object(points), float(annotation.in_object(cells).mean())
    return ImageHits(annotation, tuple(slots), in_object, annotation.on_parts(points, geometry), random, chance)


def summarize_hits(hits: Sequence[ImageHits], annotations: Annotations, left_out: int = 0) -> PointingGame | None:
    """Return the summary of the images' hits; None without images. `left_out`: correct predictions not annotated."""
    if not hits:
        return None
    by_class: dict[str, list[ImageHits]] = defaultdict(list)
    for hit in hits:
        by_class[hit.annotation.label].append(hit)
    parted = [hit for hit in hits if hit.annotation.parts]
    known = [hit for hit in parted if any(part.distinguishing is not None for part in hit.annotation.parts)]
    return PointingGame(
        len(hits),
        left_out,
        float(np.mean([len(hit.slots) for hit in hits])),
        _share((float(hit.in_object.mean()), hit.random_object or 0.0) for hit in hits if hit.in_object is not None),
        _share(hit.share(distinguishing=False) for hit in parted),
        _share(hit.share(distinguishing=True) for hit in known),
        {name: _part_shares(by_class[name]) for name in sorted(by_class)},
        "; ".join(filter(None, (annotations.part_rule, f"random {annotations.foreground}"))),
    )


def _share(pairs: Iterable[tuple[float, float]]) -> Share | None:
    """Return the share over pairs of an image's share of hits and its expectation for random cells, if any."""
    shares = list(zip(*pairs, strict=True))
    return Share(**mean_with_interval(shares[0]).to_dict(), random=float(np.mean(shares[1]))) if shares else None


def _part_shares(hits: Sequence[ImageHits]) -> list[PartShare]:
    """Return the shares of one class's parts, the most hit first, in the order of the annotations where equal."""
    columns: dict[str, list[tuple[ImageHits, int]]] = defaultdict(list)
    for hit in hits:
        for number, part in enumerate(hit.annotation.parts):
            columns[part.name].append((hit, number))
    shares = []
    for name, places in columns.items():
        part, on_part = places[0][0].annotation.parts[places[0][1]], np.stack([hit.on_parts[:, n] for hit, n in places])
        random = float(np.mean([hit.chance[:, n].mean() for hit, n in places]))
        slots = dict(zip(places[0][0].slots, on_part.mean(axis=0).tolist(), strict=True))
        images, evidence = float(on_part.any(axis=1).mean()), float(on_part.mean())
        shares.append(PartShare(name, part.variant, part.distinguishing, images, evidence, random, slots))
    return sorted(shares, key=lambda share: -share.evidence)


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
    hits, left_out = [], 0
    counted = (result.outputs.logits.argmax(axis=1) == result.labels) | (not correct_only)
    for number in np.flatnonzero(counted).tolist():
        annotation, geometry, label = annotations.images[number], result.geometries[number], int(result.labels[number])
        if annotation.has_object or annotation.parts:
            points = geometry.cell_centres(metadata.grid)[argmax[number, class_map.channels(label)]]
            hits.append(count_hits(annotation, class_map.slots(label), points, geometry, metadata.grid))
        else:
            left_out += 1
    return summarize_hits(hits, annotations, left_out)


def format_game(game: PointingGame | None) -> Iterator[str]:
    """Yield the shares, the rules, and for a few classes the parts that their slots hit."""
    if game is None:
        yield "pointing game: skipped, no correctly classified image has an annotation"
        return
    titles = {"object": "in the object", "part": "on a part", "distinguishing_part": "on a distinguishing part"}
    shares = [f"{title} {_format_share(share)}" for name, title in titles.items() if (share := getattr(game, name))]
    yield (
        f"pointing game, {game.images:,} correct predictions, {game.cells_per_image:.4g} cells each: "
        f"{', '.join(shares)}"
    )
    left_out = game.images_without_annotation
    note = f"; {left_out:,} correct predictions without annotation left out" if left_out else ""
    yield f"  [95 % interval over images]; {game.rules}{note}"
    if len(game.classes) <= _MAX_CLASSES:
        yield from (f"  {name}: {format_parts(parts)}" for name, parts in game.classes.items() if parts)


def _format_share(share: Share) -> str:
    mean, low, high, random = (f"{100 * value:.1f}" for value in (share.mean, share.low, share.high, share.random))
    return f"{mean} % [{low}, {high}] (random {random} %)"


def format_parts(parts: Sequence[PartShare]) -> str:
    """Return the parts that hold evidence in most images of a class; known distinguishing parts come first."""
    most_hit = sorted(parts, key=lambda part: -part.images)
    distinguishing = [part for part in most_hit if part.distinguishing]
    others = [part for part in most_hit if part.images > 0 and not part.distinguishing][:_MAX_PARTS]
    texts = [
        ", ".join(f"{part.title} {100 * part.images:.0f} %" for part in chosen) for chosen in (distinguishing, others)
    ]
    if distinguishing:
        return f"distinguishing {texts[0]}; others {texts[1] or 'none'}"
    return f"{texts[1] or 'no part'} of its images"
