"""Throughput and latency over batch sizes: the measurements, and the end of a sweep."""

import pytest

from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.options import TimingOptions
from opal_deploy.bench.speed import BLOCKING, measure_speed
from opal_deploy.errors import StoppedEarly

QUICK = TimingOptions(seconds=0.02, iterations=2, repeats=2, warmup=0, buffers=2)


def fits_up_to(largest):
    def takes(batch):
        if batch > largest:
            raise StoppedEarly(f"out of memory at a batch of {batch}")
        # the best batch is 2
        return 0.004 if batch <= 2 else 0.02

    return takes


def test_each_batch_size_has_a_measurement(fake_target, fake_time):
    rows = list(measure_speed("throughput", fake_target(fits_up_to(99), fake_time.spend), [1, 2, 4], QUICK))
    assert [row.case for row in rows] == [{"batch": batch, "threads": 1} for batch in (1, 2, 4)]
    best = rows[1]
    assert best.figures["images_per_second"].repeats == pytest.approx((500, 500))
    assert best.figures["p50_ms"].value == pytest.approx(4)
    assert "uint8 batch" in best.timed
    assert best.settings["warm_up_iterations"] >= 3
    assert best.settings["buffers"] == 2
    assert best.machine["processor"]
    assert best.conditions["cpu"]["resident_mb"]["max"] > 0


@pytest.mark.parametrize(
    ("kind", "largest", "cases"),
    [("throughput", 2, [1, 2, 4]), ("throughput", 0, [1]), ("latency", 2, [1, 2, 4])],
    ids=["throughput", "none fits", "latency"],
)
def test_a_batch_that_does_not_fit_is_named_and_ends_the_sweep(fake_target, fake_time, kind, largest, cases):
    model = fake_target(fits_up_to(largest), fake_time.spend)
    sweep = iter(measure_speed(kind, model, [1, 2, 4, 8], QUICK))
    first = next(sweep)
    # measurements come as they are taken
    assert set(model.session.batches) == {1}
    measurements = [first, *sweep]
    assert [m.case.get("batch") for m in measurements] == cases
    (failed,) = (m for m in measurements if not m.figures)
    assert failed.marks == (f"failed: out of memory at a batch of {failed.case['batch']}",)
    assert 8 not in model.session.batches
    assert all(m == Measurement.from_line(m.to_line()) for m in measurements)


def test_repeats_that_differ_are_marked(fake_target, fake_time):
    calls = iter(range(10**6))
    model = fake_target(lambda _: 0.002 if next(calls) < 40 else 0.006, fake_time.spend)
    row = next(
        iter(measure_speed("throughput", model, [1], TimingOptions(seconds=0.1, iterations=2, repeats=3, warmup=0)))
    )
    assert any(mark.startswith("noisy: the repeats differ by") for mark in row.marks)


def test_latency_has_percentiles(fake_target, fake_time):
    calls = iter(range(10**6))
    # every tenth call is slow
    model = fake_target(lambda _: 0.01 if next(calls) % 10 == 9 else 0.001, fake_time.spend)
    (measurement,) = measure_speed("latency", model, [3], TimingOptions(seconds=0, iterations=40, repeats=2, warmup=0))
    figures = measurement.figures
    assert (figures["p50_ms"].value, figures["p95_ms"].value) == pytest.approx((1, 10))
    assert figures["p50_ms"].value < figures["mean_ms"].value < figures["p99_ms"].value
    assert figures["images_per_second"].value == pytest.approx(3 / 0.0019, rel=0.01)


def test_a_throughput_has_as_many_batches_in_flight_as_the_session_takes_and_counts_each_once(pipelined):
    loaded, session = pipelined
    options = TimingOptions(seconds=0, iterations=7, repeats=2, warmup=0, buffers=2)
    (row,) = measure_speed("throughput", loaded, [2], options)
    assert (row.settings["in_flight"], row.settings["iterations"]) == (3, [7, 7])
    # each repeat fills the device, keeps it full, and empties it
    assert session.waits[-14:] == 2 * [3, 3, 3, 3, 3, 2, 1]
    assert session.batches == [2] * (row.settings["warm_up_iterations"] + 14)
    assert "batches with 3 in flight, each: from a uint8 batch" in row.timed


def test_a_latency_is_of_one_batch_in_flight_with_a_gpus_copies_apart(pipelined, monkeypatch):
    loaded, session = pipelined
    monkeypatch.setenv(BLOCKING, "1")
    (row,) = measure_speed("latency", loaded, [2], TimingOptions(seconds=0, iterations=4, repeats=1, warmup=0))
    assert (row.settings["in_flight"], session.waits) == (1, [])
    assert "one call of the session: from a uint8 batch [N, H0, W0, 3] in page-locked" in row.timed
    stages = [row.figures[f"{name}_ms"].value for name in ("host_to_device", "compute", "device_to_host")]
    assert stages == [2, 3, 1]
    assert any(mark.startswith("blocking: ") for mark in row.marks)
