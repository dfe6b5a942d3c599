"""`opal-deploy bench compare`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.bench import options
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
    model: options.Models = None,
    backbone: options.Backbones = None,
    stride: options.Strides = None,
    keep_layers: options.KeepLayers = False,
    classes: options.Classes = 200,
    prototypes: options.Prototypes = 5,
    size: options.Size = "224",
    runtime: Annotated[options.RuntimeName, typer.Option(help="For checkpoints and --backbone.")] = "onnxruntime",
    precision: Annotated[options.PrecisionName | None, typer.Option(help="For checkpoints and --backbone.")] = None,
    channels_last: options.ChannelsLast = False,
    ort_option: options.OrtOptions = None,
    cuda_graphs: options.CudaGraphs = False,
    device: options.DeviceName = "auto",
    threads: options.Threads = None,
    batch: options.Batches = None,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds in which each runs once.")] = 30,
    seconds: Annotated[float, typer.Option(min=0, help="Least length of each run.")] = 0.3,
    buffers: options.Buffers = 4,
    warmup: options.Warmup = 1.0,
    out: options.Out = None,
    as_json: options.JsonLines = False,
) -> None:
    """Compare speed in interleaved rounds: a ratio a round, their median with its 95 % interval.

    Give two models, or one of the questions. In each round every model runs once, A B in even rounds and B A in odd
    ones, so that a machine that drifts favours none.
    """
    from opal_deploy.bench.compare import ComparisonOptions, build_comparisons, measure_comparison
    from opal_deploy.bench.targets.loading import Setup
    from opal_deploy.runtime.cuda_options import parse_cuda_options

    cuda_options = parse_cuda_options(ort_option or ())
    setup = Setup(runtime, device, threads, precision, channels_last, cuda_options, cuda_graphs)
    batches = options.parse_batches(batch, (1,))
    if question is None:
        if model or backbone:
            raise UsageError("--model and --backbone are for --question head, runtime or precision; name A and B alone")
        comparisons = _load_files(files or [], setup)
    else:
        if files:
            raise UsageError(f"{files[0]}: --question takes --model and --backbone, not files alone")
        require("torch", "export", "bench compare --question")
        from opal_deploy.bench.targets.networks import load_checkpoint_network

        if not model and not backbone:
            raise UsageError(f"--question {question}: of what? give --backbone NAME or --model CHECKPOINT")
        networks = chain(
            (load_checkpoint_network(path) for path in model or ()),
            options.build_random_networks(backbone, stride, keep_layers, "opal", classes, prototypes, size),
        )
        comparisons = build_comparisons(question, networks, setup, batches[0], print_message)
    for comparison in comparisons:
        for line in comparison.unusable:
            print_message(line)
        for number in batches:
            rounds = ComparisonOptions(number, pairs, seconds, warmup, buffers)
            with progress("rounds") as advance:
                measurements = measure_comparison(comparison, rounds, question, advance=advance)
            options.deliver(measurements, _format, out, as_json=as_json)


def _load_files(files: list[Path], setup: Setup) -> Iterator[Comparison]:
    from opal_deploy.bench.compare import Comparison
    from opal_deploy.bench.targets.loading import load_file

    if len(files) < 2:
        raise UsageError("nothing to compare: give two models, A and B, or --question head, runtime or precision")
    yield Comparison(files[0].name, tuple(load_file(path, setup) for path in files))


def _format(measurement: Measurement) -> str:
    figures = measurement.figures
    ratio, rate = figures["ratio"], figures["images_per_second"]
    low, high = ratio.interval or (ratio.value, ratio.value)
    target = measurement.target
    name = f"{target.name} ({target.runtime}, {target.precision})" if target is not None else ""
    medians = rate.value / figures["reference_images_per_second"].value
    text = (
        f"{name}: {ratio.value:.4f} of {measurement.case['reference']}'s throughput, 95 % interval {low:.4f} to "
        f"{high:.4f}; {rate.value:.2f} against {figures['reference_images_per_second'].value:.2f} images/s, "
        f"batch {measurement.case['batch']}, {len(ratio.repeats)} rounds"
    )
    if abs(medians - ratio.value) > 0.005:
        # or the figures seem to contradict each other
        text += (
            f"\n  the two rates divide to {medians:.4f}: each is the median of its own rounds, which may be different "
            "ones, so the machine's drift is in it; it cancels out in the ratio of a round"
        )
    return "\n".join([text, *(f"  {mark}" for mark in measurement.marks)])
