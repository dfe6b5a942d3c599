"""Sweeps over batch sizes: what a line says, where a sweep ends, and which batch is offline's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.bench.batch_timing import TimingOptions
from opal_deploy.bench.latency import measure_latency, measure_single_stream
from opal_deploy.bench.measurement import Figure, Measurement, Target, append_measurement
from opal_deploy.bench.throughput import measure_throughput, read_ceilings
from opal_deploy.errors import StoppedEarly, UsageError

QUICK = TimingOptions(seconds=0.02, iterations=2, repeats=2, warm_up_seconds=0, buffers=2)


def fits_up_to(largest: int) -> Callable[[int], float]:
    def takes(batch: int) -> float:
        if batch > largest:
            raise StoppedEarly(f"out of memory at a batch of {batch}")
        # the best batch is 2
        return 0.004 if batch <= 2 else 0.02

    return takes


def test_a_line_a_batch_and_one_for_the_best(opened: Any) -> None:
    found = list(measure_throughput(opened(fits_up_to(99)), [1, 2, 4], QUICK))

    assert [line.case.get("batch") for line in found] == [1, 2, 4, None]
    *rows, offline = found
    assert offline.case == {"scenario": "offline", "threads": 1}
    assert offline.figures["best_batch"].value == 2
    assert offline.figures["images_per_second"] == rows[1].figures["images_per_second"]
    assert rows[1].figures["images_per_second"].value == pytest.approx(500, rel=0.1)
    assert rows[1].figures["p50_ms"].value == pytest.approx(4, rel=0.1)
    assert len(rows[0].figures["images_per_second"].repeats) == 2


def test_lines_come_as_they_are_measured(opened: Any) -> None:
    model = opened(fits_up_to(99))

    first = next(iter(measure_throughput(model, [1, 2], QUICK)))

    assert first.case["batch"] == 1
    assert set(model.session.batches) == {1}


def test_a_batch_that_does_not_fit_is_named_and_ends_the_sweep(opened: Any) -> None:
    model = opened(fits_up_to(2))

    found = list(measure_throughput(model, [1, 2, 4, 8], QUICK))

    assert [line.case.get("batch") for line in found] == [1, 2, 4, None]
    assert found[2].figures == {}
    assert found[2].marks == ("failed: out of memory at a batch of 4",)
    assert found[3].figures["best_batch"].value == 2
    assert 8 not in model.session.batches
    assert all(line == Measurement.from_line(line.to_line()) for line in found)


def test_where_nothing_fits_there_is_no_offline_line(opened: Any) -> None:
    (line,) = measure_throughput(opened(fits_up_to(0)), [1, 2], QUICK)

    assert line.marks == ("failed: out of memory at a batch of 1",)


def test_every_line_says_what_was_timed_and_how(opened: Any) -> None:
    row = next(iter(measure_throughput(opened(0.001), [1], QUICK)))

    assert "uint8 batch" in row.timed
    assert row.settings["warm_up_iterations"] >= 3
    assert row.settings["buffers"] == 2
    assert row.machine["processor"]
    assert row.conditions["cpu"]["resident_mb"]["max"] > 0


def test_repeats_that_differ_are_marked(opened: Any) -> None:
    calls = iter(range(10**6))
    model = opened(lambda _: 0.002 if next(calls) < 40 else 0.006)

    row = next(iter(measure_throughput(model, [1], TimingOptions(0.1, 2, 3, 0, 1))))

    assert any(mark.startswith("noisy: the repeats differ by") for mark in row.marks)


def test_latency_tells_percentiles(opened: Any) -> None:
    calls = iter(range(10**6))
    # every tenth call is slow
    model = opened(lambda _: 0.01 if next(calls) % 10 == 9 else 0.001)

    (line,) = measure_latency(model, [3], TimingOptions(0, 40, 2, 0, 1))

    assert line.kind == "latency"
    assert line.figures["p50_ms"].value == pytest.approx(1, rel=0.3)
    assert line.figures["p95_ms"].value == pytest.approx(10, rel=0.1)
    assert line.figures["p50_ms"].value < line.figures["mean_ms"].value < line.figures["p99_ms"].value
    assert line.figures["images_per_second"].value == pytest.approx(3 / 0.0019, rel=0.2)


def test_single_stream_is_one_picture_at_a_time(opened: Any) -> None:
    model = opened(0.001)

    line = measure_single_stream(model, QUICK)

    assert line.case == {"scenario": "single-stream", "batch": 1, "threads": 1}
    assert set(model.session.batches) == {1}


def test_latency_that_fails_says_why(opened: Any) -> None:
    found = list(measure_latency(opened(fits_up_to(2)), [2, 4, 8], QUICK))

    assert [bool(line.figures) for line in found] == [True, False]
    assert found[1].marks == ("failed: out of memory at a batch of 4",)


class TestCeilings:
    def line(self, device: str, threads: int | None, kind: str = "ceiling") -> Measurement:
        return Measurement(
            kind,  # type: ignore[arg-type]
            Target(device, device=device),
            {"threads": threads},
            {"copy": Figure(20.0, "GB/s"), "matmul_fp32": Figure(0.1, "TFLOP/s")},
        )

    def test_the_one_of_the_models_device_and_threads_is_taken(self, tmp_path: Path, opened: Any) -> None:
        path = tmp_path / "c.jsonl"
        for device, threads in (("cpu", 2), ("cpu", 1), ("cuda:0 NVIDIA H200", None)):
            append_measurement(path, self.line(device, threads))

        found = read_ceilings(path)

        assert [(c.device, c.threads) for c in found if c.fits(opened(0.001))] == [("cpu", 1)]
        assert found[0].ceiling.bytes_per_second == 20e9

    def test_a_file_without_one_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "c.jsonl"
        append_measurement(path, self.line("cpu", 1, kind="latency"))

        with pytest.raises(UsageError, match="no ceiling in it"):
            read_ceilings(path)
