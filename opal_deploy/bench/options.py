"""The options of the benchmarks, each declared once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from opal_deploy.model.config import HeadKind
from opal_deploy.options import Decode, Device, Option, Options, RuntimeChoice, Threads, Workers, parse_size

Runtime = Literal["eager", "compile", "onnxruntime", "tensorrt"]
Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]

_model, _timing = partial(Option, panel="Model"), partial(Option, panel="Timing")
_HEAD = "Head of --backbone: opal, linear (the paper's), or plain (the network's own classifier); repeatable."
_RUNTIME = "Runtime of checkpoints and --backbone: onnxruntime, eager, compile, tensorrt; repeatable."
_PRECISION = "Precision of checkpoints and --backbone: fp32, tf32, fp16, bf16; repeatable."


def _parse_batches(text: str) -> tuple[int, ...]:
    """Parse `1,2,4` to different numbers in ascending order; ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1e6 for part in parts):
        raise ValueError("expected positive integers such as 8 or 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


Batches = Annotated[tuple[int, ...], _timing("Batch sizes, such as 8 or 1,2,4.", cli=str, parse=_parse_batches)]
Seconds = Annotated[float, _timing("Minimum length of a repeat in seconds.", min=0)]
Iterations = Annotated[int, _timing("Minimum calls per repeat.", min=1)]
Repeats = Annotated[int, _timing("Repeats; their spread is reported.", min=1)]


@dataclass(frozen=True, kw_only=True)
class OutputOptions(Options):
    """Where the measurements go."""

    out: Annotated[Path | None, Option("Append the measurements to this file as JSON lines.")] = None
    as_json: Annotated[bool, Option("Write the measurements to stdout as JSON lines.", flag="--json")] = False


@dataclass(frozen=True, kw_only=True)
class BackboneOptions(OutputOptions):
    """The networks to build from backbones, and their head and input."""

    backbone: Annotated[
        tuple[str, ...], _model("torchvision's name, or timm:NAME; random weights; repeatable.", cli=list[str])
    ] = ()
    prototypes: Annotated[int, _model("Prototypes per class of --backbone, m.", min=1)] = 5
    size: Annotated[
        tuple[int, int] | None,
        _model("Input of --backbone: pixels, or height x width.", cli=str, parse=parse_size, default="224"),
    ] = None
    stride: Annotated[
        tuple[int, ...],
        _model("Input pixels per cell of --backbone: 32, 16 or 8; repeatable.", cli=list[int], min=1, default="all"),
    ] = ()
    keep_layers: Annotated[bool, _model("Keep all layers at each --stride, as in `train`.")] = False

    @property
    def input_size(self) -> tuple[int, int]:
        """(H0, W0) in pixels."""
        return self.size or (224, 224)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(BackboneOptions):
    """The options of `bench latency`."""

    model: Annotated[tuple[Path, ...], _model("Checkpoint, ONNX file or engine; repeatable.", cli=list[Path])] = ()
    classes: Annotated[int, _model("Classes of --backbone, C.", min=2)] = 200
    head: Annotated[tuple[HeadKind, ...], _model(_HEAD, cli=list[str], default="opal")] = ()
    device: Device = "auto"
    threads: Threads = None
    runtime: Annotated[tuple[Runtime, ...], _timing(_RUNTIME, cli=list[str], default="onnxruntime")] = ()
    precision: Annotated[tuple[Precision, ...], _timing(_PRECISION, cli=list[str], default="fp32")] = ()
    cuda_graphs: Annotated[bool, _timing("Replay kernels as CUDA graphs (engines, and compile on a GPU).")] = False
    batch: Batches = (1,)
    warmup: Annotated[float, _timing("Minimum warm-up in seconds.", min=0)] = 1.0
    buffers: Annotated[int, _timing("Number of random batches, used in turn.", min=1)] = 4
    seconds: Seconds = 3.0
    iterations: Iterations = 10
    repeats: Repeats = 3


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(SweepOptions):
    """The options of `bench throughput`."""

    batch: Batches = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SweepOptions):
    """The options of `bench compare`."""

    seconds: Seconds = 0.3
    iterations: Iterations = 1
    repeats: Repeats = 30


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(OutputOptions):
    """The options of `bench pipeline`."""

    device: Device = "auto"
    threads: Threads = None
    limit: Annotated[int, Option("Maximum number of images.", min=1)] = 256
    batch: Annotated[int, Option("Batch size.", min=1)] = 8
    workers: Workers = None
    explain: Annotated[bool, Option("Also time `infer --explain`.", flag="--explain/--no-explain")] = True
    decode: Decode = "default"
    isolate: Annotated[bool, Option("Decode in processes, as infer does.", flag="--isolate/--no-isolate")] = True
    runtime: RuntimeChoice = "auto"
    cuda_graphs: Annotated[bool, Option("Replay kernels as CUDA graphs, as in infer.")] = False
    repeats: Annotated[int, Option("Passes over the images.", min=1)] = 5


@dataclass(frozen=True, kw_only=True)
class OverheadOptions(BackboneOptions):
    """The options of `bench overhead`."""

    backbone: Annotated[
        tuple[str, ...],
        _model("torchvision's name, or timm:NAME; repeatable.", cli=list[str], default="the paper's nine"),
    ] = ()
    classes: Annotated[
        tuple[int, ...], _model("Classes, C; repeatable.", cli=list[int], min=2, default="the paper's data sets")
    ] = ()
    check: Annotated[bool, Option("Compare with the paper's figures; exit with 4 on a difference.")] = False
