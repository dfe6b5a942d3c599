"""Faithfulness of the evidence: what removing the evidence cells changes, next to controls.

Everything here works on the model's input, uint8 [N, H0, W0, 3] before normalisation, through any session. A cell is
removed by blurring its rectangle of the input; the figure is the cosine of the class predicted for the
unchanged image. A cell's receptive field is larger than its rectangle, so every figure is compared with controls that
remove as many other cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.heads import find_totals
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.datasets.samples import Sample
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import cells
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.cells import CONTRIBUTION, GRAD_CAM, RANDOM, RANKINGS, GradCam, ImageArray
from opal_deploy.evaluation.inputs import Annotations
from opal_deploy.evaluation.metrics import Figures, Mean, format_columns, mean_with_interval
from opal_deploy.evaluation.session import Photographs, photographs
from opal_deploy.logs import as_progress
from opal_deploy.runtime.session import Session

# images measured together: each takes dozens of passes, which fill batches of their own
_IMAGES_TOGETHER = 4
FILL = "blur"


class Curve(NamedTuple):
    """The deletion curve of one image and one ranking of k cells."""

    deletion: NDArray[np.float64]  # [k + 1], cosine with the first 0, 1, ..., k cells removed
    class_kept: bool  # whether the class is still predicted with all k cells removed

    def summarize(self, steps: int) -> tuple[float, float]:
        """Return the mean cosine over the first `steps` cells, small if the first ones matter most, and the drop."""
        curve = self.deletion[: steps + 1]
        return float(np.trapezoid(curve, dx=1 / steps)), float(curve[0] - curve[-1])


@dataclass(frozen=True)
class Advantage(Figures):
    """The lead of the evidence, ranked by contribution, over another ranking: paired, positive where it wins.

    If an image has fewer cells in the other ranking, the evidence is cut to as many cells.
    """

    deletion_area: Mean  # the other's deletion area minus the evidence's
    drop: Mean  # the evidence's drop minus the other's


@dataclass(frozen=True)
class RankingFigures(Figures):
    """One ranking, over the images that have it."""

    fill: str  # what removed cells are painted with
    ranking: str
    images: int
    deletion: list[float]  # mean cosine after 0, 1, ..., m steps; an image with fewer cells keeps its last value
    deletion_area: Mean  # deletion_area, drop: see `Curve.summarize`
    drop: Mean
    class_kept: float  # share of images whose predicted class stays with all cells removed
    advantage: Advantage | None  # of the evidence over this ranking; None for the evidence itself


@dataclass(frozen=True)
class Faithfulness(Figures):
    """The faithfulness figures of one model."""

    images: int
    images_available: int
    prototypes_per_class: int
    different_cells: float  # mean number of different evidence cells per image, d
    random_control: str
    rankings: list[RankingFigures]
    # ranking -> why it is missing, or measured on fewer images, in one line
    unavailable: dict[str, str] = field(default_factory=dict)

    def describe(self) -> Iterator[str]:
        """Yield a heading, a table with a row per ranking, and what its columns mean."""
        yield (
            f"faithfulness on {self.images} of {self.images_available} images: cosine of the predicted class while "
            f"its {self.different_cells:.1f} different cells (mean; m = {self.prototypes_per_class}) are removed"
        )
        yield f"random: {self.random_control}, never the evidence"
        yield from (f"{ranking}: {reason}" for ranking, reason in self.unavailable.items())
        rows = [["", "deletion", "drop", "kept", "evidence better by: deletion", "drop"]]
        for row in self.rankings:
            means = (f"{mean.mean:.3f}" for mean in (row.deletion_area, row.drop))
            leads = () if row.advantage is None else (row.advantage.deletion_area, row.advantage.drop)
            gains = [f"{lead.mean:+.3f} [{lead.low:+.3f}, {lead.high:+.3f}]" for lead in leads] or ["", ""]
            rows.append([row.ranking, *means, f"{row.class_kept:.0%}", *gains])
        yield from format_columns(rows)
        yield "deletion: area under the cosine's curve; drop, kept: cosine and class with all cells removed"
        yield (
            "better by: paired per image, same number of cells; positive where the evidence wins; 95 % bootstrap "
            "interval"
        )


def measure_faithfulness(
    session: Session, samples: Sequence[Sample], chosen: Sequence[int], annotations: Annotations,
    options: EvaluateOptions, heat_map: GradCam | None = None,
) -> Faithfulness:  # fmt: skip
    """Measure deletion curves of one model and its controls.

    Args:
        chosen: indices of the images to measure, at least one.
        annotations: of the samples; the random control draws from cells that show the object.
        heat_map: Grad-CAM; None leaves that control out.

    Raises:
        UsageError: an image cannot be used, or the model's logits are not finite.
    """
    metadata, slots = session.metadata, session.metadata.class_map.max_slots
    curves: list[dict[str, Curve]] = []
    for images in photographs(
        lambda pixels: _run(session, pixels, options.batch), samples, metadata.form, chosen=chosen,
        annotations=annotations, boxes=options.boxes, batch=min(options.batch, _IMAGES_TOGETHER),
        progress=as_progress(options.progress), note="removing cells",
    ):  # fmt: skip
        curves += _measure_curves(session, images, options, heat_map)
    unavailable = {} if heat_map is not None else {GRAD_CAM: "an exported model has no gradients; give the checkpoint"}
    if without := sum(RANDOM not in by_ranking for by_ranking in curves):
        unavailable[RANDOM] = f"{without} of {len(curves)} images left out: all their foreground cells are evidence"
    different = float(np.mean([len(by_ranking[CONTRIBUTION].deletion) - 1 for by_ranking in curves]))
    rankings = [
        _summarize(name, pairs, slots)
        for name in RANKINGS
        if (pairs := [(by_ranking[name], by_ranking[CONTRIBUTION]) for by_ranking in curves if name in by_ranking])
    ]
    control = f"random {annotations.foreground}"
    return Faithfulness(len(curves), len(samples), slots, different, control, rankings, unavailable)


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
    metadata, grid, outputs = session.metadata, session.metadata.cells, images.outputs
    predicted = outputs.logits.argmax(axis=1)
    heat_maps = [None] * len(predicted) if heat_map is None else heat_map(images.pixels, predicted)
    # per image and ranking, the sets of removed cells
    steps = []
    for row, (index, geometry, known) in enumerate(
        zip(images.indices, images.geometries, images.annotations, strict=True)
    ):
        foreground = known.foreground(geometry, grid)
        ranked = cells.build_rankings(outputs, row, metadata, foreground, index=index, heat_map=heat_maps[row])
        steps.append({
            name: [(row, frozenset(order[:k])) for k in range(len(order) + 1)] for name, order in ranked.items()
        })  # fmt: skip
    # equal ones run once
    runs = list(dict.fromkeys(step for by_ranking in steps for taken in by_ranking.values() for step in taken))
    blurred = [cells.blur_image(pixels, grid) for pixels in images.pixels]
    changed = (cells.replace_cells(images.pixels[row], blurred[row], removed, grid) for row, removed in runs)
    perturbed = _run(session, changed, options.batch)
    assert perturbed.scores is not None  # evidence is exact
    classes, places = predicted[[row for row, _ in runs]], {step: place for place, step in enumerate(runs)}
    cosines = find_totals(perturbed.scores, metadata)[np.arange(len(classes)), classes]
    kept = (perturbed.logits.argmax(axis=1) == classes).tolist()

    def draw(taken: list[tuple[int, frozenset[int]]]) -> Curve:
        chosen = [places[step] for step in taken]
        return Curve(cosines[chosen], kept[chosen[-1]])

    return [{name: draw(taken) for name, taken in by_ranking.items()} for by_ranking in steps]


def _summarize(ranking: str, pairs: Sequence[tuple[Curve, Curve]], steps: int) -> RankingFigures:
    """Return the figures of a ranking from its curves, each with the evidence's for the same image."""
    lengths = [len(curve.deletion) - 1 for curve, _ in pairs]
    figures, evidence = (
        np.array([curve.summarize(length) for curve, length in zip(curves, lengths, strict=True)])  # [images, 2]
        for curves in zip(*pairs, strict=True)
    )
    lead = (evidence - figures) * [-1, 1]
    advantage = None if ranking == CONTRIBUTION else Advantage(*map(mean_with_interval, lead.T))
    padded = [np.pad(curve.deletion, (0, steps + 1 - len(curve.deletion)), mode="edge") for curve, _ in pairs]
    kept = float(np.mean([curve.class_kept for curve, _ in pairs]))
    deletion = np.mean(padded, axis=0).tolist()
    area, drop = map(mean_with_interval, figures.T)
    return RankingFigures(FILL, ranking, len(pairs), deletion, area, drop, kept, advantage)
