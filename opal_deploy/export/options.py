"""The options of exports, declared once: keywords of four functions, and options of `opal-deploy export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from opal_deploy.artifact.documents import Distance
from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.metadata import Activations, InputKind, Precision
from opal_deploy.errors import UsageError
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.options import Option, Options, StrPath, Threads, parse_size
from opal_deploy.records.decision import Decision

_ENGINES = "TensorRT engines (--trt)"
_AUTHORS = "Checkpoints of other code, which do not record these"
_WEB = "Static site for browsers (--web)"
_TRITON = "Triton model repository (--triton)"
# buffers for the largest batch stay allocated on the device and in page-locked memory
_MAX_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """How TensorRT engines are built."""

    builder: Annotated[
        Literal["tensorrt", "tensorrt-rtx"] | None,
        Option(
            "Engine builder.", default="TensorRT if it and a GPU are present, else TensorRT for RTX", panel=_ENGINES
        ),
    ] = None
    target: Annotated[
        str | Sequence[str],
        Option(
            "GPU to build for: sm75 sm80 sm86 sm89 sm120, or a name such as a100, l4, rtx4090; repeatable.",
            default="this machine's GPU, else sm80",
            panel=_ENGINES,
            cli=list[str],
        ),
    ] = ()
    batch: Annotated[int | str, Option("Batch sizes MIN:OPT:MAX, or one size.", panel=_ENGINES, cli=str)] = "1:64:256"
    lean: Annotated[bool, Option("Build for TensorRT's lean runtime, too (extra trt-lean).", panel=_ENGINES)] = False
    rebuild: Annotated[bool, Option("Build even if the same engine exists.", panel=_ENGINES)] = False

    def __post_init__(self) -> None:
        if isinstance(self.target, str):
            object.__setattr__(self, "target", (self.target,))
        super().__post_init__()
        self.to_dict()  # parses the batch

    @property
    def batch_range(self) -> BatchRange:
        """The batch sizes that the engine takes."""
        parts = str(self.batch).split(":")
        if len(parts) not in (1, 3) or not all(part.isdecimal() for part in parts):
            raise UsageError(f"--batch {self.batch!r}: expected MIN:OPT:MAX such as 1:64:256, or one number")
        sizes = [int(part) for part in (parts * 3 if len(parts) == 1 else parts)]
        if not 1 <= sizes[0] <= sizes[1] <= sizes[2] <= _MAX_BATCH:
            raise UsageError(f"--batch {self.batch!r}: expected 1 <= MIN <= OPT <= MAX <= {_MAX_BATCH}")
        return BatchRange(*sizes)

    def to_dict(self) -> dict[str, Any]:
        """Return the options that change the engine, for its sidecar."""
        batch = self.batch_range
        # without the switch the same document as ever, so that earlier engines are reused
        lean = {"lean": True} if self.lean else {}
        return {"batch": [batch.min, batch.opt, batch.max], "tf32": False, **lean}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """Options for facts that a checkpoint does not record."""

    classes: Annotated[
        StrPath | Sequence[str] | None,
        Option("File of class names, one per line.", default="those in the source", cli=Path),
    ] = None
    preprocess: Annotated[
        str | None,
        Option(
            "How photographs become the input of somebody's classifier: torchvision, timm, ultralytics, letterbox, "
            "stretch, keras-tf, keras-caffe, keras-255, raw, or a JSON file of timm or Hugging Face.",
            default="as the file says",
        ),
    ] = None
    distance: Annotated[Distance | None, Option("Distance to the anchors.", default="l2", panel=_AUTHORS)] = None
    pooling: Annotated[
        Literal["max", "avg"] | None,
        Option("Pooling of the attention maps.", default="max; avg without anchors", panel=_AUTHORS),
    ] = None
    cws: Annotated[
        bool | None,
        Option("Channel-wise softmax.", flag="--cws/--no-cws", default="on; off without anchors", panel=_AUTHORS),
    ] = None
    size: Annotated[
        int | tuple[int, int] | None,
        Option("Input size in pixels: 224, or HEIGHTxWIDTH.", default="224", panel=_AUTHORS, cli=str, parse=parse_size),
    ] = None
    arch: Annotated[
        str | None,
        Option(
            "Another network: pipnet:NET, protopnet:NET, CaBRNet's model_arch.yml; of a plain classifier timm:NET or "
            "torchvision:NET.",
            default="an OPAL network",
            panel=_AUTHORS,
        ),
    ] = None
    crop: Annotated[Literal["boxes"] | None, Option("Training images were cropped to boxes.", panel=_AUTHORS)] = None
    slots: Annotated[
        StrPath | None,
        Option(
            "Data set, as `train` takes it, whose training images divide a plain classifier's shares into slots.",
            default="regions",
            cli=Path,
        ),
    ] = None
    prototypes: Annotated[int, Option("Slots per class with --slots.", min=1)] = 5

    @property
    def input_size(self) -> tuple[int, int] | None:
        """(H0, W0) in pixels; None if not stated."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True, kw_only=True)
class CommonOptions(Options):
    """Options of every export."""

    verify: Annotated[
        bool, Option("Compare with the reference first; --no-verify is recorded.", flag="--verify/--no-verify")
    ] = True
    overwrite: Annotated[bool, Option("Replace different files or models that exist.")] = False
    threads: Threads = None
    log: Log = log_line


@dataclass(frozen=True, kw_only=True)
class OnnxOptions(CheckpointOptions, CommonOptions):
    """Options of an export to an ONNX file."""

    out: Annotated[
        StrPath | None, Option("File to write; with --trt a folder.", default="next to the source", cli=Path)
    ] = None
    precision: Annotated[
        Precision | None, Option("Precision of the body; the head stays float32.", default="fp32; fp16 with --trt")
    ] = None
    calibrate: Annotated[
        StrPath | None,
        Option("Folder of photographs that calibrate int8.", default="the model's training images", cli=Path),
    ] = None
    images: Annotated[
        StrPath | None,
        Option(
            "Folder of photographs to verify on.",
            default="the model's data set, validation images first, or generated images if it is gone",
            cli=Path,
        ),
    ] = None
    input: Annotated[
        InputKind,
        Option(
            "uint8: NHWC, normalised in the graph; image: the same, of any size, resized in the graph; float32: NCHW, "
            "already normalised."
        ),
    ] = "uint8"
    outputs: Annotated[
        Literal["attention", "topk"] | None,
        Option(
            "attention: also the attention maps [N, K, H, W]; topk: only the best classes with their evidence.",
            default="all classes and channels",
        ),
    ] = None
    top_k: Annotated[int, Option("Classes that --outputs topk lists.", min=2, max=32)] = 5
    ood_score: Annotated[
        bool,
        Option(
            "Output each image's OOD score for --unknown, if the checkpoint has it. Without it the file holds no "
            "features of training images.",
            flag="--ood-score/--no-ood-score",
        ),
    ] = True
    patches: Annotated[
        bool,
        Option(
            "Keep two patches of training images per slot, which sheets and pages show. Without it the file holds no "
            "part of a training image.",
            flag="--patches/--no-patches",
        ),
    ] = True
    progress: ProgressChoice | None = None

    @property
    def attention(self) -> bool:
        """Whether the graph outputs attention maps too."""
        return self.outputs == "attention"

    @property
    def listed_classes(self) -> int | None:
        """The number of classes that the graph lists; None where it outputs all classes and channels."""
        return self.top_k if self.outputs == "topk" else None


@dataclass(frozen=True, kw_only=True)
class EngineExportOptions(OnnxOptions, EngineOptions):
    """Options of an export to TensorRT engines."""


@dataclass(frozen=True, kw_only=True)
class TritonOptions(CommonOptions):
    """Options of a Triton model repository."""

    name: Annotated[
        str, Option("Name of the model that takes pixels; NAME_explain takes image files.", panel=_TRITON)
    ] = "opal"


@dataclass(frozen=True, kw_only=True)
class WebOptions(Decision, CommonOptions):
    """Options of a page that runs the model in a browser."""

    ort_web: Annotated[
        StrPath | None,
        Option(
            "ONNX Runtime Web: npm's package onnxruntime-web.", default="node_modules/onnxruntime-web", panel=_WEB,
            cli=Path,
        ),
    ] = None  # fmt: skip
    examples: Annotated[
        StrPath | None,
        Option(
            "Folder of pictures to try; takes six, from its subfolders in turn.", default="none",
            panel=_WEB, cli=Path,
        ),
    ] = None  # fmt: skip
    webgpu: Annotated[
        bool, Option("Also copy the WebGPU runtime (27 MB), for large models; used where it is exact.", panel=_WEB)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions(WebOptions, TritonOptions, EngineExportOptions):
    """The options of `opal-deploy export`, whose result depends on `trt`, `triton` and `web`."""

    trt: Annotated[bool, Option("Build TensorRT engines too; no GPU is needed.")] = False
    triton: Annotated[StrPath | None, Option("Write a repository of two models here.", panel=_TRITON, cli=Path)] = None
    web: Annotated[StrPath | None, Option("Write a page that runs the model in a browser.", panel=_WEB, cli=Path)] = (
        None
    )

    @property
    def int8_activations(self) -> Activations:
        """The type of the activations that int8 gets."""
        return "int8" if self.trt else "uint8"
