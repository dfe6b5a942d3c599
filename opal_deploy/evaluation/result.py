"""The result of `evaluate_model`, and its text: a few lines per model, and a table of several models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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
from opal_deploy.evaluation.metrics import (
    Agreement,
    Evaluation,
    count_by_class,
    format_columns,
    format_never_predicted,
)
from opal_deploy.evaluation.parts import PartFigures
from opal_deploy.evaluation.pointing import PointingGame
from opal_deploy.evaluation.randomise import Randomisation
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.statistics import RiskCurve, Threshold


@dataclass(frozen=True)
class ModelEvaluation:
    """The figures of one model.

    Attributes:
        path: the model's file.
        session: the runtime that ran it: engine, device, threads, precision.
        split: of the data set.
        boxes: whether images were cropped to their boxes.
        metadata: the model's.
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
        optional = {
            "threshold": self.threshold,
            "calibration": self.calibration,
            "receptive_field": self.receptive_field,
            "pointing_game": self.pointing_game,
            "faithfulness": self.faithfulness,
            "attack": self.attack,
            "randomisation": self.randomisation,
            "interventions": self.interventions,
        }
        document: dict[str, Any] = {
            "model": str(self.path),
            "session": self.session,
            "boxes": self.boxes,
            **self.evaluation.to_dict(self.split),
            **{key: measured.to_dict() for key, measured in optional.items() if measured is not None},
        }
        if self.agreements is not None:
            document["agreement"] = [{"with": str(path), **asdict(each)} for path, each in self.agreements]
        return document

    def __repr__(self) -> str:
        metrics = self.metrics
        return (
            f"<ModelEvaluation {self.path}: accuracy {metrics.accuracy:.2%} of {metrics.images:,} {self.split} images>"
        )


def format_metrics(result: ModelEvaluation) -> Iterator[str]:
    """Yield the metrics of one model in a few lines."""
    metrics, parts, names = result.metrics, result.parts, result.metadata.class_names
    if never := format_never_predicted(
        count_by_class(result.evaluation.outputs.logits, result.evaluation.labels, names)
    ):
        yield f"{result.path}: {never[0].lower()}{never[1:]}"
    crop = "" if result.boxes else ", not cropped to boxes"
    images = pluralize(metrics.images, f"{result.split} image", f"{result.split} images")
    yield f"{result.path} in {result.session}, {images}{crop}"
    top5 = "" if metrics.top5 is None else f", top-5 {metrics.top5:.2%}"
    yield f"accuracy {metrics.accuracy:.2%}{top5}, macro F1 {metrics.macro_f1:.2%}, cross-entropy {metrics.loss:.4f}"
    if metrics.spatial_prototype_collapse is not None:
        spread = _percent(100 * metrics.spatial_prototype_collapse, 100 * (metrics.spatial_prototype_collapse_std or 0))
        yield f"spatial prototype collapse {spread} % (mean and standard deviation over images)"
    if parts is None:
        return
    figures = {
        "prototype_consistency": ("prototype consistency", _percent(parts.consistency)),
        "prototype_stability": ("prototype stability", _percent(parts.stability)),
        "part_purity": ("part purity", _percent(parts.purity, parts.purity_std)),
    }
    measured = [f"{title} {text} %" for key, (title, text) in figures.items() if key not in parts.unavailable]
    if measured:
        yield ", ".join(measured)
    if len(set(parts.unavailable.values())) == 1 and not measured:
        yield (
            f"prototype consistency, stability and part purity: not measured, {next(iter(parts.unavailable.values()))}"
        )
        return
    for key, reason in parts.unavailable.items():
        yield f"{figures[key][0]}: not measured, {reason}"


def format_table(results: Sequence[ModelEvaluation]) -> Iterator[str]:
    """Yield an empty line, a heading, and one line per model, metrics in percent except the cross-entropy."""
    rows = [["model", "top-1", "top-5", "macro F1", "loss", "ECE", "collapse", "consistency", "stability", "purity"]]
    for result in results:
        metrics, parts = result.metrics, result.parts
        collapse, spread = metrics.spatial_prototype_collapse, metrics.spatial_prototype_collapse_std
        calibrated = None if result.calibration is None else result.calibration.calibrated
        rows.append(
            [
                str(result.path),
                f"{100 * metrics.accuracy:.2f}",
                _percent(None if metrics.top5 is None else 100 * metrics.top5, digits=2),
                _percent(None if metrics.macro_f1 is None else 100 * metrics.macro_f1, digits=2),
                f"{metrics.loss:.4f}",
                _percent(None if calibrated is None else 100 * calibrated.ece),
                _percent(None if collapse is None else 100 * collapse, None if spread is None else 100 * spread),
            ]
        )
        figures = (None,) * 4 if parts is None else (parts.consistency, parts.stability, parts.purity, parts.purity_std)
        rows[-1] += [_percent(figures[0]), _percent(figures[1]), _percent(*figures[2:])]
    columns = [column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    yield ""
    yield from format_columns([list(row) for row in zip(*columns, strict=True)])


def format_curve(curve: RiskCurve) -> Iterator[str]:
    """Yield the risk-coverage curve as a line."""
    summary = curve.summary()
    coverage = summary["coverage_at_error"].items()
    shares = ", ".join(f"{share:.1%} at {100 * float(rate):g} %" for rate, share in coverage)
    yield (
        f"risk-coverage over the margin: error {curve.error:.2%} without abstaining ({curve.images:,} images), AURC "
        f"{curve.aurc:.4f}; coverage by error rate on these images: {shares}"
    )


def format_threshold(threshold: Threshold, smallest: float | None = None) -> str:
    """Return the threshold chosen for an error rate as a line, or the reason why there is none.

    Args:
        smallest: the smallest error rate that these images support; None if none.
    """
    target = f"an error rate of at most {100 * threshold.target:g} %"
    if threshold.min_margin is None:
        advice = (
            "no rate works" if smallest is None else f"--target-error {100 * smallest:g}% is the smallest that works"
        )
        return f"no --min-margin is known to give {target}: {threshold.reason}; {advice}"
    return (
        f"--min-margin {threshold.min_margin!r} for {target}: answers {threshold.coverage:.1%} of "
        f"{threshold.images:,} images, {threshold.wrong} of {threshold.answered:,} wrong; with "
        f"{threshold.confidence:.0%} confidence at most {100 * threshold.bound:.2f} % wrong on similar images "
        "(one-sided Clopper-Pearson bound)"
    )


def _percent(value: float | None, spread: float | None = None, *, digits: int = 1) -> str:
    """Return a percentage with its standard deviation; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if spread is None else f"{value:.{digits}f}±{spread:.{digits}f}"
