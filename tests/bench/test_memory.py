"""The memory curve: a leak is found, what is flat is called flat."""

from __future__ import annotations

import json
import platform
import time

import psutil
import pytest

from opal_deploy.bench.memory import POINTS, MemoryCurve, MemorySampler, release_memory


def curve(*megabytes: float) -> MemoryCurve:
    return MemoryCurve(tuple(0.5 * index for index in range(len(megabytes))), megabytes)


def test_start_end_and_peak_are_of_all_samples() -> None:
    found = curve(100, 400, 150, 120)
    assert (found.start, found.end, found.peak) == (100, 120, 400)


def test_what_is_loaded_at_the_beginning_is_no_slope() -> None:
    found = curve(*range(100, 200, 10), *([200.0] * 30))
    assert found.slope == pytest.approx(0)
    assert not found.grows


def test_a_leak_has_its_slope_and_rise() -> None:
    found = curve(*(200 + 3.0 * index for index in range(41)))
    assert found.slope == pytest.approx(6.0)
    assert found.rise == pytest.approx(90.0)
    assert found.grows
    assert "GROWING: +90.0 MB" in found.line()


@pytest.mark.parametrize("rise", [8.0, 40.0])
def test_a_rise_that_is_small_beside_the_whole_is_flat(rise: float) -> None:
    found = curve(*(1000 + rise * index / 40 for index in range(41)))
    assert not found.grows
    assert "flat" in found.line()


def test_a_few_samples_have_no_trend() -> None:
    found = curve(100, 200, 300)
    assert found.slope is None
    assert not found.grows
    assert found.line().endswith("too short for a trend")


@pytest.mark.parametrize("count", [1, 2, 59, 60, 61, 1000])
def test_a_curve_is_thinned_and_keeps_both_ends(count: int) -> None:
    document = json.loads(json.dumps(curve(*map(float, range(count))).to_dict()))
    assert len(document["seconds"]) == len(document["megabytes"]) == min(count, POINTS)
    assert (document["megabytes"][0], document["megabytes"][-1]) == (0, count - 1)
    assert document["samples"] == count


def test_memory_that_a_process_takes_and_gives_back_is_seen() -> None:
    with MemorySampler(0.005) as watch:
        time.sleep(0.05)
        # written to, so that it is resident
        block = bytearray(b"x" * 80_000_000)
        time.sleep(0.1)
        del block
        time.sleep(0.05)

    found = watch.curve

    assert len(found.seconds) > 10
    assert list(found.seconds) == sorted(found.seconds)
    assert found.peak - found.start > 60
    assert found.peak - found.end > 60


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
def test_what_was_freed_is_given_back_to_the_system() -> None:
    process = psutil.Process()
    # too small to be mapped one by one; the last of them keeps the heap from shrinking by itself
    blocks = [bytearray(b"x" * 60_000) for _ in range(2000)]
    last = blocks[-1]
    blocks.clear()
    before = process.memory_info().rss

    release_memory()

    assert before - process.memory_info().rss > 80_000_000
    assert len(last) == 60_000
