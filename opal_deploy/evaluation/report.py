"""The files of `evaluate --out`: evaluation.json, and tables and plots per model.

Every model: confusion.csv, confusion.png, predictions.csv. With margins: risk_coverage.csv and .png. With
annotated parts: slot_parts.csv. With --faithfulness: faithfulness.json and faithfulness.png.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.files import atomic_write, write_json
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import compute_probabilities, cosines
from opal_deploy.datasets.samples import Sample, display_path
from opal_deploy.errors import UsageError
from opal_deploy.evaluation import risk
from opal_deploy.evaluation.faithfulness import tables
from opal_deploy.evaluation.faithfulness.measure import Faithfulness
from opal_deploy.evaluation.metrics import confusion_matrix
from opal_deploy.evaluation.pointing import PointingGame, slot_table
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.records.lines import write_csv
from opal_deploy.records.names import escape_name
from opal_deploy.statistics import RiskCurve, Threshold

EVALUATION, MATRIX, MATRIX_IMAGE, PREDICTIONS = "evaluation.json", "confusion.csv", "confusion.png", "predictions.csv"
RISK, RISK_IMAGE, SLOT_PARTS = "risk_coverage.csv", "risk_coverage.png", "slot_parts.csv"
FAITHFULNESS, CURVES = "faithfulness.json", "faithfulness.png"

# the most classes with their names at the axes, and with counts in the cells
_MAX_NAMED, _MAX_COUNTED = 40, 15


def check_folder(folder: Path, data: Path, *, overwrite: bool) -> None:
    """Check that `folder` may be created, before anything is read or created.

    Raises:
        UsageError: it lies in `data`, where it would be read as a class, or holds an evaluation and `overwrite` is off.
    """
    if folder.resolve().is_relative_to(data.resolve()):
        raise UsageError(f"{folder}: it lies in {data}, where it would become part of the data set; give another --out")
    if (folder / EVALUATION).exists() and not overwrite:
        raise UsageError(f"{folder}: it already holds an evaluation; give another --out, or --overwrite")


def create_folder(folder: Path) -> None:
    """Create `folder`, before anything is measured that could not be kept.

    Raises:
        UsageError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be created ({error.strerror or error}); give another --out") from None


def model_folders(folder: Path, models: Sequence[Path]) -> list[Path]:
    """Return `folder` for one model; for several a subfolder each, named as the file, numbered on collision."""
    if len(models) == 1:
        return [folder]
    names = [model.name for model in models]
    return [
        folder / (name if names.count(name) == 1 else f"{number}-{name}") for number, name in enumerate(names, start=1)
    ]


def write_evaluation(folder: Path, document: Any) -> None:
    """Write evaluation.json, the document that `--json` prints."""
    write_json(folder / EVALUATION, document)


def write_model(folder: Path, result: EvaluationResult, metadata: Metadata, samples: list[Sample], root: Path) -> None:
    """Write confusion.csv, confusion.png and predictions.csv of one model.

    Names are written as `infer` writes them: a backslash twice, a byte that is not UTF-8 as \xff.

    confusion.csv: rows labels, columns predictions, counts. predictions.csv: one line an image, `rank` 1 where the
    label has the largest logit; cosine and margin are empty for models without prototypes, calibrated_probability
    (of the prediction) for models without a temperature.

    Args:
        folder: created if it does not exist.
        result, samples: of the same N images, in the same order.
        metadata: of the model.
        root: what the paths in predictions.csv are relative to.
    """
    folder.mkdir(exist_ok=True)
    names = [escape_name(name) for name in metadata.class_names]
    counts = confusion_matrix(result.outputs.logits, result.labels)
    _write_rows(
        folder / MATRIX,
        ["truth", *names],
        ([name, *row] for name, row in zip(names, counts.tolist(), strict=True)),
    )
    _write_rows(
        folder / PREDICTIONS,
        ["image", "label", "predicted", "correct", "rank", "logit", "cosine", "margin", "calibrated_probability"],
        _prediction_rows(result, metadata, names, samples, root),
    )
    with atomic_write(folder / MATRIX_IMAGE) as temporary:
        draw_confusion_matrix(counts, metadata.class_names, temporary)


def write_risk(folder: Path, curve: RiskCurve, threshold: Threshold | None) -> None:
    """Write risk_coverage.csv, a row for each threshold that makes a difference, and its plot."""
    _write_rows(folder / RISK, *risk.curve_table(curve))
    risk.draw_curve(curve, threshold, folder / RISK_IMAGE)


def write_slot_parts(folder: Path, game: PointingGame) -> None:
    """Write slot_parts.csv: per class and slot, how often its cell lies on each part in right predictions."""
    _write_rows(folder / SLOT_PARTS, *slot_table(game))


def write_faithfulness(folder: Path, faithfulness: Faithfulness, title: str) -> None:
    """Write faithfulness.json, and its curves as faithfulness.png."""
    write_json(folder / FAITHFULNESS, faithfulness.to_dict())
    with atomic_write(folder / CURVES) as temporary:
        tables.draw_curves(faithfulness, title, temporary)


def draw_confusion_matrix(counts: NDArray[np.int64], names: Sequence[str], path: Path) -> None:
    """Write a PNG of the confusion matrix in shares of each row, with class names and counts where they fit.

    Args:
        counts: [C, C], rows labels; a class without images is an empty row.
        names: C names.
        path: of the PNG.
    """
    # the object interface: pyplot keeps global state and looks for a display
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    num_classes = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    inches = 7.0 if num_classes <= _MAX_COUNTED else 11.0
    figure = Figure(figsize=(inches * 1.1, inches), layout="constrained")
    axes = figure.subplots()
    # the square root: one image in thirty must be seen beside a full diagonal
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    axes.set_title(f"{counts.trace()} of {counts.sum()} right, shares of each row")
    if num_classes <= _MAX_NAMED:
        # no mathematics: a class may be called $x$
        tick_labels = [name if len(name) <= 30 else name[:29] + "…" for name in map(escape_name, names)]
        axes.set_xticks(range(num_classes), tick_labels, rotation=90, fontsize=8, parse_math=False)
        axes.set_yticks(range(num_classes), tick_labels, fontsize=8, parse_math=False)
    if num_classes <= _MAX_COUNTED:
        for row, col in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, col] > 0.4 else "black"
            axes.text(col, row, str(counts[row, col]), ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=axes, label="share of the label's images", shrink=0.8)
    with warnings.catch_warnings():
        # a name in a script that the font lacks is drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=150, format="png")


def _prediction_rows(
    result: EvaluationResult, metadata: Metadata, names: list[str], samples: list[Sample], root: Path
) -> Iterable[list[str | int | float]]:
    logits, labels, scores = result.outputs.logits, result.labels, result.outputs.scores
    ranked = np.argsort(-logits, axis=1, kind="stable")  # [N, C]
    ranks = 1 + (ranked == labels[:, None]).argmax(axis=1)
    cosine = None if scores is None else cosines(scores, metadata.prototypes_per_class, metadata.epsilon)
    probabilities = None
    if (temperature := metadata.temperature) is not None:
        probabilities = compute_probabilities(logits, ranked[:, :1], temperature)[:, 0].tolist()
    for index, sample in enumerate(samples):
        first, second = ranked[index, :2]
        cosine_and_margin: list[str | float] = ["", ""]
        if cosine is not None:
            cosine_and_margin = [float(cosine[index, first]), float(cosine[index, first] - cosine[index, second])]
        yield [
            escape_name(display_path(sample.path, root)),
            names[labels[index]],
            names[first],
            int(first == labels[index]),
            int(ranks[index]),
            float(logits[index, first]),
            *cosine_and_margin,
            "" if probabilities is None else probabilities[index],
        ]


def _write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[str | int | float]]) -> None:
    with atomic_write(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        write_csv(stream, header, rows)
