"""`opal-deploy bench`: the commands of the benchmarks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.artifact.files import model_kind
from opal_deploy.bench.options import (
    CompareOptions,
    OutputOptions,
    OverheadOptions,
    PipelineOptions,
    SweepOptions,
    ThroughputOptions,
)
from opal_deploy.cli.console import CommandGroup, GroupedCommand, print_message, print_output, progress
from opal_deploy.cli.options import expand_options
from opal_deploy.errors import OpalError, UsageError, require

if TYPE_CHECKING:
    from opal_deploy.bench.measurement import Measurement
    from opal_deploy.bench.models import TimedModel
    from opal_deploy.bench.networks import NamedNetwork
    from opal_deploy.bench.speed import SweepKind


def overhead(options: OverheadOptions) -> None:
    """Count parameters and operations of backbones and their heads, as in the paper's overhead table.

    The heads are OPAL, and the paper's linear head, which normalises its features to length 1.
    """
    for package in ("torch", "torchvision"):
        require(package, "train", "opal-deploy bench overhead")
    require("ptflops", "bench", "opal-deploy bench overhead")
    from opal_deploy.bench import overhead as overheads

    paper = overheads.load_paper()
    unchanged = OverheadOptions(check=True, out=options.out, as_json=options.as_json)
    is_default_size = options.input_size == unchanged.input_size
    if options.check and replace(options, size=None if is_default_size else options.size) != unchanged:
        raise UsageError("--check compares the paper's own table: leave out every option but --out and --json")
    datasets = {name: entry["classes"] for name, entry in paper["datasets"].items()}
    rows = overheads.count_rows(
        options.backbone or list(paper["backbones"]),
        {f"{number} classes": number for number in options.classes} or datasets,
        options.prototypes,
        options.input_size,
        strides=options.stride or (None,),
        keep_layers=options.keep_layers,
        log=print_message,
    )
    for measurement in overheads.build_measurements(rows, options.input_size):
        _write(measurement, options)
    if not options.as_json:
        print_output(overheads.format_tables(rows, paper))
    if options.check:
        overheads.check_paper(rows, paper, print_message)


def latency(options: SweepOptions) -> None:
    """Measure milliseconds per batch: p50, p90, p95, p99 and mean; on a GPU also copies and computation separately."""
    _deliver(_measure_speed("latency", options), options)


def throughput(options: ThroughputOptions) -> None:
    """Measure images per second over batch sizes.

    A batch size that does not fit into memory is named, and ends that model's sweep.
    """
    _deliver(_measure_speed("throughput", options), options)


def compare(
    options: CompareOptions,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[A B]...", help="Models; the others are compared with A.")
    ] = None,
) -> None:
    """Compare speed in interleaved rounds: the median ratio of the rounds with its 95 % interval.

    Give two models, or a backbone or checkpoint and several of --head, --runtime or --precision: the others are
    compared with the first. In each round every model runs once, A B in even rounds and B A in odd ones, so that a
    drifting machine favours none.
    """
    from opal_deploy.bench.speed import measure_comparison

    models = list(_load_models(replace(options, model=(*(files or ()), *options.model))))
    if len(models) < 2:
        raise UsageError("nothing to compare: give two models, or --backbone and two of --head, --runtime, --precision")
    with progress("rounds") as advance:
        measured = (measure_comparison(models, batch, options, advance) for batch in options.batch)
        _deliver(itertools.chain.from_iterable(measured), options)


def pipeline(
    images: Annotated[list[str], typer.Argument(help="Images: folders, files, globs, or - for a list on stdin.")],
    model: Annotated[Path, typer.Option(help="Exported model or checkpoint.")],
    options: PipelineOptions,
) -> None:
    """Measure `infer` against the bare session: images per second with and without overlays, and time by stage."""
    from opal_deploy.bench.models import load_for_inference
    from opal_deploy.bench.pipeline import measure_pipeline
    from opal_deploy.sources.discovery import check_inputs, discover
    from opal_deploy.sources.image import Skipped

    check_inputs(images)
    items = list(itertools.islice(discover(images, Skipped(), sys.stdin), options.limit))
    loaded = load_for_inference(model, options)
    with progress("repeats") as advance:
        measurement = measure_pipeline(loaded, items, options, advance)
    _deliver([measurement], options)


bench = typer.Typer(
    name="bench",
    help="Measure speed and cost; each result records its settings and machine.",
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (overhead, latency, throughput, compare, pipeline):
    bench.command(cls=GroupedCommand)(expand_options(command))


def _measure_speed(kind: SweepKind, options: SweepOptions) -> Iterator[Measurement]:
    """Yield the measurements of each model at all batch sizes."""
    from opal_deploy.bench.speed import measure_speed

    for model in _load_models(options):
        with progress("repeats") as advance:
            yield from measure_speed(kind, model, options, advance)


def _load_models(options: SweepOptions) -> Iterator[TimedModel]:
    """Yield every model in every runtime and precision, each loaded when needed; name those that cannot run here.

    Raises the last one's error if none can.
    """
    from opal_deploy.bench.models import list_setups, load_model

    if not options.model and not options.backbone:
        raise UsageError("nothing to time: give --model FILE or --backbone NAME (both repeatable)")
    setups = list_setups(options)
    networks: Iterator[Path | NamedNetwork] = iter(())
    if options.backbone:
        for package in ("torch", "torchvision"):
            require(package, "export", "timing a backbone")
        from opal_deploy.bench.networks import build_networks

        networks = build_networks(options)
    loaded, failed = 0, []
    for source in itertools.chain(options.model, networks):
        # ONNX files and engines have their own runtime and precision
        is_exported = isinstance(source, Path) and model_kind(source) != "checkpoint"
        for setup in setups[:1] if is_exported else setups:
            try:
                model = load_model(source, setup)
            except OpalError as error:
                failed.append((f"{source.name} in {setup.runtime[0]}, {(*setup.precision, 'fp32')[0]}", error))
                continue
            loaded += 1
            print_message(f"{model.target.name}: {model.session.description}")
            yield model
    for name, problem in failed if loaded else failed[:-1]:
        print_message(f"{name}: not usable: {problem}")
    if failed and not loaded:
        raise failed[-1][1]


def _deliver(measurements: Iterable[Measurement], options: OutputOptions) -> None:
    """Write each measurement as soon as it is taken, and print all as a table, even if a later one fails."""
    from opal_deploy.bench.measurement import format_measurements

    taken = []
    try:
        for measurement in measurements:
            _write(measurement, options)
            taken.append(measurement)
    finally:
        if taken:
            print_message(format_measurements(taken))


def _write(measurement: Measurement, options: OutputOptions) -> None:
    from opal_deploy.bench.measurement import append_measurement

    if options.out is not None:
        append_measurement(options.out, measurement)
    if options.as_json:
        print_output(measurement.to_line())
