"""What `evaluate_model` returns, and its text: a few lines a model, and one table of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import pluralize
from opal_deploy.evaluation.calibration import CalibrationReport
from opal_deploy.evaluation.faithfulness.measure import Faithfulness
from opal_deploy.evaluation.metrics import Agreement, Evaluation
from opal_deploy.evaluation.parts import PartFigures
from opal_deploy.evaluation.pointing import POINTING, PointingGame
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.statistics import Threshold


@dataclass(frozen=True)
class ModelEvaluation:
    """What was measured of one model.

    Attributes:
        path: of the model.
        session: the runtime that ran it: engine, device, threads, precision.
        split: of the data set.
        boxes: whether images were cropped to their boxes.
        metadata: of the model.
        evaluation: metrics, labels, outputs and margins of the images.
        threshold: the least margin for `target_error`; None where that was not asked for.
        calibration: how far the probabilities are from the shares of right predictions; None where not measured.
        receptive_field: what a cell of the model sees; None where it is not known.
        pointing_game: whether evidence lies on objects and parts; None where it was not played.
        faithfulness: what removing evidence changes; None where it was not measured.
        agreements: path and agreement of each model that was measured before this one; None where not compared.
        out: the folder of the files that were written; None without.
    """

    path: Path
    session: str
    split: str
    boxes: bool
    metadata: Metadata
    evaluation: EvaluationResult
    threshold: Threshold | None = None
    calibration: CalibrationReport | None = None
    receptive_field: ReceptiveField | None = None
    pointing_game: PointingGame | None = None
    faithfulness: Faithfulness | None = None
    agreements: Sequence[tuple[Path, Agreement]] | None = None
    out: Path | None = None

    @property
    def metrics(self) -> Evaluation:
        """Accuracy and the other metrics that need labels only."""
        return self.evaluation.evaluation

    @property
    def accuracy(self) -> float:
        """The share of images whose class was predicted, 0 ... 1."""
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
            POINTING: self.pointing_game,
            "faithfulness": self.faithfulness,
        }
        document: dict[str, Any] = {
            "model": str(self.path),
            "session": self.session,
            "boxes": self.boxes,
            **self.evaluation.to_dict(self.split),
            **{key: measured.to_dict() for key, measured in optional.items() if measured is not None},
        }
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
    metrics, parts = result.metrics, result.parts
    crop = "" if result.boxes else ", boxes left out"
    images = pluralize(metrics.images, f"{result.split} image", f"{result.split} images")
    yield (f"{result.path} in {result.session}, {images}{crop}")
    top5 = "" if metrics.top5 is None else f", top-5 {metrics.top5:.2%}"
    yield (f"accuracy {metrics.accuracy:.2%}{top5}, macro F1 {metrics.macro_f1:.2%}, cross-entropy {metrics.loss:.4f}")
    if metrics.spatial_prototype_collapse is not None:
        spread = _percent(100 * metrics.spatial_prototype_collapse, 100 * (metrics.spatial_prototype_collapse_std or 0))
        yield f"spatial prototype collapse {spread} % (mean and standard deviation over images)"
    if parts is None:
        return
    names = {
        "prototype_consistency": ("prototype consistency", _percent(parts.consistency)),
        "prototype_stability": ("prototype stability", _percent(parts.stability)),
        "part_purity": ("part purity", _percent(parts.purity, parts.purity_std)),
    }
    measured = [f"{title} {text} %" for key, (title, text) in names.items() if key not in parts.unavailable]
    if measured:
        yield ", ".join(measured)
    if len(set(parts.unavailable.values())) == 1 and not measured:
        yield (
            f"prototype consistency, stability and part purity: not measured, {next(iter(parts.unavailable.values()))}"
        )
        return
    for key, reason in parts.unavailable.items():
        yield f"{names[key][0]}: not measured, {reason}"


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
        if parts is None:
            rows[-1] += ["-", "-", "-"]
        else:
            rows[-1] += [
                _percent(parts.consistency),
                _percent(parts.stability),
                _percent(parts.purity, parts.purity_std),
            ]
    columns = [column for column in zip(*rows, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in columns]
    yield ""
    for row in zip(*columns, strict=True):
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *numbers])


def _percent(value: float | None, spread: float | None = None, *, digits: int = 1) -> str:
    """Return a percentage with its standard deviation; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if spread is None else f"{value:.{digits}f}±{spread:.{digits}f}"
