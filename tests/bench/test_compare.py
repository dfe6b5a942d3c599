"""Interleaved rounds, ratios and intervals of models whose times are known."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from opal_deploy.bench.compare import Comparison, explain_ratio, load_comparison, measure_comparison, time_interleaved
from opal_deploy.bench.measurement import Figure
from opal_deploy.bench.options import CompareOptions
from opal_deploy.bench.targets import Setup
from opal_deploy.runtime.cuda_options import parse_cuda_options
from opal_deploy.statistics import median, paired_ratios

BATCH, OPTIONS = 2, CompareOptions(pairs=30, seconds=0.1, warmup=0)


def rates_of(*timings):
    return [timing.throughput(BATCH).repeats for timing in timings]


def test_a_known_ratio_is_found_and_its_interval_covers_it(fake_target, fake_clock):
    clock, generator = fake_clock(), np.random.default_rng(5)

    def around(seconds):
        return fake_target(lambda _: float(seconds * generator.normal(1.0, 0.05)), clock.spend)

    a, b = time_interleaved([around(0.010), around(0.008)], BATCH, OPTIONS, clock=clock)
    ratio = median(paired_ratios(*rates_of(b, a)))
    assert ratio.value == pytest.approx(1.25, rel=0.02)
    assert ratio.interval[0] <= 1.25 <= ratio.interval[1]
    assert ratio.interval[1] - ratio.interval[0] < 0.1


def test_a_machine_that_slows_down_steadily_favours_none(fake_target, fake_clock):
    # each call takes longer than the last one: 0.2 % a call, some 5 % a round
    clock = fake_clock(slower=1.002)
    a, b = time_interleaved(
        [fake_target(0.01, clock.spend), fake_target(0.01, clock.spend)], BATCH, OPTIONS, clock=clock
    )
    ratios = paired_ratios(*rates_of(b, a))
    assert a.elapsed[-1] > 1.25 * a.elapsed[0]
    assert median(ratios).value == pytest.approx(1.0, abs=0.002)
    # within each round the later one is slower: that is what the alternating order cancels
    assert (ratios[::2] < 0.99).all()
    assert (ratios[1::2] > 1.01).all()


def test_runs_alternate_and_have_as_many_batches_as_fill_them_and_one_that_does_not_count(fake_target, fake_clock):
    clock, order = fake_clock(), []

    def named(name, seconds):
        return fake_target(lambda _: order.append(name) or seconds, clock.spend)

    targets = [named("a", 0.06), named("b", 0.03), named("c", 0.2)]
    rates = time_interleaved(targets, BATCH, replace(OPTIONS, pairs=3), clock=clock)
    assert [[len(batches) for batches in timing.repeats] for timing in rates] == [[2] * 3, [4] * 3, [1] * 3]
    assert rates_of(rates[0])[0] == pytest.approx([2 / 0.06] * 3)
    # warm-up, three calls to see how long one takes, and the rounds
    assert len(targets[1].session.batches) == rates[1].warm_up.calls + 3 + 3 * (1 + 4)
    assert set(targets[1].session.batches) == {2}
    assert "".join(order[-30:]) == "aaabbbbbcc" + "ccbbbbbaaa" + "aaabbbbbcc"


def test_options_of_onnx_runtime_are_left_out_of_the_other_runtimes(monkeypatch, fake_target):
    setups = {}

    def load(network, setup):
        setups[setup.runtime] = str(setup.cuda_options)
        return fake_target("n", lambda batch: None)

    monkeypatch.setattr("opal_deploy.bench.compare.load_network", load)
    options = parse_cuda_options(["prefer_nhwc=1"])
    network = SimpleNamespace(name="n")
    comparison = load_comparison("runtime", network, Setup(cuda_options=options), 1)
    assert len(comparison.targets) == 4
    assert setups == {"eager": "", "compile": "", "onnxruntime": "prefer_nhwc=1", "tensorrt": ""}


def test_every_model_but_the_first_has_a_measurement(fake_target, fake_time):
    lengths = iter([0.01] * 30 + [0.002, 0.002, 0.002, 0.03] * 100)
    targets = (
        fake_target(0.02, fake_time.spend, name="slow"),
        fake_target(0.01, fake_time.spend, name="fast"),
        fake_target(lambda _: next(lengths), fake_time.spend, name="noisy"),
    )
    options = CompareOptions(question="runtime", pairs=6, seconds=0.04, warmup=0)
    fast, noisy = measure_comparison(Comparison("slow", targets), 1, options)
    ratio = fast.figures["ratio"]
    assert (ratio.value, len(ratio.repeats)) == (pytest.approx(2.0), 6)
    assert ratio.interval
    assert ratio.interval[0] <= ratio.value <= ratio.interval[1]
    assert fast.figures["images_per_second"].value == pytest.approx(100)
    assert fast.figures["reference_images_per_second"].value == pytest.approx(50)
    for measurement, name in ((fast, "fast"), (noisy, "noisy")):
        assert measurement.target == replace(targets[0].target, name=name)
        assert measurement.case == {"question": "runtime", "reference": "slow", "batch": 1, "threads": 1}
        assert measurement.details["reference"]["name"] == "slow"
        assert "one call of the session" in measurement.timed
        assert measurement == type(measurement).from_line(measurement.to_line())
        is_noisy = any(mark.startswith("noisy: the rounds' ratios differ by") for mark in measurement.marks)
        assert is_noisy is (measurement is noisy)


@pytest.mark.parametrize(("rate", "explained"), [(29.54, True), (29.10, False)])
def test_a_ratio_that_the_two_rates_do_not_divide_to_is_explained(rate, explained):
    figures = {
        "ratio": Figure(0.9863, "ratio", "higher", (0.98, 0.9863, 1.01), (0.97, 1.01)),
        "images_per_second": Figure(rate, "images/s"),
        "reference_images_per_second": Figure(29.51, "images/s"),
    }
    notes = explain_ratio(figures)
    assert [note.startswith("the two rates divide to 1.0010") for note in notes] == [True] * explained


def test_a_comparison_keeps_its_models_busy_and_says_how(pipelined, fake_target):
    loaded, session = pipelined
    options = CompareOptions(pairs=3, seconds=0, warmup=0)
    (row,) = measure_comparison(Comparison("fake", (fake_target(0, lambda _: None), loaded)), 2, options)
    assert row.settings["in_flight"] == [1, 3]
    assert max(session.waits) == 3
    warm_up, per_run = row.settings["warm_up_iterations"][1], row.settings["batches_per_run"][1]
    # to see how long one takes: three times nine batches; each run starts with one that does not count
    assert len(session.batches) == warm_up + 3 * 9 + 3 * (1 + per_run)
    assert "3 in flight" in row.timed
    assert "one call" in row.details["reference_timed"]
