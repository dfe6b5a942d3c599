"""`opal-deploy bench throughput`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opal_deploy.cli.bench import options

if TYPE_CHECKING:
    from opal_deploy.bench.measurement import Measurement


def throughput(
    model: options.Models = None,
    backbone: options.Backbones = None,
    stride: options.Strides = None,
    keep_layers: options.KeepLayers = False,
    head: options.Head = "opal",
    classes: options.Classes = 200,
    prototypes: options.Prototypes = 5,
    size: options.Size = "224",
    runtime: options.Runtimes = None,
    precision: options.Precisions = None,
    channels_last: options.ChannelsLast = False,
    ort_option: options.OrtOptions = None,
    cuda_graphs: options.CudaGraphs = False,
    device: options.DeviceName = "auto",
    threads: options.Threads = None,
    batch: options.Batches = None,
    seconds: options.Seconds = 3.0,
    iterations: options.Iterations = 10,
    repeats: options.Repeats = 3,
    warmup: options.Warmup = 1.0,
    buffers: options.Buffers = 4,
    ceiling: Annotated[
        Path | None,
        typer.Option(help="File of `bench roofline --measure-ceiling --out FILE`, measured on this machine."),
    ] = None,
    out: options.Out = None,
    as_json: options.JsonLines = False,
) -> None:
    """Measure images per second over batch sizes, with the share of the hardware's ceiling; offline: the best of them.

    A batch size that does not fit into memory is named, and ends that model's sweep.
    """
    from opal_deploy.bench.throughput import measure_throughput, read_ceilings
    from opal_deploy.bench.timing import TimingOptions

    batches = options.parse_batches(batch, (1, 2, 4, 8, 16, 32))
    ceilings = () if ceiling is None else read_ceilings(ceiling)
    timing = TimingOptions(seconds, iterations, repeats, warmup, buffers)
    for loaded in options.load_targets(
        model,
        options.build_random_networks(backbone, stride, keep_layers, head, classes, prototypes, size),
        options.build_setups(
            runtime,
            precision,
            channels_last=channels_last,
            device=device,
            threads=threads,
            ort_options=ort_option,
            cuda_graphs=cuda_graphs,
        ),
    ):
        with options.report_repeats(timing, len(batches)) as reporting:
            measurements = measure_throughput(loaded, batches, reporting, ceilings)
            options.deliver(measurements, _format, out, as_json=as_json)


def _format(measurement: Measurement) -> str:
    figures, case = measurement.figures, measurement.case
    if not figures:
        return f"  batch {case['batch']}: {measurement.marks[0]}"
    rate = figures["images_per_second"]
    spread = options.format_spread(rate)
    if case.get("scenario"):
        return f"  offline: {rate.value:.2f} images/s{spread} at batch {figures['best_batch'].value:.0f}"
    share = ""
    if ceiling := figures.get("share_of_ceiling"):
        share = f", {ceiling.value:.1f} % of the ceiling ({measurement.details['ceiling']['bound']})"
    marks = "".join(f"; {mark}" for mark in measurement.marks)
    latencies = f"p50 {figures['p50_ms'].value:.2f} ms, p99 {figures['p99_ms'].value:.2f} ms"
    memory = f"{figures['peak_memory'].value:.0f} MB"
    return f"  batch {case['batch']}: {rate.value:.2f} images/s{spread}, {latencies}, {memory}{share}{marks}"
