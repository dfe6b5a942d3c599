"""`evaluate --record`: keep what was measured of a model's evidence in the model's own file."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opal_deploy._version import __version__
from opal_deploy.artifact import engine_file, onnx_file
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.faithfulness.rankings import CONTRIBUTION, RANDOM
from opal_deploy.model import checkpoint

# taken as they are from the document of an evaluation
_COPIED = ("prototype_consistency", "prototype_stability", "part_purity")


def check_recordable(path: Path, metadata: Metadata) -> None:
    """Check, before anything is measured, that a model's file can keep an evaluation.

    Raises:
        UsageError: the model has no single cells as evidence, or is a checkpoint of the authors.
    """
    if metadata.evidence != "exact":
        raise UsageError(f"{path}: no single cell is its evidence (evidence {metadata.evidence}); leave --record out")
    if model_kind(path) == "checkpoint" and metadata.source.get("format") == "authors":
        raise UsageError(
            f"{path}: a bare state dict has no place for an evaluation; export it, and give --record with the export"
        )


def build_evaluation(document: Mapping[str, Any], data: DataSet, split: str) -> dict[str, Any]:
    """Return the document that metadata keeps (`artifact.evaluation`) of the JSON document of one evaluated model.

    Args:
        document: as `evaluate --json` prints it.
        data: the data set.
        split: which of its splits was measured.
    """
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
        # the classes' parts are for reading beside the data set
        evaluation["pointing_game"] = {key: value for key, value in game.items() if key != "classes"}
    if measured := document.get("faithfulness"):
        evaluation["faithfulness"] = _summarize_faithfulness(measured)
    return evaluation | {key: document[key] for key in _COPIED if document.get(key) is not None}


def _summarize_faithfulness(measured: Mapping[str, Any]) -> dict[str, Any]:
    kept = {(row["fill"], row["order"]): row["class_kept"] for row in measured["removal"]}
    better = {(row["fill"], row["order"]): row.get("evidence_better_by") for row in measured["removal"]}
    removal = []
    for fill in dict.fromkeys(row["fill"] for row in measured["removal"]):
        random = kept.get((fill, RANDOM))
        removal.append(
            {
                "fill": fill,
                "changed": 1 - kept[fill, CONTRIBUTION],
                "changed_random": None if random is None else 1 - random,
                "drop_beyond_random": (better.get((fill, RANDOM)) or {}).get("drop"),
            }
        )
    same_cell = {row["change"]: row["same_cell"]["mean"] for row in measured["stability"]}
    return {
        "images": measured["images"],
        "random_control": measured["random_control"],
        "removal": removal,
        "same_cell": same_cell,
    }


def record_evaluation(
    path: Path,
    evaluation: dict[str, Any],
    receptive_field: dict[str, Any] | None = None,
    calibration: dict[str, Any] | None = None,
) -> str:
    """Write an evaluation into a model's file, atomically; return what changed in one line.

    The graph, weights or plan stay as they are.

    Args:
        path: of the model.
        evaluation: see `build_evaluation`.
        receptive_field: as the evaluation measured it, for a checkpoint that lacks it; None: it is not known.
        calibration: as the evaluation fitted it, for a model that has none; None: it fitted none.

    Raises:
        ArtifactError: the file is damaged or not one of ours.
        UsageError: it cannot be written.
    """
    kind = model_kind(path)

    def update(metadata: Metadata) -> Metadata:
        return replace(
            metadata,
            evaluation=evaluation,
            calibration=metadata.calibration if calibration is None else calibration,
        )

    if kind == "onnx":
        metadata = onnx_file.read_metadata(path)
        onnx_file.check_digest(path, metadata)
        digest = onnx_file.rewrite_metadata(path, update(metadata))
        return (
            f"recorded in {path}: its digest was {metadata.file_sha256[:16]}... and is {digest[:16]}..., its sha256 "
            f"{compute_sha256(path)}; `opal-deploy export {path} --trt` makes its engines follow, without building"
        )
    if kind == "engine":
        sidecar = engine_file.read_sidecar(path)
        engine_file.write_sidecar(path, replace(sidecar, metadata=update(sidecar.metadata)))
        changed = engine_file.sidecar_path(path)
        return f"recorded in {changed}: its sha256 is {compute_sha256(changed)}; the engine is unchanged"
    before = compute_sha256(path)
    changes = {"evaluation": evaluation, "receptive_field": receptive_field, "calibration": calibration}
    checkpoint.record_evaluation(path, {key: value for key, value in changes.items() if value is not None})
    return (
        f"recorded in {path}: its sha256 was {before[:16]}... and is {compute_sha256(path)[:16]}...; exports made from "
        "now on carry it"
    )
