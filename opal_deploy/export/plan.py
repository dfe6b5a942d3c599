"""The plan of an export: what is written, where, and from what; made and checked once, before any work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from opal_deploy.artifact.engine_file import Sidecar
from opal_deploy.artifact.files import ENGINE_SUFFIX, ONNX_SUFFIX, is_same_file
from opal_deploy.artifact.metadata import Metadata, Precision, check_all_outputs, check_fixed_size
from opal_deploy.errors import UsageError
from opal_deploy.export.options import (
    CheckpointOptions,
    CommonOptions,
    EngineOptions,
    ExportOptions,
    TritonOptions,
    WebOptions,
)
from opal_deploy.options import Options, flag_of
from opal_deploy.runtime.tensorrt import SHORT_NAMES

if TYPE_CHECKING:
    from opal_deploy.export.builder import EngineTarget
    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.export.onnx_source import OnnxSource
    from opal_deploy.runtime.devices import Driver
    from opal_deploy.runtime.verification import Comparison
    from opal_deploy.triton.repository import WrittenRepository
    from opal_deploy.web.site import WrittenSite

    ExportSource = CheckpointSource | OnnxSource

# what a file's stem ends in for every precision but fp32
_PRECISION_ENDINGS = tuple(f".{precision}" for precision in get_args(Precision) if precision != "fp32")


@dataclass(frozen=True)
class EngineTargets:
    """The engines to build from one ONNX file: builder and GPU of each, their folder, and this machine's driver."""

    targets: Sequence[EngineTarget]
    folder: Path
    driver: Driver


@dataclass(frozen=True)
class ExportPlan:
    """What one export writes, where, and from what.

    Attributes:
        source: the checkpoint or ONNX file.
        options: how the files are made and verified.
        onnx: ONNX files by precision, in order. None where engines are built from an ONNX source as it is.
        engines: engines, built from the last ONNX file or from the source.
    """

    source: ExportSource
    options: ExportOptions
    onnx: Mapping[Precision, Path]
    engines: EngineTargets | None = None


def plan_export(source: ExportSource, options: ExportOptions, engines: EngineTargets | None = None) -> ExportPlan:
    """Return the plan of the files to write for a source, named by the rule of `onnx_path`.

    The precision is that of the options. By default it is fp32, and for engines that of an ONNX source that is not
    fp32, else fp16. A checkpoint that becomes engines is written as fp32 ONNX too. An ONNX file that already has the
    engines' precision is built as it is.

    Raises:
        ArtifactError: an ONNX source is not ours, or damaged.
        UsageError: an option does not fit the source, or a file would get the name of another one.
    """
    own, precision = source.onnx_precision, options.precision
    if engines is None:
        precision = precision or "fp32"
        out = onnx_path(source.path, precision) if options.out is None else Path(options.out)
        plan = ExportPlan(source, options, {precision: out})
    else:
        precision = precision or (own if own not in (None, "fp32") else "fp16")
        precisions = {} if precision == own else dict.fromkeys([precision] if own else ["fp32", precision])
        files = {p: engines.folder / onnx_path(source.path, p).name for p in precisions}
        plan = ExportPlan(source, options, files, engines)
    _check_plan(plan)
    return plan


def _check_plan(plan: ExportPlan) -> None:
    path, options, origin = plan.source.path, plan.options, plan.source.origin
    for use, is_used in (("TensorRT", plan.engines is not None), ("Triton", options.triton is not None)):
        if is_used:
            check_fixed_size(origin, str(path), use)
    if options.outputs == "topk" and origin.evidence == "none":
        raise UsageError("--outputs topk: the model has only logits and no evidence to select; leave it out")
    if options.input == "image" and origin.form.rule.kind == "shortest_edge":
        raise UsageError(f"{path}: crops what it resizes ({origin.resize}); --input image takes squash and letterbox")
    own = plan.source.onnx_precision
    if own is None:
        return
    other_input = options.input != origin.input_kind and (origin.input_kind, options.input) != ("uint8", "image")
    less = (not options.ood_score and origin.has_output("ood_score")) or (not options.patches and origin.patches)
    if options.attention or other_input or less:
        raise UsageError(f"{path}: inputs, outputs and patches are fixed in an ONNX file; export the checkpoint again")
    if plan.onnx:
        if own != "fp32" or "fp32" in plan.onnx:
            raise UsageError(f"{path}: already {own}; give another --precision of the fp32 file or the checkpoint")
        # the reference is all of the file's outputs
        check_all_outputs(origin, str(path), "another precision of it")
        if any(is_same_file(file, path) for file in plan.onnx.values()):
            raise UsageError(f"{path}: this is the model to export; give another --out")
        return
    if origin.int8_activations == "uint8":
        raise UsageError(f"{path}: TensorRT takes no uint8 activations; export again with --trt --precision int8")
    other_list = options.listed_classes not in (None, origin.top_k)
    if unused := options.changed(names=("images", "calibrate", *(["outputs"] if other_list else []))):
        raise UsageError(f"{path}: already {own}, so it is built as it is; leave out {unused}")


def _names(options: type[Options]) -> tuple[str, ...]:
    """Return the options that a class declares itself, without those of every export."""
    return tuple(field.name for field in fields(options) if field.name not in _COMMON)


_COMMON = tuple(field.name for field in fields(CommonOptions))
# what is made besides an ONNX file, each by the option that asks for it, and the options that only it has
DESTINATIONS: dict[str, tuple[str, ...]] = {
    "trt": _names(EngineOptions),
    "triton": _names(TritonOptions),
    "web": _names(WebOptions),
}


def check_options(
    path: Path, kind: str | None, options: ExportOptions, *, as_is: bool, is_classifier: bool = False
) -> None:
    """Raise UsageError for options that do not fit together or the kind of the file; the file is not read.

    With `as_is` an exported file is copied or served without any change; a classifier was exported by somebody else.
    """
    chosen = [name for name in DESTINATIONS if getattr(options, name) not in (None, False)]
    if len(chosen) > 1:
        flags = ", ".join(map(flag_of, chosen))
        raise UsageError(f"{flags}: give one of them; the file that one call writes is a source of the next")
    for name, own in DESTINATIONS.items():
        if name not in chosen and (changed := options.changed(names=own)):
            raise UsageError(f"{changed}: only with {flag_of(name)}; add that")
    if as_is:
        served = [*_COMMON, *chosen, *(name for destination in chosen for name in DESTINATIONS[destination])]
        if unused := options.changed(but=served):
            raise UsageError(f"{path}: used as it is; leave out {unused}")
    elif kind not in ("checkpoint", "onnx"):
        hint = "; pretrained weights go to train --weights" if path.suffix == ".safetensors" else ""
        raise UsageError(f"{path}: expected a checkpoint (.pt, .pth) or an exported .onnx file{hint}")
    if options.top_k != ExportOptions().top_k and options.outputs != "topk":
        raise UsageError("--top-k: only for --outputs topk; add that")
    if options.precision != "int8" and options.calibrate is not None:
        raise UsageError("--calibrate: only int8 is calibrated; add --precision int8")
    if options.input == "image" and (options.trt or options.triton is not None):
        raise UsageError("--input image: TensorRT and Triton take images of one size; leave it out")
    if options.triton is not None and options.precision == "bf16":
        raise UsageError("--triton: ONNX Runtime has no bfloat16 convolutions; use fp32 or fp16, or an engine")
    in_browser = options.precision in (None, "fp32") and options.input == "uint8" and options.outputs != "topk"
    if options.web is not None and not in_browser:
        raise UsageError("--web: browsers run fp32 files with uint8 input and all outputs; leave out other settings")
    if options.arch is not None and (opal := options.changed(names=("distance", "pooling", "cws"))):
        raise UsageError(f"{opal}: of OPAL's head, but --arch names another; leave it out")
    if options.slots is None and options.prototypes != ExportOptions().prototypes:
        raise UsageError("--prototypes: only with --slots DATA; add that")
    is_classifier = is_classifier or (options.arch or "").partition(":")[0] in ("timm", "torchvision")
    if options.slots is not None and not is_classifier:
        raise UsageError(
            f"{path}: --slots takes a plain classifier: an .onnx file of another tool, or a state dict with --arch "
            "timm:NET or torchvision:NET"
        )
    others = ("trt", "precision", "images", "input", "outputs")
    if is_classifier and (changed := options.changed(names=others)):
        raise UsageError(f"{path}: {changed}: a plain classifier keeps its input, precision and logits; leave it out")
    if kind == "onnx" and not is_classifier and (changed := options.changed(CheckpointOptions)):
        raise UsageError(f"{path}: {changed}: fixed in an ONNX file")


def onnx_path(source: Path, precision: Precision) -> Path:
    """Return `ckpt.onnx`, or `ckpt.fp16.onnx` for a lower precision, next to `ckpt.pt` or `ckpt.onnx`.

    Raises:
        UsageError: the name of a checkpoint ends like a precision.
    """
    if source.suffix != ONNX_SUFFIX and source.stem.endswith(_PRECISION_ENDINGS):
        raise UsageError(f"{source}: its name ends like a precision, which would name another file; rename it")
    ending = "" if precision == "fp32" else f".{precision}"
    return source.with_name(f"{source.stem}{ending}{ONNX_SUFFIX}")


def engine_name(stem: str, precision: Precision, target: EngineTarget) -> str:
    """Return `ckpt.fp16.sm80.rtx.engine` for the stem `ckpt` or `ckpt.fp16`."""
    for ending in _PRECISION_ENDINGS:
        stem = stem.removesuffix(ending)
    return f"{stem}.{precision}.{target.sm}.{SHORT_NAMES[target.builder]}{ENGINE_SUFFIX}"


@dataclass(frozen=True)
class ExportedOnnx:
    """An exported ONNX file.

    `comparison` is None where verification was skipped, or the file existed, written from the same source with the same
    options, and was kept.
    """

    path: Path
    metadata: Metadata
    comparison: Comparison | None
    kept: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return path, digest and verification for JSON."""
        metadata = self.metadata
        return {"path": str(self.path), "sha256": metadata.file_sha256, "verification": metadata.verification}


@dataclass(frozen=True)
class ExportedEngine:
    """An exported engine; `reused` where the same engine existed already."""

    path: Path
    sidecar: Sidecar
    reused: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the engine's description for JSON."""
        sidecar = self.sidecar
        return {
            "path": str(self.path),
            "sha256": sidecar.engine["sha256"],
            "bytes": sidecar.engine["bytes"],
            **{name: getattr(sidecar, name) for name in ("builder", "target", "options")},
            "seconds": sidecar.built["seconds"],
            "state": sidecar.state,
            "reused": self.reused,
        }


@dataclass(frozen=True)
class ExportResult:
    """The files of one export.

    Attributes:
        source: the file that was exported.
        onnx: ONNX files; none where engines or a repository were made from an ONNX file as it is.
        engines: engines, built from the last ONNX file or from the source.
        repository: the models for Triton; None without.
        site: the folder for browsers; None without.
    """

    source: Path
    onnx: list[ExportedOnnx]
    engines: list[ExportedEngine]
    repository: WrittenRepository | None = None
    site: WrittenSite | None = None

    @property
    def path(self) -> Path:
        """The ONNX file of the requested precision; the source where it was used as it is."""
        return self.onnx[-1].path if self.onnx else self.source

    def to_dict(self) -> dict[str, Any]:
        """Return all files for JSON."""
        document: dict[str, Any] = {
            "files": [exported.to_dict() for exported in self.onnx],
            "engines": [engine.to_dict() for engine in self.engines],
        }
        written = self.repository or self.site
        return document if written is None else {**document, **written.to_dict()}
