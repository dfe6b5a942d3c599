"""`opal-deploy bench latency`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

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
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.bench.batch_timing import TimingOptions
    from opal_deploy.bench.latency import ServerOptions
    from opal_deploy.bench.measurement import Measurement
    from opal_deploy.bench.targets.loading import LoadedTarget

_SCENARIOS = "MLPerf's scenarios (offline: bench throughput)"


def latency(
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
    scenario: Annotated[
        Literal["single-stream", "server"] | None,
        typer.Option(
            help="single-stream: one picture at a time, 90th percentile; server: Poisson arrivals, largest rate whose "
            "99th percentile keeps --limit-ms.",
            rich_help_panel=_SCENARIOS,
        ),
    ] = None,
    limit_ms: Annotated[
        float | None, typer.Option(help="server: milliseconds from arrival to answer.", rich_help_panel=_SCENARIOS)
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="server: pictures answered at once.", rich_help_panel=_SCENARIOS)
    ] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of noise and arrivals.", rich_help_panel=_SCENARIOS)] = 0,
    out: Out = None,
    as_json: JsonLines = False,
) -> None:
    """Milliseconds a batch: p50, p90, p95, p99, mean; on a GPU also copies and computing apart."""
    from opal_deploy.bench.batch_timing import TimingOptions
    from opal_deploy.bench.latency import ServerOptions

    if scenario and batch:
        raise UsageError(f"--scenario {scenario} has its own batches: leave --batch out (server: --max-batch)")
    if (scenario == "server") != (limit_ms is not None):
        raise UsageError("--scenario server and --limit-ms MILLISECONDS go together: p99 is held against that limit")
    if limit_ms is not None and limit_ms <= 0:
        raise UsageError(f"--limit-ms {limit_ms:g}: expected milliseconds above 0")
    timing = TimingOptions(seconds, iterations, repeats, warmup, buffers, seed)
    serving = None
    if limit_ms is not None:
        serving = ServerOptions(limit_ms, max_batch, seconds, repeats, warmup, buffers, seed)
    sizes = parse_batches(batch, (1,))
    for opened in load_targets(
        model,
        build_random_networks(backbone, head, classes, prototypes, size),
        build_setups(runtime, precision, channels_last=channels_last, device=device, threads=threads),
    ):
        for measurement in _measured(opened, scenario, sizes, timing, serving):
            write_measurement(measurement, out, as_json=as_json)
            _tell(measurement)


def _measured(
    opened: LoadedTarget,
    scenario: str | None,
    sizes: tuple[int, ...],
    timing: TimingOptions,
    serving: ServerOptions | None,
) -> Iterator[Measurement]:
    from opal_deploy.bench.latency import measure_latency, measure_server, measure_single_stream

    if serving is not None:
        yield measure_server(opened, serving)
    elif scenario is not None:
        yield measure_single_stream(opened, timing)
    else:
        yield from measure_latency(opened, sizes, timing)


def _tell(found: Measurement) -> None:
    figures = {name: f"{figure.value:.2f}" for name, figure in found.figures.items()}
    marks = "".join(f"; {mark}" for mark in found.marks)
    if found.kind == "server":
        if "queries_per_second" in figures:
            print_message(
                f"  server: {figures['queries_per_second']} pictures/s keep {found.case['limit_ms']:g} ms "
                f"(p50 {figures['p50_ms']}, p90 {figures['p90_ms']}, p99 {figures['p99_ms']}), "
                f"{figures['mean_batch']} a batch{marks}"
            )
        else:
            print_message(f"  server: {found.marks[-1]}")
        return
    what = found.case.get("scenario") or f"batch {found.case['batch']}"
    if not figures:
        print_message(f"  {what}: {found.marks[0]}")
        return
    percentiles = ", ".join(f"{name.removesuffix('_ms')} {figures[name]}" for name in _SHOWN)
    stages = ", ".join(f"{_STAGES[name]} {figures[name]}" for name in _STAGES if name in figures)
    rate = found.figures["images_per_second"]
    spread = "" if rate.spread is None else f" (spread {rate.spread:.1%} over {len(rate.repeats)})"
    print_message(
        f"  {what}: {percentiles} ms{f'; {stages} ms' if stages else ''}; {rate.value:.2f} images/s{spread}, "
        f"{figures['peak_memory']} MB{marks}"
    )


_SHOWN = ("p50_ms", "p90_ms", "p95_ms", "p99_ms", "mean_ms")
_STAGES = {"host_to_device_ms": "to the device", "compute_ms": "compute", "device_to_host_ms": "back"}
