"""The contents of a model file, and its model card, without torch and ONNX Runtime (`opal-deploy inspect`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from opal_deploy.artifact import measurements, onnx_file
from opal_deploy.artifact.baseline import Baseline
from opal_deploy.artifact.checkpoint_index import TensorInfo, read_index
from opal_deploy.artifact.documents import check_checkpoint
from opal_deploy.artifact.engine_file import check_engine, read_checks, read_sidecar
from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.measurements import ReceptiveField, describe_calibration, describe_edits, list_evaluation
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.logs import one_line
from opal_deploy.options import StrPath
from opal_deploy.runtime.select import read_model_metadata

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
    file = f"{path} ({path.stat().st_size / 1e6:.1f} MB)"
    return inspectors[kind](path, file)


def _inspect_onnx(path: Path, file: str) -> Inspection:
    header, metadata = onnx_file.read_header(path), onnx_file.read_metadata(path)
    intact, state = _check_digest(lambda: onnx_file.check_digest(path, metadata))
    document = {
        "path": str(path), "kind": "onnx", "opset": header.opset, "ir_version": header.ir_version, "intact": intact,
        "metadata": _count_test_vectors(metadata),
    }  # fmt: skip
    lines = [
        ("file", f"{file}, ONNX opset {header.opset}, IR {header.ir_version}"),
        ("digest", f"{metadata.file_sha256[:16]}... {state}"),
        *describe_metadata(metadata, path),
    ]
    return Inspection(document, lines)


def _check_digest(check: Callable[[], object]) -> tuple[bool, str]:
    try:
        check()
    except ArtifactError as error:
        return False, f"DOES NOT MATCH: {error}"
    return True, "matches the file"


def _inspect_engine(path: Path, file: str) -> Inspection:
    sidecar = read_sidecar(path)
    intact, state = _check_digest(lambda: check_engine(path))
    metadata, checks = sidecar.metadata, read_checks(path)
    builder, target, built = sidecar.builder, sidecar.target, sidecar.built
    options = ", ".join(name for name, value in sidecar.options.items() if value is True)
    gpu = f" ({target['gpu']})" if target.get("gpu") else ""
    document = {
        "path": str(path), "kind": "engine", "intact": intact, **sidecar.to_dict(),
        "metadata": _count_test_vectors(metadata), "checks": [asdict(check) for check in checks],
    }  # fmt: skip
    lines = [
        ("file", f"{file}, an engine: executable code"),
        ("sha256", f"{sidecar.engine['sha256']} {state}"),
        ("built by", f"{builder['name']} {builder['version']} (CUDA {builder.get('cuda')}) in {built['seconds']} s, "
            f"{built['when']}, opal-deploy {built['opal_deploy']}"),
        ("for", f"{target['sm']}{gpu}, batches {sidecar.batch}" + (f", {options}" if options else "")),
        ("built from", f"{sidecar.onnx['file']}, digest {str(sidecar.onnx['sha256'])[:16]}..."),
        ("state", f"{sidecar.state['state']}: {sidecar.state.get('why') or 'on ' + sidecar.state['machine']['gpu']}"),
        *[("checked", f"{c.when} on {c.machine.get('gpu')}, driver {c.machine.get('driver')}: "
           f"{'test vectors reproduced' if c.passed else 'FAILED'}") for c in checks],
        *describe_metadata(metadata, path),
    ]  # fmt: skip
    return Inspection(document, lines)


def _count_test_vectors(metadata: Metadata) -> dict[str, Any]:
    return {**metadata.to_dict(), "test_vectors": {"images": len(metadata.test_vectors.get("images", []))}}


def describe_metadata(metadata: Metadata, path: Path) -> list[tuple[str, str]]:
    """Return name and value of each fact in the metadata of a model at `path`."""
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
    quantised = f"; quantised: {made['quantised']}" if made.get("quantised") else ""
    head = metadata.describe_head(_count_dropped(metadata.dropped))
    if metadata.evidence == "none":
        head = "its own classifier" if metadata.head.get("plain") else "a dense layer"
    verified = f"NO: {metadata.unverified}"
    if "sum_error" in report:
        error, largest = (_format_number(report.get(name)) for name in ("sum_error", "largest_logit"))
        verified = (
            f"against the original on {report.get('image_set')}: logits {report.get('logits')}, evidence and bias add "
            f"up to them within {error} of {largest}"
        )
    elif not metadata.unverified and report:
        verified = (
            f"against {report.get('reference')} on {report.get('image_set')}, batches {report.get('batches')}: largest "
            f"cosine difference {_format_number(report.get('max_cosine'))}, {report.get('cells_different')} of "
            f"{report.get('cells')} cells differ"
        )
    return [
        ("network", f"{metadata.backbone}, {metadata.num_classes} classes, {head}, grid {rows}x{cols}, "
         f"cells of {metadata.stride} pixels" + (", all layers kept" if metadata.keep_layers else "")),
        ("evidence", {"exact": "exact: each slot's score comes from one cell" if metadata.head_kind != "additive" else
                      "exact: each slot's score sums its cells' shares of the logit; its box is the strongest cell",
                      "regions": "regions: each cell has an exact share of the logit",
                      "map": "map: averages, no single cell",
                      "none": "none: no anchors, logits only"}[metadata.evidence]),
        ("classes", _list_names(metadata.class_names)),
        ("input", f"{metadata.input_kind} {layout}, {metadata.resize}{crop}"),
        ("outputs", ", ".join(metadata.outputs) + (f" of the best {metadata.top_k} classes" if metadata.top_k else "")),
        ("precision", metadata.precision + quantised),
        ("source", f"{source.get('file', 'unknown')} ({source.get('format', 'unknown')}), "
         f"sha256 {str(source.get('sha256', 'unknown'))[:16]}...{assumed}"),
        ("metrics", _format_metrics(metadata.training.get("metrics") or {})),
        *_list_measurements(vars(metadata), metadata.risk, path, metadata.input_size,
                            exact=metadata.evidence == "exact", export_of=metadata.find_checkpoint(path)),
        *([("exported by", metadata.describe_exporter())] if made else []),
        *([("verified", verified)] if metadata.unverified or report else []),
        ("test vectors", str(len(metadata.test_vectors.get("images", [])))),
    ]  # fmt: skip


def _list_measurements(
    values: Mapping[str, Any], risk: Mapping[str, Any], path: Path, input_size: tuple[int, int], *, exact: bool,
    export_of: str | None = None,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Yield the facts that metadata and checkpoints have under the same names: training, edits and measurements."""
    training = values.get("training") or {}
    if weights := training.get("weights"):
        cfg = weights.get("pretrained_cfg") or {}
        licence = f"; timm's tag {cfg['tag']}: licence {cfg.get('license', 'not stated')}" if cfg else ""
        yield "weights", f"{weights.get('origin')}{licence}"
    if start := training.get("start"):
        yield "started from", f"{start.get('file')}, sha256 {str(start.get('sha256'))[:16]}..."
    for line in describe_edits(values.get("edits") or ()):
        yield "edit", line
    if risk:
        yield "risk", measurements.describe_risk(risk)
    yield "calibration", describe_calibration(values.get("calibration") or {})
    if exact:
        yield from list_evaluation(values.get("evaluation") or {}, path, export_of=export_of)
        baseline = Baseline.from_dict(values.get("baseline") or {})
        missing = "not measured; `opal-deploy evaluate DATA --model MODEL --split val --record` does"
        lines = [missing] if baseline is None else baseline.describe()
        yield from zip_longest(["baseline"], lines, fillvalue="")
    field = ReceptiveField.from_dict(values.get("receptive_field") or {})
    missing = "receptive field not recorded; `opal-deploy evaluate` measures it for a checkpoint"
    yield from zip_longest(["cells"], [missing] if field is None else field.describe(input_size), fillvalue="")


def _inspect_checkpoint(path: Path, file: str) -> Inspection:
    index = read_index(path)
    ours = index.get("format") == _OUR_FORMAT
    state = index.get("state_dict") if ours else index
    if not isinstance(state, dict):
        raise _damaged(path)
    tensors = {key: value for key, value in state.items() if isinstance(value, TensorInfo)}
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    kind, digest = "checkpoint" if ours else "state dict", compute_sha256(path)
    document: dict[str, Any] = {"path": str(path), "kind": kind, "sha256": digest, "parameters": parameters}
    document["tensors"] = {key: list(tensor.shape) for key, tensor in tensors.items()}
    lines = [("file", f"{file}, sha256 {digest[:16]}...")]
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
        raise ArtifactError(f"{path}: no tensors in it; expected a checkpoint or a state dict")
    lines.append(("tensors", f"{len(tensors)}, {parameters / 1e6:.1f} million values"))
    return Inspection(document, lines)


def _describe_checkpoint(index: dict[str, Any], path: Path) -> list[tuple[str, str]]:
    config, metrics = index["config"], index.get("metrics") or {}
    head = config["head"]
    # `edit` below names the dropped slots
    parts = ", ".join(f"{name} {value}" for name, value in head.items() if name not in ("plain", "dropped"))
    parts += _count_dropped(head.get("dropped") or ())
    cut = f", {'all layers' if config.get('keep_layers') else 'cut'} at stride {config.get('stride')}"
    cut = cut if config.get("stride") else ""
    # HeadConfig.evidence
    exact = head.get("anchors", True) and head.get("pooling") == "max"
    return [
        ("written by", f"opal-deploy {index.get('version')}"),
        ("network", f"{config['backbone']}, {config['num_classes']} classes, input {tuple(config['input_size'])}{cut}"),
        ("head", "the network's own classifier" if head.get("plain") else parts),
        ("classes", _list_names(index["class_names"])),
        ("metrics", _format_metrics(metrics)),
        *_list_measurements(index, metrics.get("val_risk") or {}, path, config["input_size"], exact=exact),
    ]


def _count_dropped(dropped: Sequence[int]) -> str:
    return f", {len(dropped)} slot{'s' * (len(dropped) != 1)} dropped" if dropped else ""


def _damaged(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: an opal-deploy checkpoint with parts missing; train or copy it again")


def _state_dict_kind(tensors: dict[str, Any]) -> str:
    anchors = tensors.get("classifier.prototypes")
    if "final_conv_layer.weight" not in tensors or anchors is None or len(anchors.shape) != 2 or 0 in anchors.shape:
        return "a bare state dict, not an OPAL checkpoint"
    classes, channels = anchors.shape
    return f"an OPAL checkpoint of the authors: {classes} classes, m = {channels // classes}"


def _format_metrics(metrics: dict[str, Any]) -> str:
    """Return the metrics that are one number each."""
    numbers = [f"{name} {_format_number(value)}" for name, value in metrics.items() if not isinstance(value, dict)]
    return ", ".join(numbers) or "not recorded in the file"


def _list_names(names: Sequence[str]) -> str:
    more = f", ... ({len(names)})" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _format_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_card(path: Path) -> str:
    """Return the card of a model file, in Markdown with a hub's front matter; raise ArtifactError if it is damaged."""
    metadata = read_model_metadata(path)
    limits, facts = ("\n".join(f"- {_escape(line)}" for line in lines) for lines in (
        _list_limits(metadata),
        (f"{name}: {value}" if name else value for name, value in describe_metadata(metadata, path)),
    ))  # fmt: skip
    return (
        "---\nlibrary_name: opal-deploy\npipeline_tag: image-classification\n"
        "license: other  # to be filled in by whoever trained it: weights and photographs may limit its use\n"
        f"tags: [opal-deploy, onnx{', interpretable' * (metadata.evidence == 'exact')}]\n---\n\n"
        f"# {_escape(path.stem)}\n\n"
        f"## Use\n\n    opal-deploy infer images/ --explain --model {path.name}\n\n## Limits\n\n{limits}\n\n"
        f"## Facts\n\n{facts}\n\n"
        f"## Classes\n\n{_escape(', '.join(metadata.class_names))}\n"
    )


def _list_limits(metadata: Metadata) -> Iterator[str]:
    if metadata.evidence == "exact":
        yield "A box shows where a score was read, not everything that it depends on."
    yield "Images of other things get one of the classes, too."
    if "ood_score" in metadata.outputs:
        yield "`--unknown 5%` marks images whose OOD score exceeds that of 95% of the validation images."
    if metadata.crop == "boxes":
        yield "Trained on images cropped to the object; whole images are answered less accurately."
    if metadata.unverified:
        yield f"NOT VERIFIED: {metadata.unverified}."


def _escape(text: str) -> str:
    """Return text of a file that neither HTML nor Markdown reads as markup."""
    cleaned = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{sign}" if sign in "*_[]|#" else sign for sign in cleaned)
