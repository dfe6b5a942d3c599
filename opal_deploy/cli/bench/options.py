"""Options and inputs that several benchmarks read alike.

Options that say what is timed and in what, for `latency`, `throughput` and `compare`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from opal_deploy.cli.console import print_json_line, print_message
from opal_deploy.cli.options import parse_size
from opal_deploy.errors import OpalError, UsageError, require

if TYPE_CHECKING:
    from opal_deploy.bench.measurement import Measurement
    from opal_deploy.bench.targets.loading import LoadedTarget, Setup
    from opal_deploy.bench.targets.networks import NamedNetwork
    from opal_deploy.inference.sources.items import Item


Images = Annotated[list[str], typer.Argument(help="Photographs: folders, files, globs, or - for a list on stdin.")]
Json = Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Write the measurements to stdout, one line of JSON each.")]
Out = Annotated[Path | None, typer.Option(help="Add the measurements to this file, one line of JSON each.")]


def write_measurement(measurement: Measurement, out: Path | None, *, as_json: bool) -> None:
    """Hand one measurement on as soon as there is one: what was measured survives whatever stops the next."""
    from opal_deploy.bench.measurement import append_measurement

    if out is not None:
        append_measurement(out, measurement)
    if as_json:
        print_json_line(measurement.to_line())


def find_items(images: list[str], limit: int) -> list[Item]:
    """At most `limit` pictures of what the command line names.

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


_WHAT, _HOW = "What is timed", "How"

Models = Annotated[
    list[Path] | None,
    typer.Option("--model", help="A checkpoint, an ONNX file or an engine; repeatable.", rich_help_panel=_WHAT),
]
Backbones = Annotated[
    list[str] | None,
    typer.Option("--backbone", help="torchvision's name; random weights; repeatable.", rich_help_panel=_WHAT),
]
Head = Annotated[Literal["opal", "linear"], typer.Option(help="On --backbone.", rich_help_panel=_WHAT)]
Classes = Annotated[int, typer.Option(min=2, help="C of --backbone.", rich_help_panel=_WHAT)]
Prototypes = Annotated[int, typer.Option(min=1, help="m of --backbone.", rich_help_panel=_WHAT)]
Size = Annotated[str, typer.Option(help="Input of --backbone: 224, or height x width.", rich_help_panel=_WHAT)]
RuntimeName = Literal["eager", "compile", "onnxruntime", "tensorrt"]
Runtimes = Annotated[
    list[str] | None,
    typer.Option(
        "--runtime",
        help="Of checkpoints and --backbone: onnxruntime (default), eager, compile, tensorrt; repeatable.",
        rich_help_panel=_HOW,
    ),
]
PrecisionName = Literal["fp32", "tf32", "fp16", "bf16", "int8"]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        help="Of checkpoints and --backbone: fp32 (default), tf32, fp16, bf16, int8; repeatable.",
        rich_help_panel=_HOW,
    ),
]
ChannelsLast = Annotated[
    bool, typer.Option("--channels-last", help="PyTorch's convolutions as NHWC.", rich_help_panel=_HOW)
]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N.", rich_help_panel=_HOW)]
Threads = Annotated[
    int | None, typer.Option(min=1, help="On the CPU; default: all that the process may use.", rich_help_panel=_HOW)
]
Batches = Annotated[
    list[str] | None,
    typer.Option("--batch", help="Images a call; repeatable, or as 1,2,4.", rich_help_panel=_HOW),
]
Buffers = Annotated[int, typer.Option(min=1, help="Batches of noise that calls rotate over.", rich_help_panel=_HOW)]
Warmup = Annotated[
    float, typer.Option(min=0, help="Least seconds of calls that are thrown away.", rich_help_panel=_HOW)
]
Seconds = Annotated[float, typer.Option(min=0, help="Least length of a repeat.", rich_help_panel=_HOW)]
Iterations = Annotated[int, typer.Option(min=1, help="Least calls of a repeat.", rich_help_panel=_HOW)]
Repeats = Annotated[int, typer.Option(min=1, help="The spread is between them.", rich_help_panel=_HOW)]


def build_setups(
    runtimes: Sequence[str] | None,
    precisions: Sequence[str] | None,
    *,
    channels_last: bool,
    device: str,
    threads: int | None,
) -> list[Setup]:
    """Every runtime with every precision; `--channels-last` concerns PyTorch alone, where others are asked for too.

    Raises:
        UsageError: no such runtime or precision.
    """
    from opal_deploy.bench.targets.loading import PYTORCH, Setup

    wanted = [_check_choice("--runtime", text, get_args(RuntimeName)) for text in runtimes or ("onnxruntime",)]
    for text in precisions or ():
        _check_choice("--precision", text, get_args(PrecisionName))
    mixed = any(runtime in PYTORCH for runtime in wanted)
    return [
        Setup(
            cast(RuntimeName, runtime), device, threads, precision, channels_last and (runtime in PYTORCH or not mixed)
        )
        for runtime in wanted
        for precision in precisions or (None,)
    ]


def parse_batches(texts: list[str] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """`["1,2", "8"]` to (1, 2, 8), each once, ascending.

    Raises:
        UsageError: not positive whole numbers.
    """
    parts = [part.strip() for text in texts or () for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise UsageError(f"--batch {part!r}: expected whole numbers from 1, such as 8 or 1,2,4,8")
    return tuple(sorted({int(part) for part in parts})) or default


def build_random_networks(
    backbones: list[str] | None, head: Literal["opal", "linear"], classes: int, prototypes: int, size: str
) -> Iterator[NamedNetwork]:
    """The networks of `--backbone`, each made when its turn comes: nine of them need not fit into memory together.

    Raises:
        UsageError: no such backbone, or a size that is none: at the call, before anything is measured. MissingExtra:
        no torch.
    """
    if not backbones:
        return iter(())
    require("torch", "export", "timing a backbone")
    require("torchvision", "export", "timing a backbone")
    from opal_deploy.bench.targets.networks import build_random_network
    from opal_deploy.model.backbones import build_torchvision_model

    pixels = parse_size(size)
    for name in backbones:
        build_torchvision_model(name, "meta")
    return (
        build_random_network(name, head=head, num_classes=classes, prototypes=prototypes, size=pixels)
        for name in backbones
    )


def load_targets(
    models: list[Path] | None, networks: Iterator[NamedNetwork], setups: Sequence[Setup]
) -> Iterator[LoadedTarget]:
    """Every model in every setup, each opened when its turn comes; what cannot run here is named and passed over.

    ONNX files and engines have a runtime and a precision of their own: they come once.

    Args:
        models: files.
        networks: those of `--backbone`.
        setups: of checkpoints and networks; the first one's device, threads and precision are the files' too.

    Raises:
        UsageError: there is nothing to time, or nothing can run here; it says why the last one cannot.
    """
    refused: list[tuple[str, OpalError]] = []
    opened_any = False
    for name, open_it in _loaders(models, networks, setups):
        try:
            opened = open_it()
        except OpalError as error:
            refused.append((name, error))
            continue
        opened_any = True
        _print_unusable(refused)
        print_message(opened.title)
        yield opened
    if opened_any:
        _print_unusable(refused)
    elif refused:
        _, last = refused.pop()
        _print_unusable(refused)
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


def _print_unusable(refused: list[tuple[str, OpalError]]) -> None:
    for name, error in refused:
        print_message(f"{name}: not usable: {error}")
    refused.clear()


def _check_choice(option: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise UsageError(f"{option} {text!r}: expected one of {', '.join(known)}")
    return text
