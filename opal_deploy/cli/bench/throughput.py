"""`opal-deploy bench throughput`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.bench.options import (
    Backbones,
    Batches,
    Buffers,
    ChannelsLast,
    Classes,
    DeviceName,
    Head,
    Iterations,
    JsonLines,
    Models,
    Out,
    Precisions,
    Prototypes,
    Repeats,
    Runtimes,
    Seconds,
    Size,
    Threads,
    Warmup,
    build_random_networks,
    build_setups,
    load_targets,
    parse_batches,
    write_measurement,
)
from opal_deploy.cli.console import print_message

if TYPE_CHECKING:
    from opal_deploy.bench.measurement import Measurement


def throughput(
    model: Models = None,
    backbone: Backbones = None,
    head: Head = "opal",
    classes: Classes = 200,
    prototypes: Prototypes = 5,
    size: Size = "224",
    runtime: Runtimes = None,
    precision: Precisions = None,
    channels_last: ChannelsLast = False,
    device: DeviceName = "auto",
    threads: Threads = None,
    batch: Batches = None,
    seconds: Seconds = 3.0,
    iterations: Iterations = 10,
    repeats: Repeats = 3,
    warmup: Warmup = 1.0,
    buffers: Buffers = 4,
    ceiling: Annotated[
        Path | None, typer.Option(help="What `bench roofline --measure-ceiling --out FILE` measured on this machine.")
    ] = None,
    out: Out = None,
    as_json: JsonLines = False,
) -> None:
    """Images per second over batch sizes, with the share of the hardware's ceiling; offline: the best of them.

    A batch size that does not fit into memory is named, and ends that model's sweep.
    """
    from opal_deploy.bench.batch_timing import TimingOptions
    from opal_deploy.bench.throughput import measure_throughput, read_ceilings

    sizes = parse_batches(batch, (1, 2, 4, 8, 16, 32))
    measured = () if ceiling is None else read_ceilings(ceiling)
    options = TimingOptions(seconds, iterations, repeats, warmup, buffers)
    for opened in load_targets(
        model,
        build_random_networks(backbone, head, classes, prototypes, size),
        build_setups(runtime, precision, channels_last=channels_last, device=device, threads=threads),
    ):
        for measurement in measure_throughput(opened, sizes, options, measured):
            write_measurement(measurement, out, as_json=as_json)
            _tell(measurement)


def _tell(found: Measurement) -> None:
    if not found.figures:
        print_message(f"  batch {found.case['batch']}: {found.marks[0]}")
        return
    rate = found.figures["images_per_second"]
    spread = "" if rate.spread is None else f" (spread {rate.spread:.1%} over {len(rate.repeats)})"
    if found.case.get("scenario"):
        print_message(f"  offline: {rate.value:.2f} images/s{spread} at batch {found.figures['best_batch'].value:.0f}")
        return
    share = ""
    if ceiling := found.figures.get("share_of_ceiling"):
        share = f", {ceiling.value:.1f} % of the ceiling ({found.details['ceiling']['bound']})"
    marks = "".join(f"; {mark}" for mark in found.marks)
    latencies = f"p50 {found.figures['p50_ms'].value:.2f} ms, p99 {found.figures['p99_ms'].value:.2f} ms"
    memory = f"{found.figures['peak_memory'].value:.0f} MB"
    print_message(
        f"  batch {found.case['batch']}: {rate.value:.2f} images/s{spread}, {latencies}, {memory}{share}{marks}"
    )
