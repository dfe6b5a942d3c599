"""Interleaved rounds, ratios and intervals of models whose times are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opal_deploy.bench.compare import Comparison, ComparisonOptions, measure_comparison, time_interleaved
from opal_deploy.statistics.intervals import median, paired_ratios

OPTIONS = ComparisonOptions(batch=2, rounds=30, run_seconds=0.1, warm_up_seconds=0)


def test_a_known_ratio_is_found_and_its_interval_covers_it(fake_target: Any, fake_clock: Callable[..., Any]) -> None:
    clock, generator = fake_clock(), np.random.default_rng(5)

    def around(seconds: float) -> Any:
        return fake_target(lambda _: float(seconds * generator.normal(1.0, 0.05)), clock.spend)

    a, b = time_interleaved([around(0.010), around(0.008)], OPTIONS, clock=clock)
    ratio = median(paired_ratios(b.rates, a.rates))
    assert ratio.value == pytest.approx(1.25, rel=0.02)
    assert ratio.interval[0] <= 1.25 <= ratio.interval[1]
    assert ratio.interval[1] - ratio.interval[0] < 0.1


def test_a_machine_that_slows_down_steadily_favours_none(fake_target: Any, fake_clock: Callable[..., Any]) -> None:
    # each call takes longer than the last one: 0.2 % a call, some 5 % a round
    clock = fake_clock(slower=1.002)
    a, b = time_interleaved([fake_target(0.01, clock.spend), fake_target(0.01, clock.spend)], OPTIONS, clock=clock)
    ratios = paired_ratios(b.rates, a.rates)
    assert a.rates[-1] < 0.8 * a.rates[0]
    assert median(ratios).value == pytest.approx(1.0, abs=0.002)
    # within each round the later one is slower: that is what the alternating order cancels
    assert (ratios[::2] < 0.99).all()
    assert (ratios[1::2] > 1.01).all()


def test_every_run_has_as_many_batches_as_fill_it_and_one_that_does_not_count(
    fake_target: Any, fake_clock: Callable[..., Any]
) -> None:
    clock = fake_clock()
    slow, fast = fake_target(0.03, clock.spend), fake_target(0.01, clock.spend)
    rates = time_interleaved([slow, fast], replace(OPTIONS, rounds=4), clock=clock)
    assert [of_target.batches for of_target in rates] == [4, 10]
    assert rates[0].rates == pytest.approx([2 / 0.03] * 4)
    # warm-up, three calls to see how long one takes, and the rounds
    assert len(fast.session.batches) == rates[1].warm_up_calls + 3 + 4 * (1 + 10)
    assert set(fast.session.batches) == {2}


def test_the_order_alternates(fake_target: Any, fake_clock: Callable[..., Any]) -> None:
    clock, order = fake_clock(), []

    def named(name: str) -> Any:
        return fake_target(lambda _: order.append(name) or 0.2, clock.spend)

    time_interleaved([named("a"), named("b"), named("c")], replace(OPTIONS, rounds=3), clock=clock)
    # each run: one call that does not count and one that does
    assert "".join(order[-18:]) == "aabbcc" + "ccbbaa" + "aabbcc"


def test_every_model_but_the_first_has_a_measurement(fake_target: Any, fake_time: Any) -> None:
    targets = (
        fake_target(0.02, fake_time.spend, name="slow"),
        fake_target(0.01, fake_time.spend, name="fast"),
        fake_target(0.01, fake_time.spend, name="other"),
    )
    options = ComparisonOptions(rounds=6, run_seconds=0.04, warm_up_seconds=0)
    measurements = measure_comparison(Comparison("slow", targets), options, "runtime")
    assert [m.target.name for m in measurements if m.target] == ["fast", "other"]
    for measurement in measurements:
        ratio = measurement.figures["ratio"]
        assert ratio.value == pytest.approx(2.0)
        assert measurement.figures["images_per_second"].value == pytest.approx(100)
        assert measurement.figures["reference_images_per_second"].value == pytest.approx(50)
        assert measurement.case == {"question": "runtime", "reference": "slow", "batch": 1, "threads": 1}
        assert measurement.details["reference"]["name"] == "slow"
        assert len(ratio.repeats) == 6
        assert ratio.interval is not None
        assert ratio.interval[0] <= ratio.value <= ratio.interval[1]
        assert "one call of the session" in measurement.timed
        assert measurement == type(measurement).from_line(measurement.to_line())


def test_rounds_that_differ_are_marked(fake_target: Any, fake_time: Any) -> None:
    lengths = iter([0.002] * 12 + [0.002, 0.002, 0.002, 0.008] * 100)
    comparison = Comparison(
        "a", (fake_target(0.002, fake_time.spend), fake_target(lambda _: next(lengths), fake_time.spend))
    )
    (measurement,) = measure_comparison(comparison, ComparisonOptions(rounds=6, run_seconds=0, warm_up_seconds=0))
    assert any(mark.startswith("noisy: the rounds' ratios differ by") for mark in measurement.marks)
