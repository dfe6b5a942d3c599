"""Options that several benchmarks share, and the steps between them: find images, load models, deliver measurements."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from opal_deploy.cli.console import print_json_line, print_message, progress
from opal_deploy.errors import OpalError, UsageError, require
from opal_deploy.options import parse_size

if TYPE_CHECKING:
    from opal_deploy.bench.measurement import Figure, Measurement
    from opal_deploy.bench.targets.loading import LoadedTarget, Setup
    from opal_deploy.bench.targets.networks import NamedNetwork
    from opal_deploy.bench.timing import TimingOptions
    from opal_deploy.inference.sources.items import Item


RuntimeName = Literal["eager", "compile", "onnxruntime", "tensorrt"]
PrecisionName = Literal["fp32", "tf32", "fp16", "bf16", "int8"]

Images = Annotated[list[str], typer.Argument(help="Images: folders, files, globs, or - for a list on stdin.")]
Json = Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Write the measurements to stdout, one line of JSON each.")]
Out = Annotated[Path | None, typer.Option(help="Add the measurements to this file, one line of JSON each.")]

# of what is counted and not timed
Counted = Annotated[
    list[str] | None,
    typer.Option(
        "--backbone",
        help="torchvision's name, or timm:NAME; repeatable; default: the paper's nine.",
        show_default=False,
    ),
]
_STRIDE_HELP = "Input pixels per cell of --backbone, repeatable: 32, 16, 8; default: all layers, 32."
CountedStrides = Annotated[list[int] | None, typer.Option("--stride", min=1, help=_STRIDE_HELP, show_default=False)]
_KEEP_LAYERS_HELP = "Keep all layers at each --stride, as in `train`."
CountedKeepLayers = Annotated[bool, typer.Option("--keep-layers", help=_KEEP_LAYERS_HELP)]
CountedPrototypes = Annotated[int, typer.Option("--prototypes", min=1, help="m, prototypes per class.")]
CountedSize = Annotated[str, typer.Option("--size", help="Input in pixels: 224, or height x width.")]
ChartFile = Annotated[Path | None, typer.Option("--chart", help="Draw it: a name that ends in .svg or .png.")]

_MODEL_PANEL, _TIMING_PANEL = "What is timed", "How"
Models = Annotated[
    list[Path] | None,
    typer.Option("--model", help="A checkpoint, an ONNX file or an engine; repeatable.", rich_help_panel=_MODEL_PANEL),
]
Backbones = Annotated[
    list[str] | None,
    typer.Option(
        "--backbone", help="torchvision's name, or timm:NAME; random weights; repeatable.", rich_help_panel=_MODEL_PANEL
    ),
]
Strides = Annotated[
    list[int] | None,
    typer.Option("--stride", min=1, help=_STRIDE_HELP, show_default=False, rich_help_panel=_MODEL_PANEL),
]
KeepLayers = Annotated[bool, typer.Option("--keep-layers", help=_KEEP_LAYERS_HELP, rich_help_panel=_MODEL_PANEL)]
HeadName = Literal["opal", "linear", "plain"]
Head = Annotated[
    HeadName,
    typer.Option(
        help="On --backbone. `linear` normalises its features to length 1, `plain` is the network's own classifier.",
        rich_help_panel=_MODEL_PANEL,
    ),
]
Classes = Annotated[int, typer.Option(min=2, help="C of --backbone.", rich_help_panel=_MODEL_PANEL)]
Prototypes = Annotated[int, typer.Option(min=1, help="m of --backbone.", rich_help_panel=_MODEL_PANEL)]
Size = Annotated[str, typer.Option(help="Input of --backbone: 224, or height x width.", rich_help_panel=_MODEL_PANEL)]
Runtimes = Annotated[
    list[str] | None,
    typer.Option(
        "--runtime",
        help="Runtime of checkpoints and --backbone: onnxruntime (default), eager, compile, tensorrt; repeatable.",
        rich_help_panel=_TIMING_PANEL,
    ),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        help="Precision of checkpoints and --backbone: fp32 (default), tf32, fp16, bf16, int8; repeatable.",
        rich_help_panel=_TIMING_PANEL,
    ),
]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="PyTorch's convolutions as NHWC.", rich_help_panel=_TIMING_PANEL)
]
OrtOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--ort-option",
        metavar="NAME=VALUE",
        help="ONNX Runtime on a GPU: prefer_nhwc, fuse_conv_bias, enable_cuda_graph (0 or 1), cudnn_conv_algo_search; "
        "repeatable.",
        rich_help_panel=_TIMING_PANEL,
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs",
        help="Engines, and compile on a GPU: replay a batch's kernels as a CUDA graph.",
        rich_help_panel=_TIMING_PANEL,
    ),
]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N.", rich_help_panel=_TIMING_PANEL)]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="On the CPU; default: all that the process may use.", rich_help_panel=_TIMING_PANEL),
]
Batches = Annotated[
    list[str] | None,
    typer.Option("--batch", help="Images a call; repeatable, or as 1,2,4.", rich_help_panel=_TIMING_PANEL),
]
Buffers = Annotated[
    int, typer.Option(min=1, help="Batches of noise that calls rotate over.", rich_help_panel=_TIMING_PANEL)
]
Warmup = Annotated[
    float, typer.Option(min=0, help="Least seconds of calls that are thrown away.", rich_help_panel=_TIMING_PANEL)
]
Seconds = Annotated[float, typer.Option(min=0, help="Least length of a repeat.", rich_help_panel=_TIMING_PANEL)]
Iterations = Annotated[int, typer.Option(min=1, help="Least calls of a repeat.", rich_help_panel=_TIMING_PANEL)]
Repeats = Annotated[int, typer.Option(min=1, help="The spread is between them.", rich_help_panel=_TIMING_PANEL)]


def find_items(images: list[str], limit: int) -> list[Item]:
    """Return at most `limit` images that the command line names.

    Raises:
        UsageError: there are none.
    """
    from opal_deploy.inference.sources.discovery import check_inputs, discover
    from opal_deploy.inference.sources.items import Skipped

    check_inputs(images)
    items = list(itertools.islice(discover(images, Skipped(), sys.stdin), limit))
    if not items:
        raise UsageError("no images found")
    return items


def write_measurement(measurement: Measurement, out: Path | None, *, as_json: bool) -> None:
    """Append a measurement to the file `out`, and print it to stdout with `as_json`."""
    from opal_deploy.bench.measurement import append_measurement

    if out is not None:
        append_measurement(out, measurement)
    if as_json:
        print_json_line(measurement.to_line())


def deliver(
    measurements: Iterable[Measurement],
    format_measurement: Callable[[Measurement], str],
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Write each measurement as soon as it is taken, so that it survives a failure of the next, and print its text."""
    for measurement in measurements:
        write_measurement(measurement, out, as_json=as_json)
        print_message(format_measurement(measurement))


@contextmanager
def report_repeats(timing: TimingOptions, batches: int) -> Iterator[TimingOptions]:
    """Show the progress over the repeats of so many batch sizes while the block times them with the options yielded."""
    with progress("repeats") as advance:
        done = itertools.count(1)
        yield replace(timing, report=lambda: advance(next(done), timing.repeats * batches))


def format_spread(figure: Figure) -> str:
    """Return ` (spread 1.2% over 3)`; empty without repeats."""
    return "" if figure.spread is None else f" (spread {figure.spread:.1%} over {len(figure.repeats)})"


def build_setups(
    runtimes: Sequence[str] | None,
    precisions: Sequence[str] | None,
    *,
    channels_last: bool,
    device: str,
    threads: int | None,
    ort_options: Sequence[str] | None = None,
    cuda_graphs: bool = False,
) -> list[Setup]:
    """Return every runtime with every precision; an option applies to the runtimes that have it if there are any.

    Raises:
        UsageError: no such runtime, precision or option.
    """
    from opal_deploy.bench.targets.loading import PYTORCH_RUNTIMES, RECORDED, Setup
    from opal_deploy.runtime.cuda_options import CudaOptions, parse_cuda_options

    names = [_check_choice("--runtime", text, get_args(RuntimeName)) for text in runtimes or ("onnxruntime",)]
    for text in precisions or ():
        _check_choice("--precision", text, get_args(PrecisionName))
    cuda_options = parse_cuda_options(ort_options or ())

    def applies(runtime: str, *having: str) -> bool:
        return runtime in having or not any(name in having for name in names)

    return [
        Setup(
            cast(RuntimeName, runtime),
            device,
            threads,
            precision,
            channels_last and applies(runtime, *PYTORCH_RUNTIMES),
            cuda_options if applies(runtime, "onnxruntime") else CudaOptions(),
            cuda_graphs and applies(runtime, *RECORDED),
        )
        for runtime in names
        for precision in precisions or (None,)
    ]


def parse_batches(texts: list[str] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Parse `["1,2", "8"]` to (1, 2, 8), each once, ascending.

    Raises:
        UsageError: not positive whole numbers.
    """
    parts = [part.strip() for text in texts or () for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise UsageError(f"--batch {part!r}: expected whole numbers from 1, such as 8 or 1,2,4,8")
    return tuple(sorted({int(part) for part in parts})) or default


def build_random_networks(
    backbones: list[str] | None,
    strides: list[int] | None,
    keep_layers: bool,
    head: HeadName,
    classes: int,
    prototypes: int,
    size: str,
) -> Iterator[NamedNetwork]:
    """Return the networks of `--backbone`, each built when it is due, since all may not fit into memory together.

    Args:
        backbones: names; None or empty for no network.
        strides: input pixels per cell, at which every backbone is cut; None or empty keeps all layers.
        keep_layers: keep all layers at each stride.
        head: of every network.
        classes: C.
        prototypes: m.
        size: input in pixels, as text: `224`, `224x160`.

    Raises:
        UsageError: no such backbone, none of this stride, layers that cannot be kept, or not a size; raised by the
            call, before anything is measured.
        MissingExtra: no torch.
    """
    if not backbones:
        return iter(())
    require("torch", "export", "timing a backbone")
    require("torchvision", "export", "timing a backbone")
    from opal_deploy.bench.targets.networks import build_random_network
    from opal_deploy.model import backbones as model_backbones

    pixels = parse_size(size)
    variants = model_backbones.list_variants(backbones, strides or (None,), keep_layers)
    for name, stride, keep in variants:
        model_backbones.build(name, stride=stride, keep_layers=keep, device="meta").grid(pixels)
        if head == "plain":
            model_backbones.build_classifier(name, classes, stride=stride, keep_layers=keep, device="meta")
    return (
        build_random_network(
            name, stride=stride, keep_layers=keep, head=head, num_classes=classes, prototypes=prototypes, size=pixels
        )
        for name, stride, keep in variants
    )


def load_targets(
    models: list[Path] | None, networks: Iterator[NamedNetwork], setups: Sequence[Setup]
) -> Iterator[LoadedTarget]:
    """Load every model in every setup, each when it is due; print those that cannot run here, and go on.

    ONNX files and engines have a runtime and a precision of their own and are loaded once.

    Args:
        models: files.
        networks: those of `--backbone`.
        setups: of checkpoints and networks; files take device, threads and precision of the first.

    Raises:
        UsageError: there is no model.
        OpalError: no model can run here; the error of the last one.
    """
    unusable: list[tuple[str, OpalError]] = []
    any_loaded = False
    for name, load in _loaders(models, networks, setups):
        try:
            loaded = load()
        except OpalError as error:
            unusable.append((name, error))
            continue
        any_loaded = True
        _print_unusable(unusable)
        print_message(loaded.title)
        yield loaded
    if any_loaded:
        _print_unusable(unusable)
    elif unusable:
        _, last = unusable.pop()
        _print_unusable(unusable)
        raise last
    else:
        raise UsageError("nothing to time: give --model FILE or --backbone NAME (both repeatable)")


def _loaders(
    models: list[Path] | None, networks: Iterator[NamedNetwork], setups: Sequence[Setup]
) -> Iterator[tuple[str, Callable[[], LoadedTarget]]]:
    from opal_deploy.artifact.files import model_kind
    from opal_deploy.bench.targets.loading import load_file, load_network

    for path in models or ():
        for setup in setups if model_kind(path) == "checkpoint" else setups[:1]:
            yield _loader_name(path.name, setup), partial(load_file, path, setup)
    for network in networks:
        for setup in setups:
            yield _loader_name(network.name, setup), partial(load_network, network, setup)


def _loader_name(name: str, setup: Setup) -> str:
    return f"{name} in {setup.runtime}, {setup.precision or 'fp32'}"


def _print_unusable(unusable: list[tuple[str, OpalError]]) -> None:
    for name, error in unusable:
        print_message(f"{name}: not usable: {error}")
    unusable.clear()


def _check_choice(option: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise UsageError(f"{option} {text!r}: expected one of {', '.join(choices)}")
    return text
