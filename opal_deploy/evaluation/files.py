"""Files that an evaluation writes: the folder of `evaluate --out`, and the record in the model's own file (`--record`).

The folder: evaluation.json; per model confusion.csv, confusion.png and predictions.csv; with margins risk_coverage.csv
and .png; with annotated parts slot_parts.csv; with --faithfulness faithfulness.json and faithfulness.png.
"""

from __future__ import annotations

import datetime
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy._version import __version__
from opal_deploy.artifact import engine_file, onnx_file
from opal_deploy.artifact.class_map import find_margins
from opal_deploy.artifact.files import atomic_write, compute_sha256, model_kind, write_json
from opal_deploy.artifact.heads import find_values
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import compute_probabilities
from opal_deploy.datasets.samples import DataSet, Sample, display_path
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.faithfulness import Faithfulness
from opal_deploy.evaluation.pointing import PointingGame, slot_table
from opal_deploy.evaluation.rankings import CONTRIBUTION, RANDOM, RANKINGS
from opal_deploy.evaluation.session import EvaluationResult
from opal_deploy.model import checkpoint
from opal_deploy.records.lines import write_csv
from opal_deploy.records.names import escape_name
from opal_deploy.statistics import RiskCurve, Threshold

EVALUATION, MATRIX, MATRIX_IMAGE, PREDICTIONS = "evaluation.json", "confusion.csv", "confusion.png", "predictions.csv"
RISK, RISK_IMAGE, SLOT_PARTS = "risk_coverage.csv", "risk_coverage.png", "slot_parts.csv"
FAITHFULNESS, CURVES = "faithfulness.json", "faithfulness.png"

# the most classes with names at the axes, and with counts in the cells
_MAX_NAMED, _MAX_COUNTED = 40, 15
# Okabe and Ito's colours, which colour-blind readers can distinguish, with different dashes
_STYLES: dict[str, dict[str, Any]] = {
    "contribution": {"color": "#000000", "linestyle": "-", "marker": "o"},
    "reverse": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "random": {"color": "#E69F00", "linestyle": "-.", "marker": "^"},
    "runner-up": {"color": "#D55E00", "linestyle": ":", "marker": "v"},
    "another class": {"color": "#009E73", "linestyle": "--", "marker": "D"},
    "grad-cam": {"color": "#CC79A7", "linestyle": "-.", "marker": "x"},
}
# copied from the document of an evaluation to the model's record
_COPIED = ("prototype_consistency", "prototype_stability", "part_purity")


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
    return [
        folder / (name if names.count(name) == 1 else f"{number}-{name}") for number, name in enumerate(names, start=1)
    ]


def write_model(folder: Path, result: EvaluationResult, metadata: Metadata, samples: list[Sample], root: Path) -> None:
    """Write confusion.csv, confusion.png and predictions.csv of one model.

    Names are escaped as in `infer`'s records: a backslash doubled, a byte that is not UTF-8 as \xff.

    confusion.csv: counts, with a row per label and a column per prediction. predictions.csv: one line per image;
    `rank` is 1 where the label has the largest logit; cosine and margin are empty for models without prototypes,
    calibrated_probability (of the prediction) for models without a temperature.

    Args:
        result, samples: of the same N images, in the same order.
        root: what the paths in predictions.csv are relative to.
    """
    from sklearn.metrics import confusion_matrix

    folder.mkdir(exist_ok=True)
    names = [escape_name(name) for name in metadata.class_names]
    counts = confusion_matrix(result.labels, result.outputs.logits.argmax(axis=1), labels=range(len(names)))
    _write_rows(
        folder / MATRIX,
        ["label", *names],
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
    """Write risk_coverage.csv, one row per threshold with the strictest first, and its plot."""
    _write_rows(folder / RISK, *curve_table(curve))
    draw_curve(curve, threshold, folder / RISK_IMAGE)


def write_slot_parts(folder: Path, game: PointingGame) -> None:
    """Write slot_parts.csv: per class and slot, how often its cell lies on each part in correctly classified images."""
    _write_rows(folder / SLOT_PARTS, *slot_table(game))


def write_faithfulness(folder: Path, faithfulness: Faithfulness, title: str) -> None:
    """Write faithfulness.json, and its curves as faithfulness.png."""
    write_json(folder / FAITHFULNESS, faithfulness.to_dict())
    with atomic_write(folder / CURVES) as temporary:
        draw_curves(faithfulness, title, temporary)


def draw_confusion_matrix(counts: NDArray[np.int64], names: Sequence[str], path: Path) -> None:
    """Write a PNG of the confusion matrix, in shares of each row, with class names and counts where they fit.

    Args:
        counts: [C, C], rows labels; a class without images is an empty row.
    """
    # the object interface: pyplot keeps global state and looks for a display
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    num_classes = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    inches = 7.0 if num_classes <= _MAX_COUNTED else 11.0
    figure = Figure(figsize=(inches * 1.1, inches), layout="constrained")
    axes = figure.subplots()
    # the square root: one image in thirty must be seen next to a full diagonal
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    axes.set_title(f"{counts.trace()} of {counts.sum()} correct, shares of each row")
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


def curve_table(curve: RiskCurve) -> tuple[list[str], list[list[str | int | float]]]:
    """Return header and rows of risk_coverage.csv."""
    numbers = zip(curve.margins.tolist(), curve.answered.tolist(), curve.wrong.tolist(), strict=True)
    table: list[list[str | int | float]] = [[t, k, k / curve.images, e, e / k] for t, k, e in numbers]
    return ["min_margin", "answered", "coverage", "wrong", "error"], table


def draw_curve(curve: RiskCurve, threshold: Threshold | None, path: Path) -> None:
    """Write a PNG of the error rate over coverage, with the chosen threshold."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    coverage: NDArray[np.float64] = curve.answered / curve.images
    axes.plot(
        coverage, curve.wrong / curve.answered, color="#0072B2", drawstyle="steps-post", label="error on these images"
    )
    if threshold is not None:
        axes.axhline(threshold.target, color="#D55E00", linestyle="--", label=f"target: {100 * threshold.target:g} %")
        if threshold.min_margin is not None:
            label = f"margin {threshold.min_margin:.3g}: at most {100 * threshold.bound:.2g} %"
            axes.plot([threshold.coverage], [threshold.bound], "o", color="#D55E00", label=label)
    axes.set_xlabel("coverage: share of images answered")
    axes.set_ylabel("share of wrong answers among them")
    axes.set_xlim(0, 1.01)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(f"Risk and coverage over the margin, {curve.images:,} images, AURC {curve.aurc:.4f}")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def draw_curves(measured: Faithfulness, title: str, path: Path) -> None:
    """Write a PNG of the curves: deletion above, insertion below, a column per fill."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    fills = list(dict.fromkeys(figures.fill for figures in measured.rankings))
    figure = Figure(figsize=(4.2 * len(fills) + 1.5, 7.0), layout="constrained")
    axes = figure.subplots(2, len(fills), squeeze=False, sharex=True, sharey=True)
    for column, fill in enumerate(fills):
        for row, name in enumerate(("deletion", "insertion")):
            axis = axes[row, column]
            for figures in (f for f in measured.rankings if f.fill == fill):
                curve = getattr(figures, name)
                axis.plot(range(len(curve)), curve, label=figures.ranking, markersize=4, **_STYLES[figures.ranking])
            axis.set_title(f"{name}, {fill}")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, column].set_xlabel("cells removed")
        axes[1, column].set_xlabel("cells put back")
    for row in axes:
        row[0].set_ylabel("cosine of the predicted class")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    names = [ranking for ranking in RANKINGS if ranking in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right center")
    # no mathematics: a file may be called $x$
    figure.suptitle(f"{title}: {measured.images} images", parse_math=False)
    figure.savefig(path, dpi=130, format="png")


def _prediction_rows(
    result: EvaluationResult, metadata: Metadata, names: list[str], samples: list[Sample], root: Path
) -> Iterable[list[str | int | float]]:
    logits, labels, scores = result.outputs.logits, result.labels, result.outputs.scores
    ranked = np.argsort(-logits, axis=1, kind="stable")  # [N, C]
    ranks = 1 + (ranked == labels[:, None]).argmax(axis=1)
    cosines_and_margins: Iterable[Sequence[str | float]] = itertools.repeat(("", ""))
    if scores is not None:
        best, class_map = ranked[:, :2], metadata.class_map
        cosines = class_map.totals(class_map.take(find_values(scores, metadata), best), best)
        cosines_and_margins = zip(cosines[:, 0].tolist(), find_margins(cosines).tolist(), strict=True)
    probabilities = None
    if (temperature := metadata.temperature) is not None:
        probabilities = compute_probabilities(logits, ranked[:, :1], temperature)[:, 0].tolist()
    for index, (sample, cosine_and_margin) in enumerate(zip(samples, cosines_and_margins, strict=False)):
        first = ranked[index, 0]
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


def build_evaluation(document: Mapping[str, Any], data: DataSet, split: str) -> dict[str, Any]:
    """Return the document that a model's metadata stores (`artifact.measurements` reads it)."""
    evaluation: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "opal_deploy": __version__,
        "model": Path(document["model"]).name,
        "runtime": document["session"],
        "data": data.root.resolve().name,
        "split": split,
        "images": document[f"{split}_images"],
        "boxes": document["boxes"] and data.crop is not None,
        "accuracy": document[f"{split}_accuracy"],
    }
    if game := document.get("pointing_game"):
        # the classes' parts say little without the data set
        evaluation["pointing_game"] = {key: value for key, value in game.items() if key != "classes"}
    if measured := document.get("faithfulness"):
        evaluation["faithfulness"] = _summarize_faithfulness(measured)
    if measured := document.get("attack"):
        outside = [
            {"region": row["region"], "method": row["method"], "flipped": 1 - row["kept"]["mean"]}
            for row in measured["outside"]
        ]
        evaluation["attack"] = {key: measured[key] for key in ("images", "levels", "margin", "steps")} | {
            "outside": outside
        }
    if measured := document.get("randomisation"):
        trained, shuffled = measured["stages"][0], measured["stages"][-1]
        parts = {"part": shuffled.get("part"), "part_before": trained.get("part")}
        evaluation["randomisation"] = {
            "images": measured["images"], "same_cell": shuffled["same_cell"]["mean"],
            **{name: share["mean"] for name, share in parts.items() if share is not None},
        }  # fmt: skip
    if measured := document.get("interventions"):
        evaluation["interventions"] = {
            "images": measured["images"],
            "correlation": {each["method"]: each["single_deletion"]["mean"] for each in measured["explained"]},
        }
    return evaluation | {key: document[key] for key in _COPIED if document.get(key) is not None}


def _summarize_faithfulness(measured: Mapping[str, Any]) -> dict[str, Any]:
    rows = {(row["fill"], row["ranking"]): row for row in measured["rankings"]}
    removal = []
    for fill in dict.fromkeys(row["fill"] for row in measured["rankings"]):
        random = rows.get((fill, RANDOM))
        removal.append(
            {
                "fill": fill,
                "changed": 1 - rows[fill, CONTRIBUTION]["class_kept"],
                "changed_random": None if random is None else 1 - random["class_kept"],
                "drop_beyond_random": ((random or {}).get("advantage") or {}).get("drop"),
            }
        )
    same_cell = {row["change"]: row["same_cell"]["mean"] for row in measured["stability"]}
    kept = {key: measured[key] for key in ("images", "random_control")}
    return {**kept, "removal": removal, "same_cell": same_cell}


def record_measurements(path: Path, changes: dict[str, dict[str, Any]]) -> str:
    """Store measurements in a model's file, atomically; return a line on the change.

    The graph, weights or engine stay as they are.

    Args:
        changes: values of `evaluation`, `calibration`, `baseline` and `risk`, and for a checkpoint also of
            `receptive_field` and `neighbours`; others stay as they are.

    Raises:
        ArtifactError: the file is damaged or not one of ours.
        UsageError: it cannot be written.
    """
    kind = model_kind(path)

    def update(metadata: Metadata) -> Metadata:
        return replace(
            metadata,
            evaluation=changes.get("evaluation", metadata.evaluation),
            calibration=changes.get("calibration", metadata.calibration),
            baseline=changes.get("baseline", metadata.baseline),
            risk={"split": "val", **changes["risk"]} if "risk" in changes else metadata.risk,
        )

    if kind == "onnx":
        metadata = onnx_file.read_metadata(path)
        onnx_file.check_digest(path, metadata)
        digest = onnx_file.rewrite_metadata(path, update(metadata))
        return (
            f"recorded in {path}: its digest changed from {metadata.file_sha256[:16]}... to {digest[:16]}..., its "
            f"sha256 is {compute_sha256(path)}; records made before name the old one, which `verify` needs; "
            f"`opal-deploy export {path} --trt` updates its engines without building"
        )
    if kind == "engine":
        sidecar = engine_file.read_sidecar(path)
        engine_file.write_sidecar(path, replace(sidecar, metadata=update(sidecar.metadata)))
        changed = engine_file.sidecar_path(path)
        return f"recorded in {changed}: its sha256 is {compute_sha256(changed)}; the engine is unchanged"
    before = compute_sha256(path)
    checkpoint.record_measurements(path, changes)
    return (
        f"recorded in {path}: its sha256 changed from {before[:16]}... to {compute_sha256(path)[:16]}...; later "
        "exports carry it"
    )
