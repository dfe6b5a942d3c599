"""The options of the benchmarks, each declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from opal_deploy.errors import UsageError
from opal_deploy.options import Decode, Device, Option, Options, RuntimeChoice, Threads, Workers, parse_size

Runtime = Literal["eager", "compile", "onnxruntime", "tensorrt"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]
Question = Literal["head", "runtime", "precision"]
Size = tuple[int, int]

_MODEL, _TIMING = "Model", "Timing"


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """Parse `1,2,4` to different numbers in ascending order.

    Raises:
        UsageError: not positive integers separated by commas.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1e6 for part in parts):
        raise UsageError(f"{option} {text!r}: expected positive integers such as 8 or 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


# options of several benchmarks
Batches = Annotated[
    tuple[int, ...],
    Option("Batch sizes, such as 8 or 1,2,4.", cli=str, parse=partial(parse_counts, "--batch"), panel=_TIMING),
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """Where the measurements go."""

    out: Annotated[Path | None, Option("Append the measurements to this file as JSON lines.")] = None
    as_json: Annotated[bool, Option("Write the measurements to stdout as JSON lines.", flag="--json")] = False


@dataclass(frozen=True, kw_only=True)
class BackboneOptions(OutputOptions):
    """The networks to build from backbones, and their head and input."""

    backbone: Annotated[
        tuple[str, ...],
        Option("torchvision's name, or timm:NAME; random weights; repeatable.", cli=list[str], panel=_MODEL),
    ] = ()
    prototypes: Annotated[int, Option("Prototypes per class of --backbone, m.", min=1, panel=_MODEL)] = 5
    size: Annotated[
        Size | None,
        Option(
            "Input of --backbone: pixels, or height x width.", cli=str, parse=parse_size, default="224", panel=_MODEL
        ),
    ] = None

    @property
    def input_size(self) -> Size:
        """(H0, W0) in pixels."""
        return self.size or (224, 224)


@dataclass(frozen=True, kw_only=True)
class StrideOptions(Options):
    """The strides at which backbones are cut."""

    stride: Annotated[
        tuple[int, ...],
        Option(
            "Input pixels per cell of --backbone: 32, 16 or 8; repeatable.",
            cli=list[int],
            min=1,
            default="the whole network",
            panel=_MODEL,
        ),
    ] = ()
    keep_layers: Annotated[bool, Option("Keep all layers at each --stride, as in `train`.", panel=_MODEL)] = False


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Options):
    """The device that runs the model."""

    device: Device = "auto"
    threads: Threads = None


@dataclass(frozen=True, kw_only=True)
class WarmUpOptions(Options):
    """The calls before the timed ones, and the inputs of all."""

    warmup: Annotated[float, Option("Minimum warm-up in seconds.", min=0, panel=_TIMING)] = 1.0
    buffers: Annotated[int, Option("Number of random batches, used in turn.", min=1, panel=_TIMING)] = 4


@dataclass(frozen=True, kw_only=True)
class TimingOptions(WarmUpOptions):
    """The length and number of the repeats; `on_repeat` is called after each."""

    seconds: Annotated[float, Option("Minimum length of a repeat in seconds.", min=0, panel=_TIMING)] = 3.0
    iterations: Annotated[int, Option("Minimum calls per repeat.", min=1, panel=_TIMING)] = 10
    repeats: Annotated[int, Option("Repeats; their spread is reported.", min=1, panel=_TIMING)] = 3
    on_repeat: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DeviceOptions, StrideOptions, BackboneOptions):
    """The models to time, and how they run: shared by `latency`, `throughput` and `compare`."""

    model: Annotated[
        tuple[Path, ...], Option("Checkpoint, ONNX file or engine; repeatable.", cli=list[Path], panel=_MODEL)
    ] = ()
    classes: Annotated[int, Option("Classes of --backbone, C.", min=2, panel=_MODEL)] = 200
    channels_last: Annotated[bool, Option("Run PyTorch's convolutions as NHWC.", panel=_TIMING)] = False
    ort_option: Annotated[
        tuple[str, ...],
        Option(
            "NAME=VALUE for ONNX Runtime on a GPU: prefer_nhwc, enable_cuda_graph (0 or 1), "
            "cudnn_conv_algo_search; repeatable.",
            cli=list[str],
            panel=_TIMING,
        ),
    ] = ()
    cuda_graphs: Annotated[
        bool, Option("Replay kernels as CUDA graphs (engines, and compile on a GPU).", panel=_TIMING)
    ] = False
    batch: Batches = (1,)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TimingOptions, ModelOptions):
    """The options of `bench latency` and `bench throughput`."""

    head: Annotated[
        Literal["opal", "linear", "plain"],
        Option(
            "Head of --backbone: opal, the paper's linear head (unit-length features), or the network's own "
            "classifier (plain).",
            panel=_MODEL,
        ),
    ] = "opal"
    runtime: Annotated[
        tuple[Runtime, ...],
        Option(
            "Runtime of checkpoints and --backbone: onnxruntime, eager, compile, tensorrt; repeatable.",
            cli=list[str],
            default="onnxruntime",
            panel=_TIMING,
        ),
    ] = ()
    precision: Annotated[
        tuple[Precision, ...],
        Option(
            "Precision of checkpoints and --backbone: fp32, tf32, fp16, bf16, int8; repeatable.",
            cli=list[str],
            default="fp32",
            panel=_TIMING,
        ),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(SweepOptions):
    """The options of `bench latency`."""

    profile: Annotated[
        bool, Option("Also time every node of an ONNX file or layer of an engine; sums for backbone and head.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(SweepOptions):
    """The options of `bench throughput`."""

    batch: Batches = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(WarmUpOptions, ModelOptions):
    """The options of `bench compare`."""

    question: Annotated[
        Question | None, Option("Compare variants of --backbone or --model: heads, runtimes or precisions.")
    ] = None
    runtime: Annotated[Runtime, Option("Runtime of checkpoints and --backbone.", panel=_TIMING)] = "onnxruntime"
    precision: Annotated[
        Precision | None, Option("Precision of checkpoints and --backbone.", default="fp32", panel=_TIMING)
    ] = None
    pairs: Annotated[int, Option("Rounds in which each model runs once.", min=1, panel=_TIMING)] = 30
    seconds: Annotated[float, Option("Minimum length of each run in seconds.", min=0, panel=_TIMING)] = 0.3


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(DeviceOptions, OutputOptions):
    """The options of `bench pipeline`."""

    limit: Annotated[int, Option("Maximum number of images.", min=1)] = 256
    batch: Annotated[int, Option("Batch size.", min=1)] = 8
    workers: Workers = None
    network: Annotated[bool, Option("Run the network, or replay its outputs.", flag="--network/--no-network")] = True
    explain: Annotated[bool, Option("Also time `infer --explain`.", flag="--explain/--no-explain")] = True
    decode: Decode = "default"
    isolate: Annotated[
        bool, Option("Decode in processes, as infer does, or in threads.", flag="--isolate/--no-isolate")
    ] = True
    runtime: RuntimeChoice = "auto"
    cuda_graphs: Annotated[bool, Option("Replay kernels as CUDA graphs, as in infer.")] = False
    repeats: Annotated[int, Option("Passes over the images.", min=1)] = 5


@dataclass(frozen=True, kw_only=True)
class OverheadOptions(StrideOptions, BackboneOptions):
    """The options of `bench overhead`."""

    backbone: Annotated[
        tuple[str, ...],
        Option(
            "torchvision's name, or timm:NAME; repeatable.", cli=list[str], default="the paper's nine", panel=_MODEL
        ),
    ] = ()
    classes: Annotated[
        tuple[int, ...],
        Option("Classes, C; repeatable.", cli=list[int], min=2, default="those of the paper's data sets", panel=_MODEL),
    ] = ()
    check: Annotated[bool, Option("Compare with every figure that the paper prints; exit with 4 on a difference.")] = (
        False
    )
    table: Annotated[Literal["text", "markdown"], Option("Format of the table on stdout.", flag="--format")] = "text"
