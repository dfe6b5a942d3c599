"""Resident memory: a leak is found, a flat curve is called flat, the peak can be reset."""

import json
import mmap
import time

import pytest

from opal_deploy.bench.monitor import (
    MAX_POINTS,
    MemoryCurve,
    MemorySampler,
    peak_memory_mb,
    reset_peak_memory,
)


def curve(*megabytes):
    return MemoryCurve(tuple(0.5 * index for index in range(len(megabytes))), megabytes)


@pytest.mark.parametrize(
    ("megabytes", "rise", "text"),
    [
        ((*range(100, 200, 10), *([200.0] * 30)), 0, "flat: "),
        ([200 + 3.0 * index for index in range(41)], 90.0, "GROWING: +90.0 MB"),
        ([1000 + 8.0 * index / 40 for index in range(41)], 6.0, "flat: +6.0 MB"),
        ([1000 + 40.0 * index / 40 for index in range(41)], 30.0, "flat: +30.0 MB"),
        ([100, 200, 300], None, "too short for a trend"),
    ],
    ids=["loaded at the start", "a leak", "under 10 MB", "under 5 %", "few samples"],
)
def test_growth_is_judged_after_the_first_quarter(megabytes, rise, text):
    memory = curve(*megabytes)
    assert memory.rise == (None if rise is None else pytest.approx(rise, abs=1e-9))
    assert memory.grows is ("GROWING" in text)
    assert text in memory.describe()


@pytest.mark.parametrize("count", [1, 60, 61, 1000])
def test_a_curve_is_thinned_and_keeps_both_ends(count):
    memory = curve(*map(float, range(count)))
    document = json.loads(json.dumps(memory.to_dict()))
    assert len(document["seconds"]) == len(document["megabytes"]) == min(count, MAX_POINTS)
    assert (document["megabytes"][0], document["megabytes"][-1]) == (0, count - 1)
    assert [document[name] for name in ("samples", "start", "end", "peak")] == [count, 0, count - 1, count - 1]


def test_memory_that_a_process_takes_and_frees_is_seen():
    with MemorySampler(0.005) as sampler:
        time.sleep(0.05)
        # mapped, so that it goes back to the system when it is freed; written to, so that it is resident
        block = mmap.mmap(-1, 80_000_000)
        block[::4096] = b"x" * len(range(0, 80_000_000, 4096))
        time.sleep(0.1)
        block.close()
        time.sleep(0.05)
    memory = sampler.curve
    assert len(memory.seconds) > 10
    assert list(memory.seconds) == sorted(memory.seconds)
    assert max(memory.megabytes) - memory.megabytes[0] > 60
    assert max(memory.megabytes) - memory.megabytes[-1] > 60


def test_the_peak_can_be_reset():
    block = bytearray(200 << 20)
    for page in range(0, len(block), 4096):
        block[page] = 1
    high = peak_memory_mb()
    del block
    reset_peak_memory()
    # where the system cannot reset it, it stays
    assert peak_memory_mb() < high - 100 or peak_memory_mb() == high
