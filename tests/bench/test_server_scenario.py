"""MLPerf's server scenario, on a clock that passes only while a fake runs or sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opal_deploy.bench.server_scenario import (
    ServerOptions,
    Trial,
    confirm_rate,
    draw_arrivals,
    find_largest_rate,
    measure_server,
    serve,
)
from opal_deploy.bench.timing import TimingOptions

SERVICE = 0.010


def serve_queries(
    clock: Any, rate: float, due: Any, *, max_batch: int = 1, limit: float = 1.0, min_seconds: float = 1e9
) -> tuple[Trial, list]:
    """Serve with calls of SERVICE seconds, however many images they have; returns the sizes of the calls too."""
    sizes: list[int] = []

    def run_batch(count: int) -> None:
        sizes.append(count)
        clock.spend(SERVICE)

    seconds = {"clock": lambda: clock() / 1e9, "sleep": clock.spend}
    return serve(
        run_batch, rate, np.asarray(due), max_batch=max_batch, limit=limit, min_seconds=min_seconds, **seconds
    ), sizes


def test_arrivals_are_a_poisson_process_that_another_rate_stretches() -> None:
    due = draw_arrivals(50.0, 1000.0, seed=1)
    gaps = np.diff(due)
    assert len(due) == 50_000
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.02)
    # true of an exponential distribution alone
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)
    assert (gaps > 0).all()
    assert len(draw_arrivals(2.0, 0.1, seed=0)) == 100
    # enough for as many calls, however many images each of them takes
    assert len(draw_arrivals(2.0, 0.1, seed=0, max_batch=8)) == 800
    assert np.allclose(draw_arrivals(1.0, 10, seed=3)[:50], 4 * draw_arrivals(4.0, 10, seed=3)[:50])
    assert not np.allclose(draw_arrivals(1.0, 10, seed=3), draw_arrivals(1.0, 10, seed=4))


@pytest.mark.parametrize(
    ("due", "max_batch", "sizes", "latencies"),
    [
        ([1.0, 2.0, 3.0], 1, [1, 1, 1], [SERVICE] * 3),
        ([1.0, 1.0, 1.0], 1, [1, 1, 1], [SERVICE, 2 * SERVICE, 3 * SERVICE]),
        # the first alone; four more arrive meanwhile; and one later
        ([1.0, 1.001, 1.002, 1.003, 1.004, 2.0], 3, [1, 3, 1, 1], [0.010, 0.019, 0.018, 0.017, 0.026, 0.010]),
    ],
    ids=["alone", "waiting", "in batches"],
)
def test_all_that_wait_are_served_together_and_latency_includes_waiting(
    fake_clock: Callable[..., Any], due: list[float], max_batch: int, sizes: list[int], latencies: list[float]
) -> None:
    trial, served = serve_queries(fake_clock(), 1.0, due, max_batch=max_batch)
    assert served == sizes
    assert trial.latencies.tolist() == pytest.approx(latencies, abs=1e-6)


def test_the_limit_is_of_the_99th_percentile_and_a_trial_ends_once_too_many_were_late(
    fake_clock: Callable[..., Any],
) -> None:
    for late, holds in ((2, True), (4, False)):
        latencies = np.full(300, 0.001)
        latencies[:late] = 1.0
        assert Trial(1, latencies, 300, True, 0.002).within_limit is holds
    trial, _ = serve_queries(fake_clock(), 1000.0, draw_arrivals(1000.0, 10, seed=0), limit=0.02)
    assert (trial.complete, trial.within_limit) == (False, False)
    assert len(trial.latencies) < 1000


@pytest.mark.parametrize("limit", [0.03, 0.06])
def test_the_largest_rate_of_a_queue_with_known_service_time(fake_clock: Callable[..., Any], limit: float) -> None:
    clock = fake_clock()

    def try_rate(rate: float) -> Trial:
        return serve_queries(clock, rate, draw_arrivals(rate, 100.0, seed=0), limit=limit)[0]

    rate, tried = find_largest_rate(try_rate, 1 / SERVICE)
    assert 0 < rate < 1 / SERVICE
    assert try_rate(rate).within_limit
    assert not try_rate(1.1 * rate).within_limit
    # the decay of waiting in a queue with Poisson arrivals and constant service (M/D/1): P(wait > t) ~ exp(-theta t),
    # where rate (exp(theta S) - 1) = theta
    theta = next(t for t in np.linspace(1, 2000, 20_000) if rate * (np.exp(t * SERVICE) - 1) >= t)
    assert np.exp(-theta * (limit - SERVICE)) == pytest.approx(0.01, rel=1.0, abs=0.012)
    assert len(tried) <= 10


def test_a_rate_must_hold_with_other_arrivals_too() -> None:
    def try_rate(rate: float, repeat: int) -> Trial:
        latency = 0.1 if rate > 85 and repeat == 1 else 0.001
        return Trial(rate, np.full(100, latency), 100, True, 0.01)

    rate, passed, failed = confirm_rate(try_rate, 100.0, 3)
    assert rate == pytest.approx(81.0)
    assert len(passed) == 3
    assert [trial.rate for trial in failed] == pytest.approx([100.0, 90.0])


def test_a_model_of_known_service_time(fake_target: Callable[..., Any], fake_time: Any) -> None:
    model = fake_target(0.004, fake_time.spend)
    measurement = measure_server(model, ServerOptions(20, 4, TimingOptions(0.2, repeats=1, warm_up_seconds=0)))
    assert measurement.kind == "server"
    assert measurement.case == {"scenario": "server", "limit_ms": 20, "max_batch": 4, "threads": 1}
    # at most four images every 4 ms
    assert 0 < measurement.figures["queries_per_second"].value < 1000
    assert measurement.figures["p99_ms"].value <= 20
    assert measurement.figures["lone_p50_ms"].value == pytest.approx(4)
    assert all(trial["held"] for trial in measurement.details["held"])
    assert 1 <= measurement.figures["mean_batch"].value <= 4
    assert max(trial["queries"] for trial in measurement.details["tried"]) >= 20
    assert set(model.session.batches) <= {1, 2, 3, 4}


def test_an_unattainable_limit_is_marked(fake_target: Callable[..., Any], fake_time: Any) -> None:
    options = ServerOptions(5, 2, TimingOptions(0.1, repeats=1, warm_up_seconds=0))
    measurement = measure_server(fake_target(0.01, fake_time.spend), options)
    assert "queries_per_second" not in measurement.figures
    mark = next(mark for mark in measurement.marks if mark.startswith("unattainable"))
    assert "3 of 3 single images alone already took longer than 5 ms (median 10.00 ms)" in mark
    assert measurement.details["tried"] == []


def test_the_search_ends_where_waiting_is_not_what_makes_images_late(fake_clock: Callable[..., Any]) -> None:
    rates: list[float] = []

    def try_rate(rate: float) -> Trial:
        rates.append(rate)
        return Trial(rate, np.full(100, 1.0), 100, True, 0.5)

    assert find_largest_rate(try_rate, 64.0, 3.0)[0] == 0
    assert rates == [32, 16, 8, 4]


def test_a_trial_lasts_for_a_hundred_calls_as_queries_of_one_call_are_late_together(
    fake_clock: Callable[..., Any],
) -> None:
    # some four arrive during each call
    due = draw_arrivals(400, 0.1, seed=0, max_batch=32)
    trial, sizes = serve_queries(fake_clock(), 400, due, max_batch=32, min_seconds=0)
    assert trial.complete
    assert (trial.batches, len(sizes)) == (100, 100)
    assert 300 < len(trial.latencies) == sum(sizes) < 500
