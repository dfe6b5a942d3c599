"""Latency, throughput and ratios of models whose times are known."""

import gc
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from opal_deploy.bench.options import CompareOptions, SweepOptions
from opal_deploy.bench.speed import measure_comparison, measure_speed
from opal_deploy.bench.timing import Run, find_throttling, read_gpus
from opal_deploy.errors import StoppedEarly
from opal_deploy.runtime.devices import GpuSensors, NvmlError

QUICK = SweepOptions(seconds=0.02, iterations=2, repeats=2, warmup=0, buffers=2)
COMPARED = CompareOptions(repeats=30, seconds=0.1, warmup=0)


def fits_up_to(largest):
    def takes(batch):
        if batch > largest:
            raise StoppedEarly(f"out of memory at a batch of {batch}")
        # the best batch is 2
        return 0.004 if batch <= 2 else 0.02

    return takes


def test_each_batch_size_has_a_measurement(fake_model):
    _, best, _ = rows = list(measure_speed("throughput", fake_model(fits_up_to(99)), replace(QUICK, batch=(1, 2, 4))))
    assert [row.case for row in rows] == [{"batch": batch, "threads": 1} for batch in (1, 2, 4)]
    assert best.figures["images_per_second"].repeats == pytest.approx((500, 500))
    assert best.figures["p50_ms"].value == pytest.approx(4)
    assert "uint8 batch" in best.timed
    assert best.settings == {
        "in_flight": 1, "repeats": 2, "iterations": [5, 5], "measured_seconds": 0.04, "warm_up_iterations": 4,
        "buffers": 2,
    }  # fmt: skip
    assert best.machine["processor"]


def test_a_batch_that_does_not_fit_is_named_and_ends_the_sweep(fake_model):
    model = fake_model(fits_up_to(2))
    sweep = measure_speed("throughput", model, replace(QUICK, batch=(1, 2, 4, 8)))
    first = next(sweep)
    # measurements come as they are taken
    assert set(model.session.batches) == {1}
    measurements = [first, *sweep]
    assert [m.case["batch"] for m in measurements] == [1, 2, 4]
    assert measurements[-1].marks == ("failed: out of memory at a batch of 4",)
    assert 8 not in model.session.batches
    assert all(json.loads(m.to_line())["kind"] == "throughput" for m in measurements)


def test_latency_has_percentiles(fake_model):
    calls = itertools.count()
    # every tenth call is slow
    model = fake_model(lambda _: 0.01 if next(calls) % 10 == 9 else 0.001)
    (row,) = measure_speed("latency", model, SweepOptions(seconds=0, iterations=40, repeats=2, warmup=0, batch=(3,)))
    assert (row.figures["p50_ms"].value, row.figures["p95_ms"].value) == pytest.approx((1, 10))
    assert row.figures["p50_ms"].value < row.figures["mean_ms"].value < row.figures["p99_ms"].value
    assert row.figures["images_per_second"].value == pytest.approx(3 / 0.0019, rel=0.01)


def test_the_warm_up_is_discarded(fake_model):
    lengths = iter([90.0, 50.0, 30.0, 2.0, 2.0, *[1.0] * 1000])
    model = fake_model(lambda _: next(lengths))
    (row,) = measure_speed("latency", model, SweepOptions(seconds=1, iterations=10, repeats=1, warmup=3))
    # three calls that compile are no warm-up
    assert row.settings["warm_up_iterations"] == 5
    assert row.figures["p99_ms"].value == 1000


def test_a_repeat_has_its_iterations_and_seconds_and_collects_no_garbage(fake_model):
    collecting = []
    for length, options, calls in ((1, (2, 7), 7), (0.5, (10, 2), 20)):
        model = fake_model(lambda _, length=length: collecting.append(gc.isenabled()) or length)
        latencies, seconds = Run(model.session, [np.zeros((1, 8, 8, 3), np.uint8)]).time_repeat(*options)
        assert (latencies.tolist(), seconds) == ([length] * calls, length * calls)
    assert not any(collecting)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        Run(fake_model(lambda _: 1 / 0).session, [np.zeros((1, 8, 8, 3), np.uint8)]).time_repeat(0, 1)
    assert gc.isenabled()


# several batches in flight, and a GPU's clocks ------------------------------------------------------------------------


def test_a_throughput_has_as_many_batches_in_flight_as_the_session_takes_and_counts_each_once(pipelined):
    options = SweepOptions(seconds=0, iterations=7, repeats=2, warmup=0, buffers=2, batch=(2,))
    (row,) = measure_speed("throughput", pipelined, options)
    assert (row.settings["in_flight"], row.settings["iterations"]) == (3, [7, 7])
    # each repeat fills the device, keeps it full, and empties it
    assert pipelined.session.waits[-14:] == 2 * [3, 3, 3, 3, 3, 2, 1]
    assert pipelined.session.batches == [2] * (row.settings["warm_up_iterations"] + 14)
    assert pipelined.session.from_locked == len(pipelined.session.batches)
    assert "batches with 3 in flight, each: from a uint8 batch" in row.timed


def test_a_latency_is_of_one_batch_in_flight(pipelined):
    (row,) = measure_speed("latency", pipelined, SweepOptions(seconds=0, iterations=4, repeats=1, warmup=0, batch=(2,)))
    assert (row.settings["in_flight"], pipelined.session.waits) == (1, [])
    assert "one call of the session: from a uint8 batch [N, H0, W0, 3] in page-locked" in row.timed
    # no driver here
    assert set(row.conditions["after"]["cuda:0"]) == {"not_read"}


def test_throttled_clocks_are_marked(monkeypatch):
    class Sensors(GpuSensors):
        def __init__(self, index):
            if index:
                raise NvmlError("no such GPU")
            self.name = "NVIDIA H200"

        def read(self):
            return {"sm_clock_mhz": 1200.0}

        def read_clock_reasons(self):
            return ["gpu_idle", "sw_thermal_slowdown"]

    monkeypatch.setattr("opal_deploy.bench.timing.GpuSensors", Sensors)
    after = read_gpus(["cpu", "cuda:0", "cuda:1"])
    assert after["cuda:0"]["sm_clock_mhz"] == 1200
    assert after["cuda:1"] == {"not_read": "NVML: no such GPU"}
    assert find_throttling(after) == ("throttled: sw_thermal_slowdown",)


# compare --------------------------------------------------------------------------------------------------------------


def test_a_known_ratio_is_found_and_its_interval_covers_it(fake_model):
    generator = np.random.default_rng(5)
    a, b = (fake_model(lambda _, s=s: float(s * generator.normal(1.0, 0.05)), name=str(s)) for s in (0.010, 0.008))
    (row,) = measure_comparison([a, b], 2, COMPARED)
    ratio, (low, high) = row.figures["ratio"].value, row.figures["ratio"].interval
    assert ratio == pytest.approx(1.25, rel=0.02)
    assert low <= 1.25 <= high
    assert high - low < 0.1
    assert row.case == {"reference": "0.01, onnxruntime, fp32", "batch": 2, "threads": 1}
    assert row.figures["reference_images_per_second"].value == pytest.approx(200, rel=0.05)
    assert row.details["reference"]["name"] == "0.01"
    assert json.loads(row.to_line())["target"]["name"] == "0.008"


def test_a_machine_that_slows_down_steadily_favours_none(fake_model, clock):
    # each call takes longer than the last one: 0.2 % a call, some 5 % a round
    clock.slower = 1.002
    (row,) = measure_comparison([fake_model(0.01), fake_model(0.01)], 2, COMPARED)
    ratios = np.array(row.figures["ratio"].repeats)
    assert row.figures["ratio"].value == pytest.approx(1.0, abs=0.004)
    # within each round the later one is slower: that is what the alternating order cancels
    assert (ratios[:10:2] < 0.99).all()
    assert (ratios[1:10:2] > 1.01).all()
