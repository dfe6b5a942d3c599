"""The contents of a model file, without torch and ONNX Runtime (`opal-deploy inspect`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.artifact.files import model_kind
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.logs import one_line
from opal_deploy.options import StrPath

if TYPE_CHECKING:
    from opal_deploy.artifact.metadata import Metadata

_NAMES_SHOWN = 8
# model.checkpoint.FORMAT, whose module imports torch
_OUR_FORMAT = "opal-deploy checkpoint"
_CHECKPOINT_KEYS = (
    "schema", "version", "config", "class_names", "crop", "edits", "metrics", "training", "evaluation",
    "receptive_field", "calibration",
)  # fmt: skip


@dataclass(frozen=True)
class Inspection:
    """The contents of a model file; its text is a line per fact.

    Attributes:
        document: everything, for JSON.
        lines: name and value of each fact, for people.
    """

    document: dict[str, Any]
    lines: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        return "\n".join(f"{name:<{width}}  {one_line(value)}" for name, value in self.lines)


def inspect(model: StrPath) -> Inspection:
    """Return what a model is, where it comes from, and what was checked; nothing in the file is run.

    Args:
        model: an exported ONNX file or engine, or a checkpoint (ours or the authors').

    Raises:
        ArtifactError: no such file, or it is damaged. UsageError: not a model by its suffix.
    """
    path = Path(model)
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; expected an ONNX file, an engine or a checkpoint")
    kind = model_kind(path)
    if kind is None:
        raise UsageError(f"{path}: expected .onnx, .engine, .pt or .pth")
    inspectors = {"onnx": _inspect_onnx, "engine": _inspect_engine, "checkpoint": _inspect_checkpoint}
    return inspectors[kind](path)


def _inspect_onnx(path: Path) -> Inspection:
    from opal_deploy.artifact import onnx_file

    header, metadata = onnx_file.read_header(path), onnx_file.read_metadata(path)
    intact, state = _check_digest(lambda: onnx_file.check_digest(path, metadata))
    document = {"path": str(path), "kind": "onnx", "opset": header.opset, "ir_version": header.ir_version}
    lines = [
        ("file", f"{path} ({path.stat().st_size / 1e6:.1f} MB), ONNX opset {header.opset}, IR {header.ir_version}"),
        ("digest", f"{metadata.file_sha256[:16]}... {state}"),
        *_describe_metadata(metadata, path),
    ]
    return Inspection({**document, "intact": intact, "metadata": _count_test_vectors(metadata)}, lines)


def _check_digest(check: Callable[[], object]) -> tuple[bool, str]:
    try:
        check()
    except ArtifactError as error:
        return False, f"DOES NOT MATCH: {error}"
    return True, "matches the file"


def _inspect_engine(path: Path) -> Inspection:
    from opal_deploy.artifact.engine_file import check_engine, read_checks, read_sidecar

    sidecar = read_sidecar(path)
    intact, state = _check_digest(lambda: check_engine(path))
    metadata, checks = sidecar.metadata, read_checks(path)
    builder, target, built = sidecar.builder, sidecar.target, sidecar.built
    options = ", ".join(f"{k} {v}" for k, v in sidecar.options.items() if v and k != "batch")
    gpu = f" ({target['gpu']})" if target.get("gpu") else ""
    document = {
        "path": str(path), "kind": "engine", "intact": intact, **sidecar.to_dict(),
        "metadata": _count_test_vectors(metadata), "checks": [asdict(check) for check in checks],
    }  # fmt: skip
    lines = [
        ("file", f"{path} ({path.stat().st_size / 1e6:.1f} MB), an engine: executable code"),
        ("sha256", f"{sidecar.engine['sha256']} {state}"),
        ("built by", f"{builder['name']} {builder['version']} (CUDA {builder.get('cuda')}) in {built['seconds']} s, "
            f"{built['when']}, opal-deploy {built['opal_deploy']}"),
        ("for", f"{target['sm']}{gpu}, batches {sidecar.batch}" + (f", {options}" if options else "")),
        ("built from", f"{sidecar.onnx['file']}, digest {str(sidecar.onnx['sha256'])[:16]}..."),
        ("state", f"{sidecar.state['state']}: {sidecar.state.get('why') or 'on ' + sidecar.state['machine']['gpu']}"),
        *[("checked", f"{c.when} on {c.machine.get('gpu')}, driver {c.machine.get('driver')}: "
           f"{'test vectors reproduced' if c.passed else 'FAILED'}") for c in checks],
        *_describe_metadata(metadata, path),
    ]  # fmt: skip
    return Inspection(document, lines)


def _count_test_vectors(metadata: Metadata) -> dict[str, Any]:
    return {**metadata.to_dict(), "test_vectors": {"images": len(metadata.test_vectors.get("images", []))}}


def _describe_metadata(metadata: Metadata, path: Path) -> list[tuple[str, str]]:
    from opal_deploy.artifact.measurements import describe_calibration, describe_edits, list_evaluation

    rows, cols = metadata.grid
    height, width = metadata.input_size
    layout = {
        "uint8": f"[N, {height}, {width}, 3] RGB",
        "float32": f"[N, 3, {height}, {width}] normalised",
        "image": f"uint8 RGB of any size, resized to [N, {height}, {width}, 3] in the graph",
    }[metadata.input_kind]
    crop = "; images cropped to boxes first" if metadata.crop == "boxes" else ""
    source, report, made = metadata.source, metadata.verification, metadata.exporter
    assumed = f"; assumed {source['assumed']}" if source.get("assumed") else ""
    quantised = made.get("quantised")
    metrics = metadata.training.get("metrics", {})
    dropped = _count_dropped(metadata.dropped)
    head = metadata.describe_head(dropped)
    if metadata.evidence == "none":
        head = "its own classifier" if metadata.head.get("plain") else "a dense layer"
    lines = [
        ("network", f"{metadata.backbone}, {metadata.num_classes} classes, {head}, grid {rows}x{cols}, "
         f"cells of {metadata.stride} pixels" + (", all layers kept" if metadata.keep_layers else "")),
        ("evidence", {"exact": "exact: each slot's score comes from one cell", "map": "map: averages, no single cell",
                      "none": "none: no anchors, logits only"}[metadata.evidence]),
        ("classes", _list_names(list(metadata.class_names))),
        ("input", f"{metadata.input_kind} {layout}, {metadata.resize}{crop}"),
        ("normalised", _format_normalisation(vars(metadata))),
        ("outputs", ", ".join(metadata.outputs) + (f" of the best {metadata.top_k} classes" if metadata.top_k else "")),
        ("precision", metadata.precision + (f"; quantised: {quantised}" if quantised else "")),
        ("source", f"{source.get('file', 'unknown')} ({source.get('format', 'unknown')}), "
         f"sha256 {str(source.get('sha256', 'unknown'))[:16]}...{assumed}"),
        *_describe_weights(metadata.training),
        *_describe_start(metadata.training),
        *(("edit", line) for line in describe_edits(metadata.edits)),
    ]  # fmt: skip
    if metrics:
        lines.append(("training", _format_metrics(metrics)))
    if metadata.risk:
        lines.append(("risk", _format_risk(metadata.risk)))
    lines.append(("calibration", describe_calibration(metadata.calibration)))
    if metadata.evidence == "exact":
        lines += list_evaluation(metadata.evaluation, path, export_of=metadata.find_checkpoint(path))
        lines += _describe_baseline(metadata.baseline)
    lines += _describe_receptive_field(metadata.receptive_field, metadata.input_size)
    if made:
        lines.append(("exported by", metadata.describe_exporter()))
    if metadata.unverified:
        lines.append(("verified", f"NO: {metadata.unverified}"))
    elif report:
        against = f"{report.get('reference')} on {report.get('image_set')}, batches {report.get('batches')}"
        cosine = _format_number(report.get("max_cosine"))
        cells = f"{report.get('cells_different')} of {report.get('cells')} cells differ"
        lines.append(("verified", f"against {against}: largest cosine difference {cosine}, {cells}"))
    lines.append(("test vectors", str(len(metadata.test_vectors.get("images", [])))))
    return lines


def _format_normalisation(values: dict[str, Any]) -> str:
    return "; ".join(f"{name} {', '.join(f'{v:g}' for v in values[name])}" for name in ("mean", "std"))


def _describe_start(training: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line on the checkpoint that training started from, if it did (`train --start-from`)."""
    if not (start := training.get("start")):
        return []
    frozen = ", backbone frozen" if start.get("frozen_backbone") else ""
    reset = f"; trained anew: {', '.join(start['reset'])}" if start.get("reset") else ""
    return [("started from", f"{start.get('file')}, sha256 {str(start.get('sha256'))[:16]}...{frozen}{reset}")]


def _describe_weights(training: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the line on the weights that training began with, and how their makers prepared images."""
    if not (weights := training.get("weights")):
        return []
    cfg = weights.get("pretrained_cfg")
    if not cfg:
        return [("weights", str(weights.get("origin")))]
    crop = f"{cfg['crop_mode']} crop {cfg['crop_pct']:g} of {'x'.join(map(str, cfg['input_size'][1:]))}"
    return [
        ("weights", f"{weights.get('origin')}; timm's tag {cfg['tag']}: licence {cfg.get('license', 'not stated')}, "
         f"made with {cfg['interpolation']}, {crop} (here: squash-bilinear)"),
    ]  # fmt: skip


def _inspect_checkpoint(path: Path) -> Inspection:
    from opal_deploy.artifact.checkpoint_index import TensorInfo, read_index
    from opal_deploy.artifact.documents import check_checkpoint
    from opal_deploy.artifact.files import compute_sha256

    index = read_index(path)
    ours = index.get("format") == _OUR_FORMAT
    state = index.get("state_dict") if ours else index
    if not isinstance(state, dict):
        raise _damaged(path)
    tensors = {key: value for key, value in state.items() if isinstance(value, TensorInfo)}
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    digest = compute_sha256(path)
    document: dict[str, Any] = {
        "path": str(path),
        "kind": "checkpoint" if ours else "state dict",
        "sha256": digest,
        "parameters": parameters,
        "tensors": {key: list(tensor.shape) for key, tensor in tensors.items()},
    }
    lines = [("file", f"{path} ({path.stat().st_size / 1e6:.1f} MB), sha256 {digest[:16]}...")]
    if ours:
        document |= {key: index.get(key) for key in _CHECKPOINT_KEYS}
        try:
            check_checkpoint(index)
            lines += _describe_checkpoint(index, path)
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}; train or copy it again") from None
        except (AttributeError, KeyError, TypeError, ValueError):
            raise _damaged(path) from None
    elif tensors:
        lines.append(("kind", _state_dict_kind(tensors)))
    else:
        keys = ", ".join(map(str, list(index)[:_NAMES_SHOWN]))
        raise ArtifactError(
            f"{path}: no tensors in it, only {keys or 'nothing'}; expected a checkpoint or a state dict"
        )
    lines.append(("tensors", f"{len(tensors)}, {parameters / 1e6:.1f} million values"))
    return Inspection(document, lines)


def _describe_checkpoint(index: dict[str, Any], path: Path) -> list[tuple[str, str]]:
    from opal_deploy.artifact.measurements import describe_calibration, describe_edits, list_evaluation
    from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD

    config, metrics = index["config"], index.get("metrics") or {}
    head = config["head"]
    # `edit` below names the dropped slots
    parts = [f"{name} {value}" for name, value in head.items() if name not in ("plain", "dropped")]
    dropped = _count_dropped(head.get("dropped") or ())
    risk = metrics.get("val_risk")
    cut = f", {'all layers' if config.get('keep_layers') else 'cut'} at stride {config.get('stride')}"
    cut = cut if config.get("stride") else ""
    # HeadConfig.evidence
    exact = head.get("anchors", True) and head.get("pooling") == "max"
    return [
        ("written by", f"opal-deploy {index.get('version')}"),
        ("network", f"{config['backbone']}, {config['num_classes']} classes, input {tuple(config['input_size'])}{cut}"),
        ("normalised", _format_normalisation({"mean": IMAGENET_MEAN, "std": IMAGENET_STD, **config})),
        ("head", "the network's own classifier" if head.get("plain") else ", ".join(parts) + dropped),
        ("classes", _list_names(list(index["class_names"]))),
        *_describe_weights(index.get("training") or {}),
        *_describe_start(index.get("training") or {}),
        *(("edit", line) for line in describe_edits(index.get("edits") or ())),
        ("metrics", _format_metrics(metrics) or "none"),
        *([("risk", _format_risk({"split": "val", **risk}))] if isinstance(risk, dict) else []),
        ("calibration", describe_calibration(index.get("calibration") or {})),
        *(list_evaluation(index.get("evaluation") or {}, path) if exact else []),
        *(_describe_baseline(index.get("baseline") or {}) if exact else []),
        *_describe_receptive_field(index.get("receptive_field") or {}, config["input_size"]),
    ]


def _count_dropped(dropped: Sequence[int]) -> str:
    return f", {len(dropped)} slot{'s' * (len(dropped) != 1)} dropped" if dropped else ""


def _describe_baseline(raw: dict[str, Any]) -> list[tuple[str, str]]:
    from opal_deploy.artifact.baseline import Baseline

    baseline = Baseline.from_dict(raw)
    if baseline is None:
        return [("baseline", "not measured; `opal-deploy evaluate DATA --model MODEL --split val --record` does")]
    first, *others = baseline.describe()
    return [("baseline", first), *(("", line) for line in others)]


def _describe_receptive_field(raw: dict[str, Any], input_size: tuple[int, int]) -> list[tuple[str, str]]:
    from opal_deploy.artifact.measurements import ReceptiveField

    field = ReceptiveField.from_dict(raw)
    if field is None:
        return [("cells", "receptive field not recorded; `opal-deploy evaluate` measures it for a checkpoint")]
    first, *others = field.describe(input_size)
    return [("cells", first), *(("", line) for line in others)]


def _damaged(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: an opal-deploy checkpoint with parts missing; train or copy it again")


def _state_dict_kind(tensors: dict[str, Any]) -> str:
    anchors = tensors.get("classifier.prototypes")
    if anchors is None or "final_conv_layer.weight" not in tensors:
        return "a bare state dict, not an OPAL checkpoint"
    if len(anchors.shape) != 2 or 0 in anchors.shape:
        return f"a state dict whose classifier.prototypes has the shape {list(anchors.shape)}, not an OPAL checkpoint"
    classes, channels = anchors.shape
    return f"an OPAL checkpoint of the authors: {classes} classes, m = {channels // classes}"


def _format_metrics(metrics: dict[str, Any]) -> str:
    """Return the metrics that are one number each."""
    return ", ".join(f"{k} {_format_number(v)}" for k, v in metrics.items() if not isinstance(v, dict))


def _format_risk(summary: dict[str, Any]) -> str:
    """Return one line for a risk-coverage curve: how many images can be answered at which error rate."""
    coverage = summary["coverage_at_error"]
    shares = ", ".join(f"{float(share):.1%} at {100 * float(error):g} %" for error, share in coverage.items())
    return (
        f"{summary['images']} {summary.get('split', 'labelled')} images: error {summary['error']:.2%} where all are "
        f"answered, AURC {summary['aurc']:.4f}; coverage by error rate: {shares}"
    )


def _list_names(names: list[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _format_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
