"""The result of `evaluate_model`: its figures, its text, and the folder of `--out`.

The folder holds evaluation.json and predictions.csv. Names are escaped as in `infer`'s records: a backslash
doubled, a byte that is not UTF-8 as \\xff.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.heads import find_values
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import compute_probabilities
from opal_deploy.datasets.samples import Sample, display_path, pluralize
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.attack import Attack
from opal_deploy.evaluation.calibration import CalibrationFigures
from opal_deploy.evaluation.faithfulness import Faithfulness
from opal_deploy.evaluation.interventions import Interventions
from opal_deploy.evaluation.metrics import (
    Evaluation,
    TargetMargin,
    count_by_class,
    format_never_predicted,
)
from opal_deploy.evaluation.parts import CONSISTENCY, PURITY, STABILITY, PartFigures
from opal_deploy.evaluation.pointing import PointingGame
from opal_deploy.evaluation.randomise import Randomisation
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.records.lines import write_csv
from opal_deploy.records.names import escape_name
from opal_deploy.statistics import supported_rates

EVALUATION, PREDICTIONS = "evaluation.json", "predictions.csv"
_PART_TITLES = {CONSISTENCY: "prototype consistency", STABILITY: "prototype stability", PURITY: "part purity"}
# attributes of a ModelEvaluation that its document leaves out where they were not measured
_OPTIONAL = (
    "threshold", "calibration", "receptive_field", "pointing_game", "faithfulness", "attack", "randomisation",
    "interventions",
)  # fmt: skip


@dataclass(frozen=True)
class ModelEvaluation:
    """The figures of one model.

    Attributes:
        session: the runtime that ran the model: engine, device, threads, precision.
        split: of the data set.
        boxes: whether images were cropped to their boxes.
        evaluation: metrics, labels, outputs and margins of the images.
        threshold: the smallest margin for `target_error`; None if that was not asked for.
        calibration: how far the probabilities are from the observed accuracy; None if not measured.
        receptive_field: of the model's cells; None if unknown.
        pointing_game: whether evidence lies on objects and parts; None if not measured.
        faithfulness: what removing evidence changes; None if not measured.
        attack: what changes outside the evidence do; None if not measured.
        randomisation: where the evidence lies when weights are shuffled; None if not measured.
        interventions: whether the evidence names the parts that matter; None if not measured.
        baseline: of the answers to validation images, for `--record`; None if not measured.
        neighbours: of a checkpoint that had none, as measured for the baseline; None otherwise.
        out: the folder of the written files, if any.
    """

    path: Path
    session: str
    split: str
    boxes: bool
    metadata: Metadata
    evaluation: EvaluationResult
    threshold: TargetMargin | None = None
    calibration: CalibrationFigures | None = None
    receptive_field: ReceptiveField | None = None
    pointing_game: PointingGame | None = None
    faithfulness: Faithfulness | None = None
    attack: Attack | None = None
    randomisation: Randomisation | None = None
    interventions: Interventions | None = None
    baseline: Baseline | None = None
    neighbours: Neighbours | None = None
    out: Path | None = None

    @property
    def metrics(self) -> Evaluation:
        """Accuracy and the other metrics that need labels only."""
        return self.evaluation.evaluation

    @property
    def accuracy(self) -> float:
        """The share of correctly classified images, 0 ... 1."""
        return self.metrics.accuracy

    @property
    def parts(self) -> PartFigures | None:
        """Prototype consistency, stability and part purity; None without part locations."""
        return self.evaluation.parts

    def to_dict(self) -> dict[str, Any]:
        """Return the document of evaluation.json and `opal-deploy evaluate --json`."""
        figures = {name: getattr(self, name) for name in _OPTIONAL}
        return {
            "model": str(self.path),
            "session": self.session,
            "boxes": self.boxes,
            **self.evaluation.to_dict(self.split),
            **{name: measured.to_dict() for name, measured in figures.items() if measured is not None},
        }

    def __repr__(self) -> str:
        metrics = self.metrics
        return (
            f"<ModelEvaluation {self.path}: accuracy {metrics.accuracy:.2%} of {metrics.images:,} {self.split} images>"
        )


def format_metrics(result: ModelEvaluation) -> Iterator[str]:
    """Yield the metrics of one model in a few lines."""
    metrics, parts, evaluation = result.metrics, result.parts, result.evaluation
    classes = count_by_class(evaluation.outputs.logits, evaluation.labels, result.metadata.class_names)
    if never := format_never_predicted(classes):
        yield f"{result.path}: {never[0].lower()}{never[1:]}"
    images = pluralize(metrics.images, f"{result.split} image", f"{result.split} images")
    yield f"{result.path} in {result.session}, {images}{'' if result.boxes else ', not cropped to boxes'}"
    top5 = "" if metrics.top5 is None else f", top-5 {metrics.top5:.2%}"
    yield f"accuracy {metrics.accuracy:.2%}{top5}, macro F1 {metrics.macro_f1:.2%}, cross-entropy {metrics.loss:.4f}"
    if metrics.spatial_prototype_collapse is not None:
        spread = _percent(metrics.spatial_prototype_collapse, metrics.spatial_prototype_collapse_std)
        yield f"spatial prototype collapse {spread} % (mean and standard deviation over images)"
    if parts is not None:
        shares = parts.to_dict()
        for key, title in _PART_TITLES.items():
            if (share := shares[key]) is None:
                yield f"{title}: not measured, {parts.unavailable[key]}"
            else:
                yield f"{title} {_percent(share, shares.get(f'{key}_std'))} %"


def format_curve(summary: Mapping[str, Any]) -> str:
    """Return the summary of a risk-coverage curve as a line."""
    shares = ", ".join(f"{v:.1%} at {100 * float(rate):g} %" for rate, v in summary["coverage_at_error"].items())
    return (
        f"risk-coverage over the margin: error {summary['error']:.2%} without abstaining ({summary['images']:,} "
        f"images), AURC {summary['aurc']:.4f}; coverage by error rate on these images: {shares}"
    )


def format_threshold(chosen: TargetMargin, summary: Mapping[str, Any]) -> str:
    """Return the margin that was chosen for an error rate as a line; without one, the rates that have one."""
    target = f"an error rate of at most {100 * chosen.target_error:g} %"
    if chosen.min_margin is None or chosen.coverage is None or chosen.upper_bound is None:
        rates = ", ".join(f"{100 * rate:g}%" for rate in supported_rates(summary))
        return f"no --min-margin is known to give {target} on {chosen.images:,} images; they support {rates or 'none'}"
    return (
        f"--min-margin {chosen.min_margin!r} for {target}: answers {chosen.coverage:.1%} of {chosen.images:,} images, "
        f"{chosen.wrong} of {chosen.answered:,} wrong; with {chosen.confidence:.0%} confidence at most "
        f"{100 * chosen.upper_bound:.2f} % wrong on similar images (one-sided Clopper-Pearson bound)"
    )


def _percent(share: float, spread: float | None = None) -> str:
    """Return a share in percent with its standard deviation."""
    return f"{100 * share:.1f}" if spread is None else f"{100 * share:.1f}±{100 * spread:.1f}"


def check_folder(folder: Path, data: Path, *, overwrite: bool) -> None:
    """Check that `folder` may be created.

    Raises:
        UsageError: it lies in `data`, where it would be read as a class, or holds an evaluation and `overwrite` is off.
    """
    if folder.resolve().is_relative_to(data.resolve()):
        raise UsageError(f"{folder}: it lies in {data} and would become part of the data set; give another --out")
    if (folder / EVALUATION).exists() and not overwrite:
        raise UsageError(f"{folder}: it already holds an evaluation; give another --out, or --overwrite")


def create_folder(folder: Path) -> None:
    """Create `folder`; raise UsageError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be created ({error.strerror or error}); give another --out") from None


def write_predictions(
    path: Path, result: EvaluationResult, metadata: Metadata, samples: list[Sample], root: Path
) -> None:
    """Write predictions.csv: one line per image.

    `rank` is 1 where the label has the largest logit; cosine and margin are empty for models without prototypes,
    calibrated_probability (of the prediction) for models without a temperature.

    Args:
        result, samples: of the same N images, in the same order.
        root: what the paths of images are relative to.
    """
    outputs, labels, names = result.outputs, result.labels, [escape_name(name) for name in metadata.class_names]
    ranked = np.argsort(-outputs.logits, axis=1, kind="stable")  # [N, C]
    first, empty = ranked[:, 0], [""] * len(samples)
    columns: dict[str, Sequence[Any]] = {
        "image": [escape_name(display_path(sample.path, root)) for sample in samples],
        "label": [names[label] for label in labels],
        "predicted": [names[label] for label in first],
        "correct": (first == labels).astype(int).tolist(),
        "rank": (1 + (ranked == labels[:, None]).argmax(axis=1)).tolist(),
        "logit": outputs.logits.max(axis=1).tolist(),
        "cosine": empty,
        "margin": empty if result.margins is None else result.margins.tolist(),
        "calibrated_probability": empty,
    }
    if outputs.scores is not None:
        class_map, values = metadata.class_map, find_values(outputs.scores, metadata)
        columns["cosine"] = class_map.totals(class_map.take(values, ranked[:, :1]), ranked[:, :1])[:, 0].tolist()
    if (temperature := metadata.temperature) is not None:
        probabilities = compute_probabilities(outputs.logits, ranked[:, :1], temperature)
        columns["calibrated_probability"] = probabilities[:, 0].tolist()
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        write_csv(stream, list(columns), zip(*columns.values(), strict=True))
