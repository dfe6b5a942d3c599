"""How long one batch takes from call to answer: percentiles, and MLPerf's single-stream scenario.

The server scenario on a model, as a line of the record; see `server` for what happens in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from opal_deploy.bench.batch_timing import (
    PERCENTILES,
    BatchTiming,
    TimingOptions,
    build_failed_measurement,
    time_batch,
    time_stages,
)
from opal_deploy.bench.machine import peak_megabytes, provenance, reset_peak
from opal_deploy.bench.measurement import Figure, Measurement, Scalar
from opal_deploy.bench.monitor import monitor_devices
from opal_deploy.bench.server_scenario import (
    PERCENT,
    Answer,
    Trial,
    confirm_rate,
    draw_arrivals,
    find_largest_rate,
    serve,
)
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.bench.timing import random_batches, time_repeats
from opal_deploy.errors import StoppedEarly
from opal_deploy.statistics.intervals import percentile

SINGLE_STREAM = "single-stream"


def measure_latency(opened: LoadedTarget, batches: Sequence[int], options: TimingOptions) -> Iterator[Measurement]:
    """A line a batch size, as soon as it is measured; one that fails has a line that says why, and is the last."""
    for batch in batches:
        line = _line(opened, batch, options, {"batch": batch, "threads": opened.threads})
        yield line
        if not line.figures:
            return


def measure_single_stream(opened: LoadedTarget, options: TimingOptions) -> Measurement:
    """One picture at a time, the next as soon as the last is answered; the scenario's figure is the 90th percentile.

    MLPerf's runs are longer: at least 1,024 queries and a minute.
    """
    case: dict[str, Scalar] = {"scenario": SINGLE_STREAM, "batch": 1, "threads": opened.threads}
    return _line(opened, 1, options, case)


def _line(opened: LoadedTarget, batch: int, options: TimingOptions, case: dict[str, Scalar]) -> Measurement:
    try:
        found = time_batch(opened, batch, options)
        stages = time_stages(opened, batch, options)
    except (StoppedEarly, MemoryError) as error:
        return build_failed_measurement("latency", opened, case, error)
    return Measurement(
        kind="latency",
        target=opened.target,
        case=case,
        figures={**_figures(found), **stages},
        settings=found.settings,
        timed=opened.timed,
        marks=found.marks,
        conditions=found.conditions,
        **provenance(),
    )


def _figures(found: BatchTiming) -> dict[str, Figure]:
    return {
        **{f"p{percent}_ms": found.latency(percent) for percent in PERCENTILES},
        "mean_ms": found.mean_latency,
        "images_per_second": found.throughput,
        "peak_memory": Figure(found.peak_megabytes, "MB", "lower"),
    }


SERVER = "server"
UNATTAINABLE = "unattainable"


@dataclass(frozen=True)
class ServerOptions:
    """How the server scenario is run.

    Attributes:
        limit_ms: of the 99th percentile.
        max_batch: pictures answered at once.
        seconds: each rate is tried at least so long, and with 100 queries at least.
        repeats: how often the rate that was found must hold again, each time with other arrivals.
        warm_up_seconds: least, thrown away, at one picture and at `max_batch`.
        buffers: batches of noise that the calls rotate over.
        seed: of noise and arrivals.
    """

    limit_ms: float
    max_batch: int = 32
    seconds: float = 3.0
    repeats: int = 3
    warm_up_seconds: float = 1.0
    buffers: int = 4
    seed: int = 0


def measure_server(opened: LoadedTarget, options: ServerOptions) -> Measurement:
    """The largest rate of arrivals whose 99th percentile keeps the limit.

    Raises:
        StoppedEarly: memory is full, or the device was lost.
    """
    answer = _answer(opened, options)
    reset_peak()
    with monitor_devices(opened.target.device) as monitor:
        lone, capacity, settings = _calibrate(answer, options)

        def trial(rate: float, seed: int = options.seed) -> Trial:
            due = draw_arrivals(rate, options.seconds, seed=seed)
            return serve(answer, rate, due, max_batch=options.max_batch, limit=options.limit_ms / 1e3)

        rate, tried = find_largest_rate(trial, capacity) if lone <= options.limit_ms else (0.0, [])
        held: list[Trial] = []
        if rate:
            rate, held, build_failed_measurement = confirm_rate(
                lambda lower, repeat: trial(lower, options.seed + 1 + repeat), rate, options.repeats
            )
            tried += build_failed_measurement
    marks = list(monitor.marks)
    figures = {"lone_p50_ms": Figure(lone, "ms", "lower")}
    if rate:
        figures = {"queries_per_second": Figure(rate, "queries/s", "higher"), **_figures_scenarios(held), **figures}
    else:
        marks.append(
            f"{UNATTAINABLE}: no rate that was tried kept {options.limit_ms:g} ms; one picture takes {lone:.2f}"
        )
    figures["peak_memory"] = Figure(peak_megabytes(), "MB", "lower")
    case: dict[str, Scalar] = {
        "scenario": SERVER, "limit_ms": options.limit_ms, "max_batch": options.max_batch, "threads": opened.threads,
    }  # fmt: skip
    return Measurement(
        kind="server",
        target=opened.target,
        case=case,
        figures=figures,
        settings={
            **settings,
            "seconds_per_rate": options.seconds,
            "arrivals": "Poisson, drawn beforehand; one loop takes all that have arrived, up to max_batch",
            "search": "bisection to 5 %, then down by tenths until it holds in every repeat; MLPerf tries for longer",
            "repeats": options.repeats,
            "buffers": options.buffers,
            "seed": options.seed,
        },
        timed=f"from a picture's arrival to its answer, waiting included; in between {opened.timed}",
        marks=tuple(marks),
        conditions=monitor.conditions,
        details={"tried": [served.to_dict() for served in tried], "held": [served.to_dict() for served in held]},
        **provenance(),
    )


def _answer(opened: LoadedTarget, options: ServerOptions) -> Answer:
    """Answers the first so many pictures of the next buffer."""
    buffers = random_batches(options.buffers, options.max_batch, opened.metadata.input_size, seed=options.seed)
    calls = 0

    def answer(count: int) -> object:
        nonlocal calls
        calls += 1
        return opened.session.run(buffers[calls % len(buffers)][:count])

    return answer


def _calibrate(answer: Answer, options: ServerOptions) -> tuple[float, float, dict[str, object]]:
    """Median milliseconds of a lone picture, pictures a second in the largest batches, and how that was found.

    Every batch size runs once before, since any may come up.
    """
    for count in range(1, options.max_batch + 1):
        answer(count)
    lone, full = (
        time_repeats(
            lambda _, count=count: answer(count),  # type: ignore[misc]
            seconds=min(1.0, options.seconds),
            iterations=5,
            repeats=1,
            warm_up_seconds=options.warm_up_seconds,
        )
        for count in (1, options.max_batch)
    )
    warm_up = {"warm_up_iterations": options.max_batch + lone.warm_up.calls + full.warm_up.calls}
    # small batches can be the fastest, on CPUs above all
    capacity = max(lone.rates(1)[0], full.rates(options.max_batch)[0])
    return 1e3 * percentile(lone.latencies, 50), capacity, {**warm_up, "capacity": capacity}


def _figures_scenarios(found: list[Trial]) -> dict[str, Figure]:
    """At the rate that was found: each percentile over its trials."""
    percentiles = {
        f"p{percent}_ms": Figure.of_repeats(
            (1e3 * percentile(served.latencies, percent) for served in found), "ms", "lower"
        )
        for percent in (50, 90, PERCENT)
    }
    batches = [len(served.latencies) / served.batches for served in found]
    return {**percentiles, "mean_batch": Figure.of_repeats(batches, "images")}
