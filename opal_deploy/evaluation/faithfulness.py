"""Faithfulness of the evidence: what removing the evidence cells changes, next to controls, and how stable cells are.

Everything here works on the model's input, uint8 [N, H0, W0, 3] before normalisation, through any session. A cell is
removed by painting its rectangle of the input with a fill; the figure is the cosine of the class predicted for the
unchanged image. A cell's receptive field is larger than its rectangle, so every figure is compared with controls that
remove as many other cells.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.heads import find_totals
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.annotations import Annotations
from opal_deploy.evaluation.cells import (
    CONTRIBUTION,
    GRAD_CAM,
    RANDOM,
    RANKINGS,
    GradCam,
    ImageArray,
    build_rankings,
    fill_image,
    replace_cells,
)
from opal_deploy.evaluation.metrics import Figures, Mean, format_columns, mean_with_interval
from opal_deploy.evaluation.options import EvaluateOptions, Fill
from opal_deploy.evaluation.session import Photographs, photographs
from opal_deploy.logs import Progress, no_progress
from opal_deploy.runtime.session import Session

# images measured together: each takes dozens of passes, which fill batches of their own
_IMAGES_TOGETHER = 4
# first word of the seeds of the noise that stability is measured with
_NOISE_STREAM = 13
_JPEG_QUALITY, _NOISE_COUNTS = 75, 5
NO_GRADIENTS = "an exported model has no gradients; give the checkpoint"
FLIP = "horizontal flip"


class Curve(NamedTuple):
    """The deletion and insertion curves of one image and one ranking of k cells."""

    deletion: NDArray[np.float64]  # [k + 1], cosine with the first 0, 1, ..., k cells removed
    insertion: NDArray[np.float64]  # [k + 1], cosine with nothing but the first 0, 1, ..., k cells
    class_kept: bool  # whether the class is still predicted with all k cells removed
    evidence_share: float  # share of the k cells that are evidence, 0 ... 1

    def areas(self, steps: int) -> NDArray[np.float64]:
        """Return the mean cosines of deletion and insertion over the first `steps` cells, and the drop: float64 [3].

        The deletion's is small and the insertion's large if the first cells matter most.
        """
        deletion, insertion = self.deletion[: steps + 1], self.insertion[: steps + 1]
        means = [float(np.trapezoid(curve, dx=1 / steps)) for curve in (deletion, insertion)]
        return np.array([*means, deletion[0] - deletion[-1]])


@dataclass(frozen=True)
class Advantage(Figures):
    """The lead of the evidence, ranked by contribution, over another ranking: paired, positive where it wins.

    If an image has fewer cells in the other ranking, the evidence is cut to as many cells.
    """

    deletion_area: Mean  # the other's deletion area minus the evidence's
    insertion_area: Mean  # the evidence's insertion area minus the other's
    drop: Mean  # the evidence's drop minus the other's


@dataclass(frozen=True)
class RankingFigures(Figures):
    """One ranking, over the images that have it."""

    fill: Fill
    ranking: str
    images: int
    cells: float  # mean number of cells
    # deletion, insertion: mean cosine after 0, 1, ..., m steps; an image with fewer cells keeps its last value
    deletion: list[float]
    insertion: list[float]
    deletion_area: Mean  # deletion_area, insertion_area, drop: see `Curve.areas`
    insertion_area: Mean
    drop: Mean
    class_kept: float  # share of images whose predicted class stays with all cells removed
    evidence_share: float  # mean share of the cells that are evidence
    advantage: Advantage | None  # of the evidence over this ranking; None for the evidence itself


@dataclass(frozen=True)
class StabilityFigures(Figures):
    """The stability of the predicted class's cells under one change of the images, as shares of its slots."""

    change: str
    same_cell: Mean
    within_one_cell: Mean
    same_class: float


@dataclass(frozen=True)
class Faithfulness(Figures):
    """The faithfulness figures of one model."""

    images: int
    images_available: int
    prototypes_per_class: int
    different_cells: float  # mean number of different evidence cells per image, d
    random_control: str
    rankings: list[RankingFigures]
    stability: list[StabilityFigures]
    # ranking -> why it is missing, or measured on fewer images, in one line
    unavailable: dict[str, str] = field(default_factory=dict)
    seed: int = 0
    confidence: float = 0.95


def measure_faithfulness(
    session: Session,
    samples: Sequence[Sample],
    chosen: Sequence[int],
    annotations: Annotations,
    options: EvaluateOptions,
    *,
    heat_map: GradCam | None = None,
    center: float = 0.5,
    progress: Progress = no_progress,
) -> Faithfulness:
    """Measure deletion and insertion curves, controls and stability of one model.

    Args:
        chosen: indices of the images to measure, at least one.
        annotations: of the samples; the random control draws from cells that show the object.
        heat_map: Grad-CAM; None leaves that control out.
        center: centre of a cell's receptive field, in cells from the corner of its box (`EffectiveField.center`).

    Raises:
        UsageError: an image cannot be used, or the model's logits are not finite.
    """
    metadata, slots = session.metadata, session.metadata.class_map.max_slots
    curves: list[dict[str, Curve]] = []
    stabilities: list[NDArray[np.float64]] = []
    for images in photographs(
        lambda pixels: _run(session, pixels, options.batch), samples, metadata.input_size, chosen=chosen,
        annotations=annotations, boxes=options.boxes, batch=min(options.batch, _IMAGES_TOGETHER), progress=progress,
        note="removing cells",
    ):  # fmt: skip
        stabilities.append(_measure_stability(session, images, options, center))
        curves += _measure_curves(session, images, options, heat_map)
    unavailable = {} if heat_map is not None else {GRAD_CAM: NO_GRADIENTS}
    if without := sum(RANDOM not in by_ranking for by_ranking in curves):
        unavailable[RANDOM] = f"{without} of {len(curves)} images left out: all their foreground cells are evidence"
    cells = float(np.mean([len(by_ranking[CONTRIBUTION].deletion) - 1 for by_ranking in curves]))
    rankings = [
        _summarize(options.fill, name, pairs, slots)
        for name in RANKINGS
        if (pairs := [(by_ranking[name], by_ranking[CONTRIBUTION]) for by_ranking in curves if name in by_ranking])
    ]
    stability = [
        StabilityFigures(name, mean_with_interval(same), mean_with_interval(near), float(kept.mean()))
        for name, (same, near, kept) in zip(image_changes(0), np.concatenate(stabilities, axis=2), strict=True)
    ]
    return Faithfulness(
        len(curves), len(samples), slots, cells, f"random {annotations.foreground}", rankings, stability, unavailable,
        options.seed,
    )  # fmt: skip


def _run(session: Session, images: Iterable[ImageArray], batch: int) -> Outputs:
    """Return the outputs for images, of which at most a batch is held at a time."""
    stream, collected = iter(images), []
    while group := list(itertools.islice(stream, batch)):
        outputs = session.run(np.stack(group))
        if not np.isfinite(outputs.logits).all():
            raise UsageError(
                "the model's logits for an image with removed cells are not finite numbers; its precision is too low: "
                "export fp32"
            )
        collected.append(replace(outputs, attention=None))
    return Outputs.concatenate(collected)


def _measure_curves(
    session: Session, images: Photographs[Outputs], options: EvaluateOptions, heat_map: GradCam | None
) -> list[dict[str, Curve]]:
    """Return each image's curves by ranking."""
    metadata, grid, outputs = session.metadata, session.metadata.grid, images.outputs
    predicted, every = outputs.logits.argmax(axis=1), frozenset(range(grid[0] * grid[1]))
    heat_maps = [None] * len(predicted) if heat_map is None else heat_map(images.pixels, predicted)
    rankings = [
        build_rankings(
            outputs, row, metadata, known.foreground(geometry, grid), seed=options.seed, index=index, heat_map=heat
        )
        for row, (index, geometry, known, heat) in enumerate(
            zip(images.indices, images.geometries, images.annotations, heat_maps, strict=True)
        )
    ]

    def list_removed(cells: tuple[int, ...]) -> tuple[list[frozenset[int]], list[frozenset[int]]]:
        firsts = [cells[:k] for k in range(len(cells) + 1)]
        return [frozenset(first) for first in firsts], [every.difference(first) for first in firsts]

    # equal sets of removed cells run once
    steps = dict.fromkeys(
        (row, removed)
        for row, ranking in enumerate(rankings)
        for cells in ranking.values()
        for removed in itertools.chain(*list_removed(cells))
    )
    fills = [
        fill_image(pixels, options.fill, grid, seed=options.seed, index=index)
        for pixels, index in zip(images.pixels, images.indices, strict=True)
    ]
    changed = (replace_cells(images.pixels[row], fills[row], removed, grid) for row, removed in steps)
    perturbed = _run(session, changed, options.batch)
    if perturbed.scores is None:
        raise ValueError("a model without slots has no cosines")
    classes = predicted[[row for row, _ in steps]]
    cosines = find_totals(perturbed.scores, metadata)[np.arange(len(classes)), classes].tolist()
    results = dict(zip(steps, zip(cosines, perturbed.logits.argmax(axis=1) == classes, strict=True), strict=True))

    def build_curve(row: int, cells: tuple[int, ...]) -> Curve:
        deleted, inserted = ([results[row, removed] for removed in sets] for sets in list_removed(cells))
        deletion, insertion = (np.array([cosine for cosine, _ in curve]) for curve in (deleted, inserted))
        share = len({*cells} & {*rankings[row][CONTRIBUTION]}) / len(cells)
        return Curve(deletion, insertion, bool(deleted[-1][1]), share)

    return [{name: build_curve(row, cells) for name, cells in ranking.items()} for row, ranking in enumerate(rankings)]


def _summarize(fill: Fill, ranking: str, pairs: Sequence[tuple[Curve, Curve]], steps: int) -> RankingFigures:
    """Return the figures of a ranking from its curves, each with the evidence's for the same image."""
    lengths = [len(curve.deletion) - 1 for curve, _ in pairs]
    areas = np.array([curve.areas(length) for (curve, _), length in zip(pairs, lengths, strict=True)])  # [images, 3]
    advantage = None
    if ranking != CONTRIBUTION:
        evidence = np.array([other.areas(length) for (_, other), length in zip(pairs, lengths, strict=True)])
        advantage = Advantage(*map(mean_with_interval, ((evidence - areas) * [-1, 1, 1]).T))

    def mean_curve(curves: Iterable[NDArray[np.float64]]) -> list[float]:
        padded = [np.pad(curve, (0, steps + 1 - len(curve)), mode="edge") for curve in curves]
        return [float(value) for value in np.mean(padded, axis=0)]

    deletion, insertion = (mean_curve(getattr(curve, name) for curve, _ in pairs) for name in ("deletion", "insertion"))
    deletion_area, insertion_area, drop = map(mean_with_interval, areas.T)
    kept, share = np.mean([[curve.class_kept, curve.evidence_share] for curve, _ in pairs], axis=0).tolist()
    return RankingFigures(
        fill, ranking, len(pairs), float(np.mean(lengths)), deletion, insertion, deletion_area, insertion_area, drop,
        kept, share, advantage,
    )  # fmt: skip


Change = Callable[[ImageArray, int], ImageArray]
"""Changes an image, given its index in the split."""


def image_changes(seed: int) -> dict[str, Change]:
    """Return the changes of the model's input by name; noise depends only on `seed` and the image's index."""

    def compress(image: ImageArray, _: int) -> ImageArray:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=_JPEG_QUALITY)
        return np.asarray(Image.open(stream).convert("RGB"))

    def resize(image: ImageArray, _: int) -> ImageArray:
        height, width = image.shape[:2]
        larger = Image.fromarray(image).resize((width + 1, height + 1), Image.Resampling.BILINEAR)
        return np.asarray(larger.resize((width, height), Image.Resampling.BILINEAR))

    def add_noise(image: ImageArray, index: int) -> ImageArray:
        drawn = np.random.default_rng((_NOISE_STREAM, seed, index)).standard_normal(image.shape)
        return np.rint(image + float(_NOISE_COUNTS) * drawn).clip(0, 255).astype(np.uint8)

    return {
        f"JPEG quality {_JPEG_QUALITY}": compress,
        "resize by a pixel": resize,
        f"noise, {_NOISE_COUNTS} counts": add_noise,
        FLIP: lambda image, _: image[:, ::-1],
    }


def _measure_stability(
    session: Session, images: Photographs[Outputs], options: EvaluateOptions, center: float
) -> NDArray[Any]:
    """Return, per change and image, the shares of slots in the same and in a neighbouring cell, and the same class.

    The result is float64 [changes, 3, n]. `center` is the receptive field's, see `measure_faithfulness`.
    """
    before, metadata, shares = images.outputs, session.metadata, []
    predicted = before.logits.argmax(axis=1)
    kept, width = metadata.class_map.kept[predicted], metadata.grid[1]
    for name, change in image_changes(options.seed).items():
        after = _run(session, map(change, images.pixels, images.indices), options.batch)
        if before.argmax is None or after.argmax is None:
            raise ValueError("a model without slots has no cells")
        (old_row, old_col), (new_row, new_col) = (
            np.divmod(metadata.class_map.take(cells, predicted), width) for cells in (before.argmax, after.argmax)
        )  # [n, S]
        if name == FLIP:
            old_col = np.rint(width - 2 * center - old_col).clip(0, width - 1)
        distance = np.maximum(np.abs(new_row - old_row), np.abs(new_col - old_col))
        same, near = (((distance <= most) & kept).sum(axis=1) / kept.sum(axis=1) for most in (0, 1))
        shares.append([same, near, after.logits.argmax(axis=1) == predicted])
    return np.array(shares, np.float64)


def format_faithfulness(measured: Faithfulness) -> Iterator[str]:
    """Yield the figures as lines for a terminal."""
    yield (
        f"faithfulness on {measured.images} of {measured.images_available} images: cosine of the predicted class while "
        f"its {measured.different_cells:.1f} different cells (mean; m = {measured.prototypes_per_class}) are removed "
        f"or put back ({measured.rankings[0].fill})"
    )
    yield f"random: {measured.random_control}, never the evidence"
    yield from (f"{ranking}: {reason}" for ranking, reason in measured.unavailable.items())
    rows = [["", "cells", "evidence", "deletion", "insertion", "drop", "kept"]]
    rows[0] += ["evidence better by: deletion", "insertion", "drop"]
    for row in measured.rankings:
        means = (row.deletion_area.mean, row.insertion_area.mean, row.drop.mean)
        cells = [f"{row.cells:.1f}", f"{row.evidence_share:.0%}", *(f"{mean:.3f}" for mean in means)]
        gain = row.advantage
        gains = [] if gain is None else [gain.deletion_area, gain.insertion_area, gain.drop]
        rows.append([row.ranking, *cells, f"{row.class_kept:.0%}", *(map(_interval, gains) if gains else [""] * 3)])
    yield from format_columns(rows)
    yield "deletion, insertion: area under the cosine's curve; drop, kept: cosine and class with all cells removed"
    yield "better by: paired per image, same number of cells; positive where the evidence wins; 95 % bootstrap interval"
    rows = [["stability of cells", "same cell", "within one", "same class"]]
    for change in measured.stability:
        shares = [f"{_interval(share, 100, '.1f')} %" for share in (change.same_cell, change.within_one_cell)]
        rows.append([change.change, *shares, f"{change.same_class:.1%}"])
    yield from format_columns(rows)


def _interval(mean: Mean, scale: float = 1, spec: str = "+.3f") -> str:
    value, low, high = (format(scale * number, spec) for number in (mean.mean, mean.low, mean.high))
    return f"{value} [{low}, {high}]"
