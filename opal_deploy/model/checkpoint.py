"""Checkpoints: ours, and the paper authors'.

Ours is one `.pt` file that `torch.load(weights_only=True)` reads: a dictionary of plain values with one state dict.
The authors' is a bare state dict, see `authors_checkpoint`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opal_deploy._version import __version__
from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.documents import check_checkpoint, pack_array
from opal_deploy.artifact.files import atomic_write, compute_sha256, without_folders
from opal_deploy.artifact.measurements import Calibration, ReceptiveField
from opal_deploy.artifact.metadata import LINEAR_SCHEMA, Metadata
from opal_deploy.artifact.patches import Patches
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model import authors_checkpoint, prototype_checkpoint, state_dicts
from opal_deploy.model.authors_checkpoint import Assumptions
from opal_deploy.model.config import NetworkConfig, find_unknown_settings
from opal_deploy.model.linear_head import LinearNetwork
from opal_deploy.model.neighbours import Neighbours
from opal_deploy.model.network import OpalNetwork
from opal_deploy.model.receptive_field import compute_receptive_field

# what may be measured of a model, by the key of its document
_MEASURED: dict[str, Any] = {
    "receptive_field": ReceptiveField, "calibration": Calibration, "baseline": Baseline, "patches": Patches
}  # fmt: skip
# keys whose documents become part of the metadata of exported files
_PLAIN = ("crop", "metrics", "training", "edits", "evaluation")
FORMAT = "opal-deploy checkpoint"
SCHEMA = 1
_KEYS = frozenset({
    "format", "schema", "version", "config", "class_names", "crop", "metrics", "training", "edits", "evaluation",
    "receptive_field", "calibration", "baseline", "neighbours", "patches", "state_dict",
    # what `train --resume` needs, which is no part of a model
    "resume",
})  # fmt: skip


@dataclass
class Checkpoint:
    """A network with its records.

    Attributes:
        network: in evaluation mode, on the CPU.
        class_names: C names in the order of the logits.
        crop: `boxes` if training images were cropped to annotated boxes, else None.
        metrics: results of the training run, such as `test_accuracy`.
        training: settings of the training run.
        edits: what each `edit` did, the first one first; see `Metadata.edits`.
        evaluation: measurements by `evaluate --record` (`evaluation.record`), or empty.
        source: file name, sha256, format (`opal-deploy` or `authors`) and, for the latter, the `assumed` settings.
        receptive_field: of the network's cells, if measured.
        calibration: of the logits, if measured.
        baseline: of the answers to validation images, if measured.
        patches: of training images, by slot, if chosen.
        unknown: keys of the file that this version does not know, kept where the checkpoint is written again.
    """

    network: OpalNetwork
    class_names: list[str]
    crop: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    edits: tuple[dict[str, Any], ...] = ()
    evaluation: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    receptive_field: ReceptiveField | None = None
    calibration: Calibration | None = None
    baseline: Baseline | None = None
    patches: Patches | None = None
    unknown: dict[str, Any] = field(default_factory=dict)


def save(path: Path, checkpoint: Checkpoint, *, extra: dict[str, Any] | None = None, overwrite: bool = True) -> None:
    """Write a checkpoint in our format, atomically.

    Args:
        path, checkpoint: the file to write, and its content.
        extra: more plain values and tensors, under keys that `load` ignores.
        overwrite: whether a file of that name is replaced.

    Raises:
        UsageError: the folder cannot be written to, or the file exists and may not be replaced.
    """
    document = {
        **checkpoint.unknown,
        "format": FORMAT,
        "schema": SCHEMA,
        "version": __version__,
        "config": checkpoint.network.config.to_dict(),
        "class_names": list(checkpoint.class_names),
        "crop": checkpoint.crop,
        "metrics": checkpoint.metrics,
        "training": without_folders(checkpoint.training),
        "edits": list(checkpoint.edits),
        "evaluation": checkpoint.evaluation,
        **_to_documents(checkpoint),
        "neighbours": checkpoint.network.neighbours.to_dict() if checkpoint.network.neighbours else {},
        "state_dict": {k: v.detach().cpu().contiguous() for k, v in checkpoint.network.state_dict().items()},
        **(extra or {}),
    }
    _write(path, document, replace=overwrite)


def _to_documents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what was measured of a checkpoint, for its file and for metadata; empty documents where it was not."""
    return {name: value.to_dict() if (value := getattr(checkpoint, name)) else {} for name in _MEASURED}


def with_dropped_slots(checkpoint: Checkpoint, dropped: tuple[int, ...]) -> Checkpoint:
    """Return a checkpoint of the same weights in which these slots, given by their channels, and no others are dropped.

    What was measured of the model is left out: metrics, evaluation, calibration and baseline.
    """
    config = checkpoint.network.config
    network = OpalNetwork(replace(config, head=replace(config.head, dropped=dropped)))
    network.load_state_dict(checkpoint.network.state_dict())
    network.neighbours = checkpoint.network.neighbours
    return replace(checkpoint, network=network.eval(), metrics={}, evaluation={}, calibration=None, baseline=None)


def record_measurements(path: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Write `evaluation`, `calibration`, `risk` and the like into a checkpoint of our format; everything else stays.

    Raises:
        CheckpointError: the file is not a checkpoint of our format.
        UsageError: the folder cannot be written to.
    """
    document = state_dicts.load_torch_file(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not an opal-deploy checkpoint; only those can store an evaluation")
    metrics, risk = document.get("metrics") or {}, {"val_risk": changes["risk"]} if "risk" in changes else {}
    changed = {
        **document,
        "training": without_folders(document.get("training") or {}),
        "metrics": {**metrics, **risk},
        **{name: value for name, value in changes.items() if name != "risk"},
    }
    _write(path, changed)


def _write(path: Path, document: dict[str, Any], *, replace: bool = True) -> None:
    with atomic_write(path, replace=replace) as temporary, temporary.open("wb") as stream:
        try:
            torch.save(document, stream)
        except RuntimeError as error:
            # torch's writer raises this when the stream takes no more bytes
            if "inline_container" not in str(error):
                raise
            raise OSError("disk full?") from None


def load(
    path: Path, *, class_names: list[str] | None = None, assumptions: Assumptions | None = None, arch: str | None = None
) -> Checkpoint:
    """Read a checkpoint in our format, the authors', or of another prototype network.

    Args:
        path: a `.pt` or `.pth` file.
        class_names: C names that replace those in the file; only ours has any.
        assumptions: for an authors' checkpoint; None means the paper's values.
        arch: the architecture of another prototype network, see `prototype_checkpoint`; None: it is an OPAL network.

    Raises:
        CheckpointError: neither format, or its keys, shapes or class names do not fit together.
        UsageError: no such file.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such checkpoint")
    raw = state_dicts.load_torch_file(path)
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a checkpoint or a state dict, found {type(raw).__name__}")
    if arch is None and raw.get("format") == FORMAT:
        checkpoint = _load_ours(path, raw, class_names)
    elif arch is not None or (raw and all(isinstance(value, Tensor) for value in raw.values())):
        checkpoint = _load_foreign(path, raw, class_names, assumptions or Assumptions(), arch)
    else:
        keys = ", ".join(sorted(map(str, raw))[:8])
        raise CheckpointError(f"{path}: neither a checkpoint of ours nor a bare state dict (found keys {keys})")
    checkpoint.source = {"file": path.name, "sha256": compute_sha256(path), **checkpoint.source}
    checkpoint.network.eval()
    return checkpoint


def read_class_names(path: Path) -> list[str]:
    """Read class names from a UTF-8 file, one per line; a byte order mark and blank lines at the end are ignored.

    Raises:
        UsageError: the file is unreadable or empty, or a name is blank or repeated.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a readable UTF-8 file of class names ({error})") from None
    names = [line.strip() for line in lines]
    blank = [str(number) for number, name in enumerate(names, 1) if not name]
    doubled = sorted({name for name in names if name and names.count(name) > 1})
    if blank or doubled:
        what = f"blank line {', '.join(blank)}" if blank else f"{', '.join(doubled[:5])} more than once"
        raise UsageError(f"{path}: {what}; expected one class name per line, each once")
    return names


def _load_ours(path: Path, raw: dict[str, Any], class_names: list[str] | None) -> Checkpoint:
    advice = f"use opal-deploy {raw.get('version')}, which wrote it"
    if raw.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: checkpoint schema {raw.get('schema')!r} found, {SCHEMA} expected; {advice}")
    try:
        if unknown := find_unknown_settings(raw["config"]):
            raise CheckpointError(f"{path}: its network has unknown settings, {', '.join(unknown)}; {advice}")
        config = NetworkConfig.from_dict(raw["config"])
        stored_names, state = list(raw["class_names"]), dict(raw["state_dict"])
        check_checkpoint(raw)
        if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
            raise TypeError(f"{odd[0]} of its state_dict is not a tensor")
        json.dumps([raw.get(name) for name in _PLAIN])
        measured = {name: kind.from_dict(raw.get(name) or {}) for name, kind in _MEASURED.items()}
    except CheckpointError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, UsageError) as error:
        raise CheckpointError(f"{path}: damaged checkpoint ({error!r}); train or copy it again") from None
    if len(stored_names) != config.num_classes:
        raise CheckpointError(f"{path}: {len(stored_names)} class names for a network of {config.num_classes} classes")
    network = OpalNetwork(config)
    state_dicts.load_exactly(network, state, _misfit(path, config))
    try:
        network.neighbours = Neighbours.from_dict(
            raw.get("neighbours") or {}, network.backbone.num_features, config.num_classes
        )
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged checkpoint ({error!r}); train or copy it again") from None
    return Checkpoint(
        network,
        _check_class_names(path, stored_names if class_names is None else class_names, config.num_classes),
        crop=raw.get("crop"),
        metrics=dict(raw.get("metrics") or {}),
        training=dict(raw.get("training") or {}),
        edits=tuple(raw.get("edits") or ()),
        evaluation=dict(raw.get("evaluation") or {}),
        source={"format": "opal-deploy", "version": raw.get("version")},
        **measured,
        unknown={key: value for key, value in raw.items() if key not in _KEYS},
    )


def _load_foreign(
    path: Path, raw: dict[str, Any], class_names: list[str] | None, assumptions: Assumptions, arch: str | None
) -> Checkpoint:
    """Return the checkpoint of other code, whose classes are numbered where no names are given."""
    if arch is None:
        config, state, assumed = authors_checkpoint.parse(path, raw, assumptions)
        network = OpalNetwork(config)
        state_dicts.load_exactly(network, state, _misfit(path, config))
    else:
        network = prototype_checkpoint.load_network(path, raw, arch, assumptions.input_size)
        assumed = {"arch": Path(arch).name, "input_size": list(assumptions.input_size)}
    count = network.config.num_classes
    if class_names is None:
        class_names, assumed = [f"class {i}" for i in range(count)], {**assumed, "class_names": "numbered"}
    return Checkpoint(
        network,
        _check_class_names(path, class_names, count),
        crop=assumptions.crop,
        source={"format": "authors" if arch is None else "prototypes", "assumed": assumed},
    )


def _misfit(path: Path, config: NetworkConfig) -> str:
    return f"{path} does not fit {config.backbone} with {config.num_classes} classes"


def _check_class_names(path: Path, names: list[str], num_classes: int) -> list[str]:
    if len(names) != num_classes:
        raise CheckpointError(f"{path}: {len(names)} class names for {num_classes} classes; give one per class")
    return [str(name) for name in names]


def build_metadata(checkpoint: Checkpoint) -> Metadata:
    """Build the metadata of a checkpoint before its export, without verification report and test vectors."""
    network = checkpoint.network
    head = network.config.head
    # curves have a field of their own, or stay in the checkpoint
    metrics = {name: value for name, value in checkpoint.metrics.items() if not isinstance(value, dict)}
    risk = checkpoint.metrics.get("val_risk")
    own: dict[str, Any]
    if isinstance(network, LinearNetwork):
        weights = network.weights
        arrays = {"weights": pack_array(weights.numpy()), "biases": pack_array(network.biases.numpy())}
        own = {"schema": LINEAR_SCHEMA, "prototypes_per_class": weights.shape[1], "class_weights": arrays}
    else:
        own = {"prototypes_per_class": head.prototypes_per_class}
    receptive_field = checkpoint.receptive_field or compute_receptive_field(network.backbone, network.config.input_size)
    return Metadata(
        class_names=tuple(checkpoint.class_names),
        head=head.to_dict(),
        evidence=head.evidence,
        backbone=network.config.backbone,
        grid=network.grid,
        input_size=network.config.input_size,
        mean=network.config.mean,
        std=network.config.std,
        resize=network.config.resize,
        crop=checkpoint.crop,
        source=checkpoint.source,
        training={**checkpoint.training, **({"metrics": metrics} if metrics else {})},
        risk={"split": checkpoint.calibration.split if checkpoint.calibration else "val", **risk} if risk else {},
        edits=checkpoint.edits,
        evaluation=checkpoint.evaluation,
        keep_layers=network.config.keep_layers,
        outputs=network.list_outputs(),
        **{**_to_documents(checkpoint), "receptive_field": receptive_field.to_dict()},
        **own,
    )
