"""The timer against calls whose length is known, and its inputs of noise."""

import gc
import itertools

import numpy as np
import pytest

from opal_deploy.bench.options import TimingOptions
from opal_deploy.bench.timing import Batches, random_batches, time_calls, time_repeats, warm_up


def repeats(seconds, iterations, repeats, warmup=0):
    return TimingOptions(seconds=seconds, iterations=iterations, repeats=repeats, warmup=warmup)


def test_calls_are_timed_from_their_begin_to_their_end(fake_clock):
    clock, lengths = fake_clock(), itertools.cycle([0.25, 0.5])
    timing = time_repeats(Batches(lambda _: clock.spend(next(lengths))), repeats(0.1, 6, 2), clock=clock)
    assert sorted(np.concatenate(timing.repeats)) == [0.25] * 6 + [0.5] * 6
    assert timing.elapsed == (2.25, 2.25)
    assert timing.throughput(4).repeats == pytest.approx([4 * 6 / 2.25] * 2)


def test_a_repeat_has_its_iterations_and_seconds(fake_clock):
    for length, options, calls in ((1, repeats(2, 7, 3), [7] * 3), (0.5, repeats(10, 2, 2), [20] * 2)):
        clock = fake_clock()
        timing = time_repeats(Batches(lambda _, clock=clock, length=length: clock.spend(length)), options, clock=clock)
        assert [len(repeat) for repeat in timing.repeats] == calls
        assert timing.elapsed == tuple(length * count for count in calls)
        assert set(np.concatenate(timing.repeats)) == {length}


def test_the_warm_up_is_discarded_and_counted(fake_clock):
    clock = fake_clock()
    lengths = iter([90.0, 50.0, 30.0, 2.0, *[1.0] * 1000])
    timing = time_repeats(Batches(lambda _: clock.spend(next(lengths))), repeats(1, 10, 1, warmup=3), clock=clock)
    # three calls that compile are no warm-up; three seconds later the last five calls did not take equally long yet
    assert (timing.warm_up.calls, timing.warm_up.seconds, timing.warm_up.stable) == (9, 177, True)
    assert timing.repeats[0].tolist() == [1.0] * 10
    assert timing.settings()["warm_up_iterations"] == 9


def test_the_warm_up_of_an_unstable_machine_ends(fake_clock):
    clock = fake_clock(slower=1.5)
    warmed = warm_up(Batches(lambda _: clock.spend(1)), 4, clock=clock)
    assert not warmed.stable
    assert 20 <= warmed.seconds < 40


def test_a_call_gets_its_number_and_no_garbage_is_collected_meanwhile(fake_clock):
    calls = []
    time_repeats(Batches(lambda number: calls.append((number, gc.isenabled()))), repeats(0, 4, 2))
    assert calls[-8:] == [(number, False) for number in (0, 1, 2, 3, 0, 1, 2, 3)]
    clock = fake_clock()
    assert time_calls(Batches(lambda _: clock.spend(0.25)), 8, clock=clock) == 2.0
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        time_calls(Batches(lambda _: 1 / 0), 1)
    assert gc.isenabled()


def test_noise_is_the_same_for_the_same_seed_and_has_all_values():
    first, second, _ = batches = random_batches(3, 2, (4, 6))
    assert [(b.shape, b.dtype) for b in batches] == [((2, 4, 6, 3), np.dtype(np.uint8))] * 3
    assert not np.array_equal(first, second)
    assert all(np.array_equal(a, b) for a, b in zip(batches, random_batches(3, 2, (4, 6)), strict=True))
    assert not np.array_equal(first, random_batches(1, 2, (4, 6), seed=1)[0])
    (large,) = random_batches(1, 1, (100, 100))
    assert (large.min(), large.max()) == (0, 255)
