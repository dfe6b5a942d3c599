"""Turns, ratios and intervals against models whose times are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opal_deploy.bench.compare import Comparison, ComparisonOptions, measure_comparison, time_interleaved
from opal_deploy.statistics.intervals import median, paired_ratios

PLAN = ComparisonOptions(batch=2, rounds=30, turn_seconds=0.1, warm_up_seconds=0)


def test_a_known_ratio_is_found_and_its_interval_covers_it(opened: Any, fake_clock: Callable[..., Any]) -> None:
    clock, generator = fake_clock(), np.random.default_rng(5)

    def around(seconds: float) -> Callable[[int], float]:
        return lambda _: float(seconds * generator.normal(1.0, 0.05))

    a, b = time_interleaved([opened(around(0.010), clock.spend), opened(around(0.008), clock.spend)], PLAN, clock=clock)
    found = median(paired_ratios(b.rates, a.rates))

    assert found.value == pytest.approx(1.25, rel=0.02)
    assert found.interval[0] <= 1.25 <= found.interval[1]
    assert found.interval[1] - found.interval[0] < 0.1


def test_a_machine_that_slows_down_steadily_favours_nobody(opened: Any, fake_clock: Callable[..., Any]) -> None:
    # each call takes longer than the last one: 0.2 % a call, some 5 % a round
    clock = fake_clock(slower=1.002)

    a, b = time_interleaved([opened(0.01, clock.spend), opened(0.01, clock.spend)], PLAN, clock=clock)
    ratios = paired_ratios(b.rates, a.rates)

    assert a.rates[-1] < 0.8 * a.rates[0]
    assert median(ratios).value == pytest.approx(1.0, abs=0.002)
    # within each round the later one is slower: that is what the turns' order cancels
    assert (ratios[::2] < 0.99).all()
    assert (ratios[1::2] > 1.01).all()


def test_sleeping_models_are_told_apart(opened: Any) -> None:
    plan = ComparisonOptions(rounds=6, turn_seconds=0.04, warm_up_seconds=0)
    contest = Comparison("slow", (opened(0.02, name="slow"), opened(0.01, name="fast")))

    (found,) = measure_comparison(contest, plan)

    assert found.figures["ratio"].value == pytest.approx(2.0, rel=0.05)
    assert found.figures["images_per_second"].value == pytest.approx(100, rel=0.05)
    assert found.figures["reference_images_per_second"].value == pytest.approx(50, rel=0.05)


def test_every_turn_has_as_many_batches_as_fill_it_and_one_that_does_not_count(
    opened: Any, fake_clock: Callable[..., Any]
) -> None:
    clock = fake_clock()
    slow, fast = opened(0.03, clock.spend), opened(0.01, clock.spend)

    turns = time_interleaved([slow, fast], replace(PLAN, rounds=4), clock=clock)

    assert [turn.batches for turn in turns] == [4, 10]
    assert turns[0].rates == pytest.approx([2 / 0.03] * 4)
    # warm-up, three calls to see how long one takes, and the rounds
    assert len(fast.session.batches) == turns[1].warm_up_calls + 3 + 4 * (1 + 10)
    assert set(fast.session.batches) == {2}


def test_the_order_alternates(opened: Any, fake_clock: Callable[..., Any]) -> None:
    clock, order = fake_clock(), []

    def named(name: str) -> Any:
        return opened(lambda _: order.append(name) or 0.2, clock.spend)

    time_interleaved([named("a"), named("b"), named("c")], replace(PLAN, rounds=3), clock=clock)

    # each turn: one call that does not count and one that does
    assert "".join(order[-18:]) == "aabbcc" + "ccbbaa" + "aabbcc"


def test_every_contender_but_the_first_has_a_line(opened: Any) -> None:
    contest = Comparison("one", tuple(opened(0.001, name=name) for name in ("one", "two", "three")))

    found = measure_comparison(contest, ComparisonOptions(rounds=3, turn_seconds=0.002, warm_up_seconds=0), "runtime")

    assert [line.target.name for line in found if line.target] == ["two", "three"]
    for line in found:
        ratio = line.figures["ratio"]
        assert line.case == {"question": "runtime", "reference": "one", "batch": 1, "threads": 1}
        assert line.details["reference"]["name"] == "one"
        assert len(ratio.repeats) == 3
        assert ratio.interval is not None
        assert ratio.interval[0] <= ratio.value <= ratio.interval[1]
        assert "one call of the session" in line.timed
        assert line == type(line).from_line(line.to_line())


def test_rounds_that_differ_are_marked(opened: Any) -> None:
    lengths = iter([0.002] * 12 + [0.002, 0.002, 0.002, 0.008] * 100)
    contest = Comparison("a", (opened(0.002), opened(lambda _: next(lengths))))

    (found,) = measure_comparison(contest, ComparisonOptions(rounds=6, turn_seconds=0, warm_up_seconds=0))

    assert any(mark.startswith("noisy: the rounds' ratios differ by") for mark in found.marks)
