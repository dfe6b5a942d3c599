"""The result of one model, and its terminal output: a few lines per model, and one table of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.cli.console import one_line, print_message

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata
    from opal_deploy.cli.evaluate.inputs import EvaluateOptions
    from opal_deploy.evaluation.session import EvaluationResult


@dataclass(frozen=True)
class ModelResult:
    """The metrics of one model, and the runtime that ran it.

    Attributes:
        path: of the model.
        session: engine, device, threads, precision.
        metadata: of the model.
        evaluation: its metrics and outputs.
        extra: keys of the JSON document that not every evaluation has.
    """

    path: Path
    session: str
    metadata: Metadata
    evaluation: EvaluationResult
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self, options: EvaluateOptions) -> dict[str, Any]:
        """Return the document for JSON."""
        head = {"model": str(self.path), "session": self.session, "boxes": options.boxes}
        return {**head, **self.evaluation.to_dict(options.split), **self.extra}


def print_metrics(result: ModelResult, options: EvaluateOptions) -> None:
    """Print the metrics of one model in a few lines."""
    from opal_deploy.datasets.samples import pluralize

    metrics, parts = result.evaluation.evaluation, result.evaluation.parts
    crop = "" if options.boxes else ", boxes left out"
    images = pluralize(metrics.images, f"{options.split} image", f"{options.split} images")
    print_message(f"{one_line(str(result.path))} in {result.session}, {images}{crop}")
    top5 = "" if metrics.top5 is None else f", top-5 {metrics.top5:.2%}"
    print_message(
        f"accuracy {metrics.accuracy:.2%}{top5}, macro F1 {metrics.macro_f1:.2%}, cross-entropy {metrics.loss:.4f}"
    )
    if metrics.spatial_prototype_collapse is not None:
        spread = _percent(100 * metrics.spatial_prototype_collapse, 100 * (metrics.spatial_prototype_collapse_std or 0))
        print_message(f"spatial prototype collapse {spread} % (mean and standard deviation over images)")
    if parts is None:
        return
    names = {
        "prototype_consistency": ("prototype consistency", _percent(parts.consistency)),
        "prototype_stability": ("prototype stability", _percent(parts.stability)),
        "part_purity": ("part purity", _percent(parts.purity, parts.purity_std)),
    }
    measured = [f"{title} {text} %" for key, (title, text) in names.items() if key not in parts.unavailable]
    if measured:
        print_message(", ".join(measured))
    if len(set(parts.unavailable.values())) == 1 and not measured:
        print_message(
            f"prototype consistency, stability and part purity: not measured, {next(iter(parts.unavailable.values()))}"
        )
        return
    for key, reason in parts.unavailable.items():
        print_message(f"{names[key][0]}: not measured, {reason}")


def print_table(results: list[ModelResult]) -> None:
    """Print one line per model, metrics in percent except the cross-entropy."""
    rows = [["model", "top-1", "top-5", "macro F1", "loss", "collapse", "consistency", "stability", "purity"]]
    for result in results:
        metrics, parts = result.evaluation.evaluation, result.evaluation.parts
        collapse, spread = metrics.spatial_prototype_collapse, metrics.spatial_prototype_collapse_std
        rows.append(
            [
                one_line(str(result.path)),
                f"{100 * metrics.accuracy:.2f}",
                _percent(None if metrics.top5 is None else 100 * metrics.top5, digits=2),
                _percent(None if metrics.macro_f1 is None else 100 * metrics.macro_f1, digits=2),
                f"{metrics.loss:.4f}",
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
    print_message()
    for row in zip(*columns, strict=True):
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print_message("  ".join([row[0].ljust(widths[0]), *numbers]))


def _percent(value: float | None, spread: float | None = None, *, digits: int = 1) -> str:
    """Return a percentage with its standard deviation; a dash for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if spread is None else f"{value:.{digits}f}±{spread:.{digits}f}"
