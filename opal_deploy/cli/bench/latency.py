"""`opal-deploy bench latency`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.bench import options
from opal_deploy.cli.console import print_message
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.bench.measurement import Measurement
    from opal_deploy.bench.server_scenario import ServerOptions
    from opal_deploy.bench.targets.loading import LoadedTarget
    from opal_deploy.bench.timing import TimingOptions

_SCENARIOS = "MLPerf's scenarios (offline: bench throughput)"
_PERCENTILES = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms")
_STAGES = {"host_to_device_ms": "to the device", "compute_ms": "compute", "device_to_host_ms": "back"}


def latency(
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
    scenario: Annotated[
        Literal["single-stream", "server"] | None,
        typer.Option(
            help="single-stream: one image at a time, 90th percentile; server: Poisson arrivals, largest rate whose "
            "99th percentile keeps --limit-ms.",
            rich_help_panel=_SCENARIOS,
        ),
    ] = None,
    limit_ms: Annotated[
        float | None, typer.Option(help="server: milliseconds from arrival to answer.", rich_help_panel=_SCENARIOS)
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="server: most images a call.", rich_help_panel=_SCENARIOS)] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of inputs and arrivals.", rich_help_panel=_SCENARIOS)] = 0,
    out: options.Out = None,
    as_json: options.JsonLines = False,
) -> None:
    """Measure milliseconds a batch: p50, p90, p95, p99, mean; on a GPU also copies and computing apart."""
    from opal_deploy.bench.server_scenario import ServerOptions
    from opal_deploy.bench.timing import TimingOptions

    if scenario and batch:
        raise UsageError(f"--scenario {scenario} has its own batches: leave --batch out (server: --max-batch)")
    if (scenario == "server") != (limit_ms is not None):
        raise UsageError("--scenario server and --limit-ms MILLISECONDS go together: p99 is held against that limit")
    if limit_ms is not None and limit_ms <= 0:
        raise UsageError(f"--limit-ms {limit_ms:g}: expected milliseconds above 0")
    timing = TimingOptions(seconds, iterations, repeats, warmup, buffers, seed)
    server = None if limit_ms is None else ServerOptions(limit_ms, max_batch, timing)
    batches = options.parse_batches(batch, (1,))
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
        if server is not None:
            # which prints a line a rate instead
            options.deliver([_measure_server(loaded, server)], _format, out, as_json=as_json)
            continue
        with options.report_repeats(timing, len(batches)) as reporting:
            measurements = _measure(loaded, scenario, batches, reporting)
            options.deliver(measurements, _format, out, as_json=as_json)


def _measure_server(loaded: LoadedTarget, server: ServerOptions) -> Measurement:
    from opal_deploy.bench.server_scenario import measure_server

    return measure_server(loaded, server, lambda line: print_message(f"  {line}"))


def _measure(
    loaded: LoadedTarget, scenario: str | None, batches: tuple[int, ...], timing: TimingOptions
) -> Iterator[Measurement]:
    from opal_deploy.bench.latency import measure_latency, measure_single_stream

    if scenario is not None:
        yield measure_single_stream(loaded, timing)
    else:
        yield from measure_latency(loaded, batches, timing)


def _format(measurement: Measurement) -> str:
    figures = {name: f"{figure.value:.2f}" for name, figure in measurement.figures.items()}
    marks = "".join(f"; {mark}" for mark in measurement.marks)
    if measurement.kind == "server":
        if "queries_per_second" not in figures:
            return "\n".join(f"  server: {mark}" for mark in reversed(measurement.marks))
        return (
            f"  server: {figures['queries_per_second']} images/s keep {measurement.case['limit_ms']:g} ms "
            f"(p50 {figures['p50_ms']}, p90 {figures['p90_ms']}, p99 {figures['p99_ms']}; {figures['late']} % of "
            f"{measurement.figures['queries'].value:.0f} queries were late, with 95 % confidence at most "
            f"{figures['late_bound']} %), {figures['mean_batch']} a batch{marks}"
        )
    case = measurement.case.get("scenario") or f"batch {measurement.case['batch']}"
    if not figures:
        return f"  {case}: {measurement.marks[0]}"
    percentiles = ", ".join(f"{name.removesuffix('_ms')} {figures[name]}" for name in _PERCENTILES)
    stages = ", ".join(f"{title} {figures[name]}" for name, title in _STAGES.items() if name in figures)
    rate = measurement.figures["images_per_second"]
    return (
        f"  {case}: {percentiles} ms{f'; {stages} ms' if stages else ''}; {rate.value:.2f} images/s"
        f"{options.format_spread(rate)}, {figures['peak_memory']} MB{marks}"
    )
