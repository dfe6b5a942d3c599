"""The result of `evaluate_model`, and its text: a few lines per model, and a table of several models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import pluralize
from opal_deploy.evaluation.attack import Attack
from opal_deploy.evaluation.calibration import CalibrationFigures
from opal_deploy.evaluation.faithfulness import Faithfulness
from opal_deploy.evaluation.interventions import Interventions
from opal_deploy.evaluation.metrics import Agreement, Evaluation, count_by_class, format_columns, format_never_predicted
from opal_deploy.evaluation.parts import CONSISTENCY, PURITY, STABILITY, PartFigures
from opal_deploy.evaluation.pointing import PointingGame
from opal_deploy.evaluation.randomise import Randomisation
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.statistics import CONFIDENCE, Threshold

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
        agreements: path and agreement of each model measured before this one; None if not compared.
        out: the folder of the written files, if any.
    """

    path: Path
    session: str
    split: str
    boxes: bool
    metadata: Metadata
    evaluation: EvaluationResult
    threshold: Threshold | None = None
    calibration: CalibrationFigures | None = None
    receptive_field: ReceptiveField | None = None
    pointing_game: PointingGame | None = None
    faithfulness: Faithfulness | None = None
    attack: Attack | None = None
    randomisation: Randomisation | None = None
    interventions: Interventions | None = None
    baseline: Baseline | None = None
    neighbours: Neighbours | None = None
    agreements: Sequence[tuple[Path, Agreement]] | None = None
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
        document: dict[str, Any] = {
            "model": str(self.path),
            "session": self.session,
            "boxes": self.boxes,
            **self.evaluation.to_dict(self.split),
        }
        for name in _OPTIONAL:
            if (measured := getattr(self, name)) is not None:
                document[name] = measured.to_dict()
        if self.agreements is not None:
            document["agreement"] = [{"with": str(path), **each.to_dict()} for path, each in self.agreements]
        return document

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
    if parts is None:
        return
    shares = parts.to_dict()
    titles = {CONSISTENCY: "prototype consistency", STABILITY: "prototype stability", PURITY: "part purity"}
    figures = [
        f"{title} {_percent(shares[key], shares.get(f'{key}_std'))} %"
        for key, title in titles.items()
        if key not in parts.unavailable
    ]
    if figures:
        yield ", ".join(figures)
    reasons: dict[str, list[str]] = {}
    for key, reason in parts.unavailable.items():
        reasons.setdefault(reason, []).append(titles[key])
    yield from (f"{', '.join(names)}: not measured, {reason}" for reason, names in reasons.items())


def format_table(results: Sequence[ModelEvaluation]) -> Iterator[str]:
    """Yield an empty line, a heading, and one line per model, metrics in percent except the cross-entropy."""
    rows = [["model", "top-1", "top-5", "macro F1", "loss", "ECE", "collapse", "consistency", "stability", "purity"]]
    for result in results:
        metrics, calibrated = result.metrics, None if result.calibration is None else result.calibration.calibrated
        shares = {} if result.parts is None else result.parts.to_dict()
        rows.append(
            [
                str(result.path),
                *(_percent(share, digits=2) for share in (metrics.accuracy, metrics.top5, metrics.macro_f1)),
                f"{metrics.loss:.4f}",
                _percent(None if calibrated is None else calibrated.ece),
                _percent(metrics.spatial_prototype_collapse, metrics.spatial_prototype_collapse_std),
                *(_percent(shares.get(key), shares.get(f"{key}_std")) for key in (CONSISTENCY, STABILITY, PURITY)),
            ]
        )
    columns = [column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    yield ""
    yield from format_columns([list(row) for row in zip(*columns, strict=True)])


def format_curve(summary: Mapping[str, Any]) -> str:
    """Return the summary of a risk-coverage curve as a line."""
    shares = ", ".join(f"{v:.1%} at {100 * float(rate):g} %" for rate, v in summary["coverage_at_error"].items())
    return (
        f"risk-coverage over the margin: error {summary['error']:.2%} without abstaining ({summary['images']:,} "
        f"images), AURC {summary['aurc']:.4f}; coverage by error rate on these images: {shares}"
    )


def format_threshold(threshold: Threshold, smallest: float | None = None) -> str:
    """Return the threshold chosen for an error rate as a line, or the reason why there is none.

    `smallest`: the smallest error rate that these images support; None if none.
    """
    target = f"an error rate of at most {100 * threshold.target:g} %"
    if threshold.min_margin is None:
        works = (
            "no rate works" if smallest is None else f"--target-error {100 * smallest:g}% is the smallest that works"
        )
        return f"no --min-margin is known to give {target}: {threshold.reason}; {works}"
    return (
        f"--min-margin {threshold.min_margin!r} for {target}: answers {threshold.coverage:.1%} of "
        f"{threshold.images:,} images, {threshold.wrong} of {threshold.answered:,} wrong; with {CONFIDENCE:.0%} "
        f"confidence at most {100 * threshold.bound:.2f} % wrong on similar images (one-sided Clopper-Pearson bound)"
    )


def _percent(share: float | None, spread: float | None = None, *, digits: int = 1) -> str:
    """Return a share in percent with its standard deviation; a dash for None."""
    if share is None:
        return "-"
    return f"{100 * share:.{digits}f}" if spread is None else f"{100 * share:.{digits}f}±{100 * spread:.{digits}f}"
