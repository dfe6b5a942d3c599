"""The folder of `evaluate --out`.

It holds evaluation.json; per model confusion.csv, confusion.png and predictions.csv; with margins risk_coverage.csv
and .png; with annotated parts slot_parts.csv; with --faithfulness faithfulness.json and faithfulness.png. Names are
escaped as in `infer`'s records: a backslash doubled, a byte that is not UTF-8 as \\xff.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import find_margins
from opal_deploy.artifact.files import atomic_write, write_json
from opal_deploy.artifact.heads import find_values
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import compute_probabilities
from opal_deploy.datasets.samples import Sample, display_path
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.cells import RANKINGS
from opal_deploy.evaluation.faithfulness import Faithfulness
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.records.lines import write_csv
from opal_deploy.records.names import escape_name
from opal_deploy.statistics import RiskCurve, Threshold

EVALUATION, SLOT_PARTS = "evaluation.json", "slot_parts.csv"

# the most classes with names at the axes, and with counts in the cells
_MAX_NAMED, _MAX_COUNTED = 40, 15
# Okabe and Ito's colours, which colour-blind readers can distinguish, with different dashes, in the order of RANKINGS
_STYLES = (("#000000", "-", "o"), ("#0072B2", "--", "s"), ("#E69F00", "-.", "^"),
           ("#D55E00", ":", "v"), ("#009E73", "--", "D"), ("#CC79A7", "-.", "x"))  # fmt: skip


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


def model_folders(folder: Path, models: Sequence[Path]) -> list[Path]:
    """Return `folder` for one model; for several, one subfolder each, named like the file, numbered on collision."""
    if len(models) == 1:
        return [folder]
    names = [model.name for model in models]
    return [folder / (name if names.count(name) == 1 else f"{n}-{name}") for n, name in enumerate(names, start=1)]


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[str | int | float]]) -> None:
    """Write a CSV file atomically."""
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        write_csv(stream, header, rows)


def write_model(folder: Path, result: EvaluationResult, metadata: Metadata, samples: list[Sample], root: Path) -> None:
    """Write confusion.csv, confusion.png and predictions.csv of one model.

    confusion.csv: counts, with a row per label and a column per prediction. predictions.csv: one line per image;
    `rank` is 1 where the label has the largest logit; cosine and margin are empty for models without prototypes,
    calibrated_probability (of the prediction) for models without a temperature.

    Args:
        result, samples: of the same N images, in the same order.
        root: what the paths in predictions.csv are relative to.
    """
    from sklearn.metrics import confusion_matrix

    folder.mkdir(exist_ok=True)
    outputs, labels, names = result.outputs, result.labels, [escape_name(name) for name in metadata.class_names]
    counts = confusion_matrix(labels, outputs.logits.argmax(axis=1), labels=range(len(names)))
    rows = ([name, *row] for name, row in zip(names, counts.tolist(), strict=True))
    write_table(folder / "confusion.csv", ["label", *names], rows)
    draw_confusion_matrix(counts, names, folder / "confusion.png")

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
        "margin": empty,
        "calibrated_probability": empty,
    }
    if outputs.scores is not None:
        best, class_map = ranked[:, :2], metadata.class_map
        cosines = class_map.totals(class_map.take(find_values(outputs.scores, metadata), best), best)
        columns |= {"cosine": cosines[:, 0].tolist(), "margin": find_margins(cosines).tolist()}
    if (temperature := metadata.temperature) is not None:
        probabilities = compute_probabilities(outputs.logits, ranked[:, :1], temperature)
        columns["calibrated_probability"] = probabilities[:, 0].tolist()
    write_table(folder / "predictions.csv", list(columns), zip(*columns.values(), strict=True))


def write_risk(folder: Path, curve: RiskCurve, threshold: Threshold | None) -> None:
    """Write risk_coverage.csv, one row per threshold with the strictest first, and its plot."""
    counts = zip(curve.margins.tolist(), curve.answered.tolist(), curve.wrong.tolist(), strict=True)
    rows = ([margin, k, k / curve.images, wrong, wrong / k] for margin, k, wrong in counts)
    write_table(folder / "risk_coverage.csv", ["min_margin", "answered", "coverage", "wrong", "error"], rows)
    draw_curve(curve, threshold, folder / "risk_coverage.png")


def write_faithfulness(folder: Path, faithfulness: Faithfulness, model: str) -> None:
    """Write faithfulness.json, and its curves as faithfulness.png."""
    write_json(folder / "faithfulness.json", faithfulness.to_dict())
    draw_curves(faithfulness, escape_name(model), folder / "faithfulness.png")


def _create_figure(width: float, height: float) -> Any:
    # the object interface: pyplot keeps global state and looks for a display
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    with atomic_write(path) as temporary, warnings.catch_warnings():
        # a name in a script that the font lacks is drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(temporary, dpi=150, format="png")


def draw_confusion_matrix(counts: NDArray[np.int64], names: Sequence[str], path: Path) -> None:
    """Write a PNG of the confusion matrix, in shares of each row, with class names and counts where they fit.

    `counts`: [C, C], rows labels; a class without images is an empty row.
    """
    from matplotlib.colors import PowerNorm

    num_classes, shares = len(counts), counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    inches = 7.0 if num_classes <= _MAX_COUNTED else 11.0
    figure = _create_figure(inches * 1.1, inches)
    axes = figure.subplots()
    # the square root: one image in thirty must be seen next to a full diagonal
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    title = f"{counts.trace()} of {counts.sum()} correct, shares of each row"
    axes.set(xlabel="prediction", ylabel="label", title=title)
    if num_classes <= _MAX_NAMED:
        # no mathematics: a class may be called $x$
        tick_labels = [name if len(name) <= 30 else name[:29] + "…" for name in names]
        axes.set_xticks(range(num_classes), tick_labels, rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(range(num_classes), tick_labels, fontsize=8, parse_math=False)
    if num_classes <= _MAX_COUNTED:
        for row, col in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, col] > 0.4 else "black"
            axes.text(col, row, str(counts[row, col]), ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the label's images", shrink=0.8)
    _save(figure, path)


def draw_curve(curve: RiskCurve, threshold: Threshold | None, path: Path) -> None:
    """Write a PNG of the error rate over coverage, with the chosen threshold."""
    figure = _create_figure(6.4, 4.2)
    axes = figure.subplots()
    coverage, errors = 100 * curve.answered / curve.images, 100 * curve.wrong / curve.answered
    axes.plot(coverage, errors, color="#0072B2", drawstyle="steps-post", label="error on these images")
    if threshold is not None:
        target = 100 * threshold.target
        axes.axhline(target, color="#D55E00", linestyle="--", label=f"target: {target:g} %")
        if threshold.min_margin is not None:
            label = f"margin {threshold.min_margin:.3g}: at most {100 * threshold.bound:.2g} %"
            axes.plot([100 * threshold.coverage], [100 * threshold.bound], "o", color="#D55E00", label=label)
    title = f"Risk and coverage over the margin, {curve.images:,} images, AURC {curve.summary()['aurc']:.4f}"
    axes.set(xlabel="% of images answered", ylabel="% of wrong answers among them", title=title)
    axes.set(xlim=(0, 101), ylim=(0, None))
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_curves(measured: Faithfulness, title: str, path: Path) -> None:
    """Write a PNG of the curves: deletion above, insertion below, a column per fill."""
    from matplotlib.ticker import MaxNLocator

    fills = list(dict.fromkeys(figures.fill for figures in measured.rankings))
    figure = _create_figure(4.2 * len(fills) + 1.5, 7.0)
    axes, handles = figure.subplots(2, len(fills), squeeze=False, sharex=True, sharey=True), {}
    for row, (name, cells) in enumerate((("deletion", "removed"), ("insertion", "put back"))):
        axes[row, 0].set_ylabel("cosine of the predicted class")
        for axis, fill in zip(axes[row], fills, strict=True):
            for figures in (figures for figures in measured.rankings if figures.fill == fill):
                curve, style = getattr(figures, name), _STYLES[RANKINGS.index(figures.ranking)]
                look = dict(zip(("color", "linestyle", "marker"), style, strict=True))
                handles[figures.ranking] = axis.plot(range(len(curve)), curve, markersize=4, **look)[0]
            axis.set(title=f"{name}, {fill}", xlabel=f"cells {cells}")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = [ranking for ranking in RANKINGS if ranking in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right center")
    # no mathematics: a file may be called $x$
    figure.suptitle(f"{title}: {measured.images} images", parse_math=False)
    _save(figure, path)
