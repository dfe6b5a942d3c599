"""Batches in flight on a stand-in for a GPU, whose queued work runs only when somebody waits for it."""

import math

import pytest

from opal_deploy.bench.compare import Comparison, measure_comparison
from opal_deploy.bench.measurement import Target
from opal_deploy.bench.options import CompareOptions, TimingOptions
from opal_deploy.bench.speed import measure_speed
from opal_deploy.bench.targets import LoadedTarget
from tests.runtime.conftest import make_stand, tiny, tiny_fp16

__all__ = ["make_stand", "tiny", "tiny_fp16"]
DEPTH = 3


@pytest.fixture
def gpu(make_stand):
    """A loaded engine; `gpu.waits` has the number of batches in flight whenever one was waited for."""
    stand = make_stand()
    session = stand.open()
    copied, waits = stand.cuda.copied_from, []
    synchronize, images_run = stand.cuda.synchronize_event, stand.trt.executed
    copied.clear()
    images_run.clear()

    def wait(event):
        waits.append(len(copied) - len(waits))
        synchronize(event)

    stand.cuda.synchronize_event = wait
    target = Target("c", runtime="tensorrt", device=session.device, precision="fp16")
    loaded = LoadedTarget(session, target, None)
    yield loaded, waits, images_run
    session.close()


def test_a_throughput_has_as_many_batches_in_flight_as_the_session_takes_and_counts_each_once(gpu):
    loaded, waits, images_run = gpu
    options = TimingOptions(seconds=0, iterations=7, repeats=2, warmup=0, buffers=2)
    (row,) = measure_speed("throughput", loaded, [2], options)
    assert (row.settings["in_flight"], row.settings["iterations"]) == (DEPTH, [7, 7])
    assert max(waits) == DEPTH
    # each repeat fills the device, keeps it full, and empties it
    assert waits[-14:] == 2 * [3, 3, 3, 3, 3, 2, 1]
    assert images_run == [2] * (row.settings["warm_up_iterations"] + 14)
    rates = row.figures["images_per_second"].repeats
    assert sum(2 * 7 / rate for rate in rates) == pytest.approx(row.settings["measured_seconds"], abs=2e-3)
    assert "batches with 3 in flight, each: from a uint8 batch" in row.timed


def test_a_latency_is_of_one_batch_in_flight(gpu):
    loaded, waits, images_run = gpu
    (row,) = measure_speed("latency", loaded, [2], TimingOptions(seconds=0, iterations=4, repeats=1, warmup=0))
    assert (row.settings["in_flight"], set(waits)) == (1, {1})
    assert "one call of the session" in row.timed
    assert set(images_run) == {2}


def test_a_comparison_keeps_its_models_busy_and_says_how(gpu, fake_target):
    loaded, waits, images_run = gpu
    one_by_one = fake_target(0, lambda _: None)
    options = CompareOptions(pairs=3, seconds=0, warmup=0)
    (row,) = measure_comparison(Comparison("fake", (one_by_one, loaded)), 2, options)
    assert row.settings["in_flight"] == [1, DEPTH]
    assert max(waits) == DEPTH
    warm_up, per_run = row.settings["warm_up_iterations"][1], row.settings["batches_per_run"][1]
    # to see how long one takes: three times nine batches; each run starts with one that does not count
    assert len(images_run) == warm_up + 3 * DEPTH**2 + 3 * (1 + per_run)
    assert math.isfinite(row.figures["ratio"].value)
    assert "3 in flight" in row.timed
    assert "one call" in row.details["reference_timed"]
