"""Boxes of explanations against the annotated parts of the generated data set.

A box **covers** a part if it holds at least a quarter of the part's box. A distinguishing part spans at most two cells
of a 7x7 grid each way, and one of two cells always holds half: a quarter is what one well placed cell is sure to hold,
wherever the grid cuts the part.

Every share stands beside its **control**: the same share for a box on a random cell of the creature, as the exact mean
over all cells that are at least a quarter foreground. A method that merely finds the creature scores like its control.
(Moving that threshold between a tenth and two fifths moves the control of 8 species at 160x160 by about 0.04 at most;
it is about 0.23, 0.32 and 0.43 on grids of 7x7, 5x5 and 4x4.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import DataSet, Sample, display_path
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.synthetic import Annotation, read_annotations
from opal_deploy.synthetic.dataset import PARTS_FILE

COVERED = 0.25
"""Least share of a part's box that a box has to hold to cover the part."""

FOREGROUND = 0.25
"""Least share of foreground in a cell that the control counts as on the creature."""

NO_PART = "none"

PARTS = "generated_parts"
"""The JSON key of the summary."""


@dataclass(frozen=True)
class BoxHits:
    """The parts that the boxes of one image cover.

    Attributes:
        species: the image's class.
        boxes: number of boxes.
        distinguishing: how many of them cover a distinguishing part.
        any_part: how many of them cover some part.
        control_distinguishing, control_any: the same as probabilities for one random foreground cell, 0 ... 1.
        most_covered: of each box, the part of which it holds the largest share; "none" if it covers no part.
    """

    species: str
    boxes: int
    distinguishing: int
    any_part: int
    control_distinguishing: float
    control_any: float
    most_covered: tuple[str, ...]


@dataclass(frozen=True)
class EvidenceSummary:
    """`BoxHits` of many images. Shares are 0 ... 1, of boxes; an image counts as often as it has boxes.

    Attributes:
        images, boxes: how many.
        distinguishing: share of boxes that cover a distinguishing part.
        any_part: share of boxes that cover some part.
        control_distinguishing, control_any: the same, expected of random foreground cells of the same images.
        slots: species -> for the first, second, ... box of its images: part (or "none") -> share of images in which
            that part is the one most covered. With a box per slot in slot order this says what each slot looks at.
    """

    images: int
    boxes: int
    distinguishing: float
    any_part: float
    control_distinguishing: float
    control_any: float
    slots: dict[str, list[dict[str, float]]]


def count_box_hits(annotation: Annotation, boxes: ArrayLike, grid: tuple[int, int]) -> BoxHits:
    """Compare the boxes of one image's explanation with its parts.

    Args:
        annotation: of the image. "Distinguishing" is meant for its own species: give boxes of a class the image is of.
        boxes: [B, 4], (x0, y0, x1, y1) in pixels of the image.
        grid: (H, W) of the feature map, laid over the whole image (straight resize); for the control.

    Raises:
        UsageError: `boxes` is not [B, 4], or the grid is empty.
    """
    box_array = np.asarray(boxes, dtype=np.float64)
    if box_array.size == 0:
        box_array = box_array.reshape(0, 4)
    if box_array.ndim != 2 or box_array.shape[1] != 4:
        raise UsageError(f"boxes of {annotation.image} have the shape {list(box_array.shape)}, expected [B, 4]")
    names = [name for name, part in annotation.parts.items() if part.visible]
    parts = np.array([annotation.parts[name].box for name in names], dtype=np.float64).reshape(-1, 4)
    distinguishing = np.array([annotation.parts[name].distinguishing for name in names], dtype=np.bool_)

    shares = _shares(box_array, parts)
    covers = shares >= COVERED - 1e-9  # a cell may hold exactly a quarter
    chance = _shares(_foreground_boxes(annotation, grid), parts) >= COVERED - 1e-9
    best = shares.argmax(axis=1) if names else np.zeros(len(box_array), dtype=np.intp)
    return BoxHits(
        species=annotation.species,
        boxes=len(box_array),
        distinguishing=int(covers[:, distinguishing].any(axis=1).sum()),
        any_part=int(covers.any(axis=1).sum()),
        control_distinguishing=float(chance[:, distinguishing].any(axis=1).mean()),
        control_any=float(chance.any(axis=1).mean()),
        most_covered=tuple(names[b] if c.any() else NO_PART for b, c in zip(best, covers, strict=True)),
    )


def summarize_hits(hits: Sequence[BoxHits]) -> EvidenceSummary:
    """Return the summary of many images' hits.

    Raises:
        UsageError: there is not a single box among them.
    """
    boxes = sum(h.boxes for h in hits)
    if boxes == 0:
        raise UsageError("no boxes to summarise: no image has an explanation")
    counts: dict[str, dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for h in hits:
        for slot, part in enumerate(h.most_covered):
            counts[h.species][slot][part] += 1
    return EvidenceSummary(
        images=len(hits),
        boxes=boxes,
        distinguishing=sum(h.distinguishing for h in hits) / boxes,
        any_part=sum(h.any_part for h in hits) / boxes,
        control_distinguishing=sum(h.boxes * h.control_distinguishing for h in hits) / boxes,
        control_any=sum(h.boxes * h.control_any for h in hits) / boxes,
        slots={
            species: [
                {part: n / slots[slot].total() for part, n in slots[slot].most_common()} for slot in range(len(slots))
            ]
            for species, slots in sorted(counts.items())
        },
    )


def cell_foreground(annotation: Annotation, grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return the share of foreground in each cell of a grid over the whole image: float64 [H, W], 0 ... 1.

    Exact for any grid: a pixel that a cell's edge cuts counts for both cells by area.

    Raises:
        UsageError: the grid has no cells.
    """
    if min(grid) < 1:
        raise UsageError(f"a grid of {grid[0]}x{grid[1]} cells; each side must be at least 1")
    rows = _overlaps(annotation.height, grid[0])
    columns = _overlaps(annotation.width, grid[1])
    return np.asarray(rows @ annotation.foreground() @ columns.T, dtype=np.float64)


def _overlaps(length: int, cells: int) -> NDArray[np.float64]:
    """Return the share of each cell that each pixel makes up along one side of the image: [cells, length]."""
    edges, pixels = np.linspace(0, length, cells + 1), np.arange(length)
    shared = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(shared.clip(min=0) * (cells / length), dtype=np.float64)


def _foreground_boxes(annotation: Annotation, grid: tuple[int, int]) -> NDArray[np.float64]:
    """Return boxes [B, 4] of the cells on the creature; if there is none, of the cells with the most foreground."""
    share = cell_foreground(annotation, grid)
    rows, columns = np.nonzero(share >= min(FOREGROUND, share.max()) - 1e-9)
    height, width = annotation.height / grid[0], annotation.width / grid[1]
    return np.stack([columns * width, rows * height, (columns + 1) * width, (rows + 1) * height], axis=1)


def _shares(boxes: NDArray[np.float64], parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of each part's box [P, 4] that each box [B, 4] holds: [B, P]."""
    low = np.maximum(boxes[:, None, :2], parts[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], parts[None, :, 2:])
    return np.asarray(
        (high - low).clip(min=0).prod(axis=2) / (parts[:, 2:] - parts[:, :2]).prod(axis=1), dtype=np.float64
    )


def has_annotations(data: DataSet) -> bool:
    """Return whether `data` is a generated data set, which has a parts file in its folder."""
    try:
        return (data.root / PARTS_FILE).is_file()
    except OSError:
        return False


def match_annotations(data: DataSet, samples: list[Sample]) -> list[Annotation]:
    """Return the annotations of `samples`, row for row.

    Raises:
        UsageError: the parts file is damaged, or has no annotation of a sample.
    """
    by_image = {annotation.image: annotation for annotation in read_annotations(data.root)}
    annotations = []
    for sample in samples:
        name = display_path(sample.path, data.root).replace("\\", "/")
        if name not in by_image:
            raise UsageError(
                f"{data.root / PARTS_FILE}: it has no annotation of {name}; take the image out, or leave the parts "
                "out with --no-parts"
            )
        annotations.append(by_image[name])
    return annotations


def evaluate_part_coverage(
    result: EvaluationResult, annotations: list[Annotation], metadata: Metadata
) -> EvidenceSummary | None:
    """Return which parts the evidence boxes of correctly predicted images cover, by slot.

    None if no prediction is right, or if single cells are not the model's evidence.
    """
    argmax = result.outputs.argmax
    if metadata.evidence != "exact" or argmax is None:
        return None
    m, hits = metadata.prototypes_per_class, []
    for number, (annotation, label) in enumerate(zip(annotations, result.labels.tolist(), strict=True)):
        if int(result.outputs.logits[number].argmax()) != label:
            continue
        whole = Geometry.whole(annotation.width, annotation.height)
        cells = argmax[number, label * m : (label + 1) * m].tolist()
        places = [divmod(cell, metadata.grid[1]) for cell in cells]
        boxes = [whole.cell_box(row, col, metadata.grid) for row, col in places]
        hits.append(count_box_hits(annotation, boxes, metadata.grid))
    return summarize_hits(hits) if hits else None


def part_coverage_document(summary: EvidenceSummary) -> dict[str, Any]:
    """Return the summary for JSON."""
    return asdict(summary)


def format_part_coverage(summary: EvidenceSummary) -> Iterator[str]:
    """Yield the shares as a line, and for each species a line with the parts that each slot covers."""
    yield (
        f"boxes on a distinguishing part {summary.distinguishing:.1%} (random cells of the creature "
        f"{summary.control_distinguishing:.1%}), on any part {summary.any_part:.1%} ({summary.control_any:.1%}); "
        f"{summary.images} right predictions"
    )
    for species, slots in summary.slots.items():
        slot_parts = [
            f"slot {number}: " + ", ".join(f"{part} {share:.0%}" for part, share in list(parts.items())[:3])
            for number, parts in enumerate(slots)
        ]
        yield f"  {species}: {'; '.join(slot_parts)}"


def part_coverage_table(summary: EvidenceSummary) -> tuple[list[str], list[list[str | int | float]]]:
    """Return header and rows of slot_parts.csv: a row for each slot of each species, a column for each part."""
    names = sorted({part for slots in summary.slots.values() for parts in slots for part in parts})
    rows: list[list[str | int | float]] = [
        [species, number, *(parts.get(name, 0.0) for name in names)]
        for species, slots in summary.slots.items()
        for number, parts in enumerate(slots)
    ]
    return ["species", "slot", *names], rows
