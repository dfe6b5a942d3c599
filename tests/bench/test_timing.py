"""The timer against calls whose length is known."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opal_deploy.bench.timing import time_calls, time_repeats, warm_up


def test_a_known_sleep_is_found_within_five_percent() -> None:
    found = time_repeats(lambda _: time.sleep(0.02), seconds=0.2, iterations=5, repeats=2, warm_up_seconds=0)

    assert np.median(found.latencies) == pytest.approx(0.02, rel=0.05)
    assert np.median(found.rates(4)) == pytest.approx(4 / 0.02, rel=0.05)


def test_each_repeat_has_at_least_so_many_iterations(fake_clock: Callable[..., Any]) -> None:
    clock = fake_clock()

    found = time_repeats(lambda _: clock.spend(1), seconds=2, iterations=7, repeats=3, warm_up_seconds=0, clock=clock)

    assert [len(calls) for calls in found.repeats] == [7, 7, 7]
    assert found.elapsed == (7, 7, 7)


def test_each_repeat_lasts_at_least_so_long(fake_clock: Callable[..., Any]) -> None:
    clock = fake_clock()

    found = time_repeats(
        lambda _: clock.spend(0.5), seconds=10, iterations=2, repeats=2, warm_up_seconds=0, clock=clock
    )

    assert [len(calls) for calls in found.repeats] == [20, 20]
    assert found.latencies.tolist() == [0.5] * 40


def test_the_warm_up_is_thrown_away_and_counted(fake_clock: Callable[..., Any]) -> None:
    clock = fake_clock()
    lengths = iter([9.0, 5.0, 3.0, *[1.0] * 1000])

    found = time_repeats(
        lambda _: clock.spend(next(lengths)), seconds=1, iterations=10, repeats=1, warm_up_seconds=10, clock=clock
    )

    # 17 seconds had passed after three calls, but only after eight the last five took equally long
    assert (found.warm_up.calls, found.warm_up.seconds, found.warm_up.stable) == (8, 22, True)
    assert found.latencies.tolist() == [1.0] * 10
    assert found.settings()["warm_up_iterations"] == 8


def test_a_machine_that_never_settles_is_not_waited_for_for_ever(fake_clock: Callable[..., Any]) -> None:
    clock = fake_clock(slower=1.5)

    found = warm_up(lambda _: clock.spend(1), 4, clock=clock)

    assert not found.stable
    assert 20 <= found.seconds < 40


def test_the_call_knows_its_number_so_that_it_can_rotate_its_inputs() -> None:
    seen: list[int] = []

    time_repeats(seen.append, seconds=0, iterations=4, repeats=2, warm_up_seconds=0)

    assert seen[-8:] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_nothing_is_collected_while_timing_and_the_collector_is_put_back() -> None:
    states: list[bool] = []

    time_repeats(lambda _: states.append(gc.isenabled()), seconds=0, iterations=3, repeats=1, warm_up_seconds=0)

    assert not any(states)
    assert gc.isenabled()


def test_the_collector_is_put_back_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        time_calls(lambda _: 1 / 0, 1)

    assert gc.isenabled()


def test_several_calls_together(fake_clock: Callable[..., Any]) -> None:
    clock = fake_clock()

    assert time_calls(lambda _: clock.spend(0.25), 8, clock=clock) == 2.0
