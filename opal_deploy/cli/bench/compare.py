"""`opal-deploy bench compare`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.bench.options import (
    Backbones,
    Batches,
    Buffers,
    ChannelsLast,
    Classes,
    DeviceName,
    JsonLines,
    Models,
    Out,
    PrecisionName,
    Prototypes,
    RuntimeName,
    Size,
    Threads,
    Warmup,
    build_random_networks,
    parse_batches,
    write_measurement,
)
from opal_deploy.cli.console import print_message, progress
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.bench.compare import Comparison
    from opal_deploy.bench.measurement import Measurement
    from opal_deploy.bench.targets.loading import Setup


def compare(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[A B]...", help="Models; A is what the others are compared with.")
    ] = None,
    question: Annotated[
        Literal["head", "runtime", "precision"] | None,
        typer.Option(help="Ready-made, of --backbone or --model: the head's cost; runtimes; precisions."),
    ] = None,
    model: Models = None,
    backbone: Backbones = None,
    classes: Classes = 200,
    prototypes: Prototypes = 5,
    size: Size = "224",
    runtime: Annotated[RuntimeName, typer.Option(help="Of checkpoints and --backbone.")] = "onnxruntime",
    precision: Annotated[PrecisionName | None, typer.Option(help="Of checkpoints and --backbone.")] = None,
    channels_last: ChannelsLast = False,
    device: DeviceName = "auto",
    threads: Threads = None,
    batch: Batches = None,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds in which each runs once.")] = 30,
    seconds: Annotated[float, typer.Option(min=0, help="Least length of each turn.")] = 0.3,
    buffers: Buffers = 4,
    warmup: Warmup = 1.0,
    out: Out = None,
    as_json: JsonLines = False,
) -> None:
    """Which is faster, and by how much: in turns, ratio a round, median with its 95 % interval.

    Two models, or one of the questions. In each round every contender runs once, A B in even rounds and B A in odd
    ones, so that a machine that drifts favours nobody.
    """
    from opal_deploy.bench.compare import ComparisonOptions, measure_comparison
    from opal_deploy.bench.targets.loading import Setup

    setup = Setup(runtime, device, threads, precision, channels_last)
    if question is None:
        if model or backbone:
            raise UsageError("--model and --backbone are for --question head, runtime or precision; name A and B alone")
        contests = _of_files(files or [], setup)
    else:
        if files:
            raise UsageError(f"{files[0]}: --question takes --model and --backbone, not files alone")
        require("torch", "export", "bench compare --question")
        from opal_deploy.bench.compare import build_comparisons
        from opal_deploy.bench.targets.networks import load_checkpoint_network

        if not model and not backbone:
            raise UsageError(f"--question {question}: of what? give --backbone NAME or --model CHECKPOINT")
        networks = chain(
            (load_checkpoint_network(path) for path in model or ()),
            build_random_networks(backbone, "opal", classes, prototypes, size),
        )
        sizes = parse_batches(batch, (1,))
        contests = build_comparisons(question, networks, setup, sizes[0], print_message)
    for contest in contests:
        for line in contest.unusable:
            print_message(line)
        for number in parse_batches(batch, (1,)):
            plan = ComparisonOptions(number, pairs, seconds, warmup, buffers)
            with progress("rounds") as advance:
                found = measure_comparison(contest, plan, question, advance=advance)
            for measurement in found:
                write_measurement(measurement, out, as_json=as_json)
                _tell(measurement, contest)


def _of_files(files: list[Path], setup: Setup) -> Iterator[Comparison]:
    from opal_deploy.bench.compare import Comparison
    from opal_deploy.bench.targets.loading import load_file

    if len(files) < 2:
        raise UsageError("nothing to compare: give two models, A and B, or --question head, runtime or precision")
    yield Comparison(files[0].name, tuple(load_file(path, setup) for path in files))


def _tell(found: Measurement, contest: Comparison) -> None:
    ratio, rate = found.figures["ratio"], found.figures["images_per_second"]
    low, high = ratio.interval or (ratio.value, ratio.value)
    of = found.target
    name = f"{of.name} ({of.runtime}, {of.precision})" if of is not None else ""
    print_message(
        f"{name}: {ratio.value:.4f} of {contest.reference}'s throughput, 95 % interval {low:.4f} to {high:.4f}; "
        f"{rate.value:.2f} against {found.figures['reference_images_per_second'].value:.2f} images/s, "
        f"batch {found.case['batch']}, {len(ratio.repeats)} rounds"
    )
    for mark in found.marks:
        print_message(f"  {mark}")
