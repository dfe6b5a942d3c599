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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.evaluation.annotations import Annotations, ImageAnnotation, Points
from opal_deploy.evaluation.metrics import figures_to_dict
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.statistics import Mean, mean_with_interval

if TYPE_CHECKING:
    from opal_deploy.evaluation.session import EvaluationResult

# the most classes whose parts are printed, and the most parts per class
_MAX_CLASSES, _MAX_PARTS = 20, 3


@dataclass(frozen=True)
class ImageHits:
    """The hits of one image's m cells of evidence on its object and its Q parts.

    Attributes:
        slots: the slots of the cells, length m.
        in_object: bool [m]; None if no object is known.
        on_parts: bool [m, Q].
        random_object: share of all cells that lie in the object; None if no object is known.
        random_parts: [Q], share of the foreground cells on each part.
        random_any, random_distinguishing: share of the foreground cells on any part, on any distinguishing part.
    """

    annotation: ImageAnnotation
    slots: tuple[int, ...]
    in_object: NDArray[np.bool_] | None
    on_parts: NDArray[np.bool_]
    random_object: float | None
    random_parts: NDArray[np.float64]
    random_any: float
    random_distinguishing: float

    @property
    def on_distinguishing(self) -> NDArray[np.bool_]:
        """Whether each cell hits a distinguishing part, bool [m]."""
        return np.asarray(self.on_parts[:, self.annotation.distinguishing].any(axis=1))


@dataclass(frozen=True)
class Share:
    """A share of hits, 0 ... 1.

    Attributes:
        hits: mean over images of the share of an image's cells that hit, with its interval (images are the unit).
    """

    hits: Mean
    random: float

    def to_dict(self) -> dict[str, Any]:
        """Return the share for JSON: `Mean.to_dict` and `random`."""
        return {**self.hits.to_dict(), "random": self.random}


@dataclass(frozen=True)
class PartShare:
    """How often the evidence of a class lies on one part, over the correct predictions in which the part is visible.

    Attributes:
        variant: the name of this class's variant of the part, or empty.
        distinguishing: whether it distinguishes the class from others; None if unknown.
        images: share of images in which at least one cell of the evidence hits it.
        random: expectation of `evidence` for random foreground cells.
        slots: share of images in which a slot hits it, by slot.
    """

    part: str
    variant: str
    distinguishing: bool | None
    images: float
    evidence: float
    random: float
    slots: dict[int, float]

    @property
    def title(self) -> str:
        """The name for a person: `boots (feet)`."""
        return f"{self.variant} ({self.part})" if self.variant else self.part


@dataclass(frozen=True)
class PointingGame:
    """The pointing game over the correct predictions of a data set.

    Attributes:
        images: correct predictions with an annotated object or parts.
        images_without_annotation: correct predictions that are left out.
        cells_per_image: mean number of cells of evidence.
        object, part, distinguishing_part: shares of hits in the object, on any part, on any distinguishing part; None
            if the annotations do not have it.
        classes: class -> its parts, the most hit first; classes without correct predictions are left out.
    """

    images: int
    images_without_annotation: int
    cells_per_image: float
    object: Share | None
    part: Share | None
    distinguishing_part: Share | None
    classes: dict[str, list[PartShare]]
    rules: str
    confidence: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        """Return the summary for JSON; unknown shares are null."""
        shares = {"object": self.object, "part": self.part, "distinguishing_part": self.distinguishing_part}
        known = {name: None if share is None else share.to_dict() for name, share in shares.items()}
        return figures_to_dict(self) | known


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
    known = annotation.has_object
    chance = annotation.on_parts(cells[annotation.foreground(geometry, grid)], geometry)  # [foreground cells, Q]
    return ImageHits(
        annotation,
        tuple(slots),
        annotation.in_object(points) if known else None,
        annotation.on_parts(points, geometry),
        float(annotation.in_object(cells).mean()) if known else None,
        chance.mean(axis=0),
        float(chance.any(axis=1).mean()),
        float(chance[:, annotation.distinguishing].any(axis=1).mean()),
    )


def summarize_hits(hits: Sequence[ImageHits], annotations: Annotations, left_out: int = 0) -> PointingGame | None:
    """Return the summary of the images' hits; None without images.

    Args:
        left_out: number of correct predictions without annotation.
    """
    if not hits:
        return None
    by_class: dict[str, list[ImageHits]] = defaultdict(list)
    for hit in hits:
        by_class[hit.annotation.label].append(hit)
    parted = [hit for hit in hits if hit.annotation.parts]
    known = [hit for hit in parted if any(part.distinguishing is not None for part in hit.annotation.parts)]
    random_cells = f"random {annotations.foreground}"
    return PointingGame(
        len(hits),
        left_out,
        float(np.mean([len(hit.slots) for hit in hits])),
        _share([(hit.in_object, hit.random_object) for hit in hits]),
        _share([(np.asarray(hit.on_parts.any(axis=1)), hit.random_any) for hit in parted]),
        _share([(hit.on_distinguishing, hit.random_distinguishing) for hit in known]),
        {name: _part_shares(by_class[name]) for name in sorted(by_class)},
        "; ".join(filter(None, (annotations.part_rule, random_cells))),
    )


def _share(pairs: Sequence[tuple[NDArray[Any] | None, float | None]]) -> Share | None:
    """Return the share over pairs of an image's hits, bool [m], and their expectation for random cells, if any."""
    known = [(hits, chance) for hits, chance in pairs if hits is not None and chance is not None]
    if not known:
        return None
    return Share(
        mean_with_interval([hits.mean() for hits, _ in known]), float(np.mean([chance for _, chance in known]))
    )


def _part_shares(hits: Sequence[ImageHits]) -> list[PartShare]:
    """Return the shares of one class's parts, the most hit first, in the order of the annotations where equal."""
    columns: dict[str, list[tuple[ImageHits, int]]] = defaultdict(list)
    for hit in hits:
        for number, part in enumerate(hit.annotation.parts):
            columns[part.name].append((hit, number))
    shares = []
    for name, places in columns.items():
        on_part = np.stack([hit.on_parts[:, number] for hit, number in places])  # [images, m]
        part = places[0][0].annotation.parts[places[0][1]]
        shares.append(
            PartShare(
                name,
                part.variant,
                part.distinguishing,
                float(on_part.any(axis=1).mean()),
                float(on_part.mean()),
                float(np.mean([hit.random_parts[number] for hit, number in places])),
                dict(zip(places[0][0].slots, on_part.mean(axis=0).tolist(), strict=True)),
            )
        )
    return sorted(shares, key=lambda share: -share.evidence)


def play_pointing_game(
    result: EvaluationResult, annotations: Annotations, metadata: Metadata, *, correct_only: bool = True
) -> PointingGame | None:
    """Return the pointing game of an evaluated model; `annotations` has one entry per image.

    None if no correct prediction has an annotation, or if single cells are not the model's evidence. Without
    `correct_only` the label's slots count for wrong predictions, too.
    """
    argmax = result.outputs.argmax
    if metadata.evidence != "exact" or argmax is None:
        return None
    hits, left_out = [], 0
    counted = (result.outputs.logits.argmax(axis=1) == result.labels) | (not correct_only)
    for number in np.flatnonzero(counted).tolist():
        annotation, geometry = annotations.images[number], result.geometries[number]
        if not (annotation.has_object or annotation.parts):
            left_out += 1
            continue
        label = int(result.labels[number])
        cells = argmax[number, metadata.class_map.channels(label)]
        points = geometry.cell_centres(metadata.grid)[cells]
        slots = metadata.class_map.slots(label)
        hits.append(count_hits(annotation, slots, points, geometry, metadata.grid))
    return summarize_hits(hits, annotations, left_out)


def format_game(game: PointingGame) -> Iterator[str]:
    """Yield the shares, the rules, and for a few classes the parts that their slots hit."""
    titled = {
        "in the object": game.object, "on a part": game.part, "on a distinguishing part": game.distinguishing_part,
    }  # fmt: skip
    shares = [f"{title} {format_share(share)}" for title, share in titled.items() if share is not None]
    cells = f"{game.cells_per_image:.4g} cells each"
    yield f"pointing game, {game.images:,} correct predictions, {cells}: {', '.join(shares)}"
    left_out = game.images_without_annotation
    note = f"; {left_out:,} correct predictions without annotation left out" if left_out else ""
    yield f"  [95 % interval over images]; {game.rules}{note}"
    if len(game.classes) <= _MAX_CLASSES:
        for name, parts in game.classes.items():
            if parts:
                yield f"  {name}: {format_parts(parts)}"


def format_share(share: Share) -> str:
    """Return `84.0 % [82.1, 85.9] (random 24.5 %)`."""
    low, high = share.hits.interval
    return f"{100 * share.hits.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] (random {100 * share.random:.1f} %)"


def format_parts(parts: Sequence[PartShare]) -> str:
    """Return the parts that hold evidence in most images of a class; known distinguishing parts come first."""

    def listed(some: Sequence[PartShare]) -> str:
        return ", ".join(f"{part.title} {100 * part.images:.0f} %" for part in some)

    most_hit = sorted(parts, key=lambda part: -part.images)
    others = [part for part in most_hit if part.images > 0 and not part.distinguishing][:_MAX_PARTS]
    distinguishing = [part for part in most_hit if part.distinguishing]
    if not distinguishing:
        return f"{listed(others) or 'no part'} of its images"
    return f"distinguishing {listed(distinguishing)}; others {listed(others) or 'none'}"


def slot_table(game: PointingGame) -> tuple[list[str], list[list[str | int | float]]]:
    """Return header and rows of slot_parts.csv: one row per class and slot, one column per part.

    An entry is the share of images in which the slot hits the part, over the class's correct predictions in which the
    part is visible; empty if it is never visible.
    """
    names = sorted({part.part for parts in game.classes.values() for part in parts})
    rows: list[list[str | int | float]] = []
    for class_name, parts in game.classes.items():
        by_name = {part.part: part.slots for part in parts}
        rows += [
            [class_name, slot, *(by_name[name][slot] if name in by_name else "" for name in names)]
            for slot in sorted({slot for slots in by_name.values() for slot in slots})
        ]
    return ["class", "slot", *names], rows
