"""MLPerf's server scenario, on a clock that passes only while a stand-in answers or sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from opal_deploy.bench.latency import ServerOptions, measure_server
from opal_deploy.bench.server_scenario import Trial, confirm_rate, draw_arrivals, find_largest_rate, serve
from opal_deploy.statistics.intervals import percentile

SERVICE = 0.010


def serve_for(clock: Any, rate: float, due: Any, *, max_batch: int = 1, limit: float = 1.0, **options: Any) -> Trial:
    """One call takes SERVICE seconds, however many pictures it answers."""
    answered: list[int] = options.pop("answered", [])

    def answer(count: int) -> None:
        answered.append(count)
        clock.spend(SERVICE)

    seconds = {"clock": lambda: clock() / 1e9, "sleep": clock.spend}
    return serve(answer, rate, np.asarray(due), max_batch=max_batch, limit=limit, **seconds)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    due = draw_arrivals(50.0, 1000.0, seed=1)
    gaps = np.diff(due)

    assert len(due) == 50_000
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.02)
    # of an exponential distribution alone: its deviation is its mean
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)
    assert (gaps > 0).all()


def test_a_short_trial_has_a_hundred_queries_still() -> None:
    assert len(draw_arrivals(2.0, 0.1, seed=0)) == 100


def test_another_rate_stretches_the_same_draws() -> None:
    assert np.allclose(draw_arrivals(1.0, 10, seed=3)[:50], 4 * draw_arrivals(4.0, 10, seed=3)[:50])
    assert not np.allclose(draw_arrivals(1.0, 10, seed=3), draw_arrivals(1.0, 10, seed=4))


def test_a_picture_that_arrives_alone_waits_for_nothing(fake_clock: Callable[..., Any]) -> None:
    found = serve_for(fake_clock(), 1.0, [1.0, 2.0, 3.0])

    assert found.latencies.tolist() == pytest.approx([SERVICE] * 3, abs=1e-6)


def test_waiting_counts(fake_clock: Callable[..., Any]) -> None:
    found = serve_for(fake_clock(), 1.0, [1.0, 1.0, 1.0])

    assert found.latencies.tolist() == pytest.approx([SERVICE, 2 * SERVICE, 3 * SERVICE], abs=1e-6)


def test_all_that_have_arrived_are_answered_at_once_up_to_the_largest_batch(fake_clock: Callable[..., Any]) -> None:
    answered: list[int] = []

    # the first alone; four more arrive while it is answered; and one later
    serve_for(fake_clock(), 1.0, [1.0, 1.001, 1.002, 1.003, 1.004, 2.0], max_batch=3, answered=answered)

    assert answered == [1, 3, 1, 1]


def test_a_trial_ends_once_too_many_were_late(fake_clock: Callable[..., Any]) -> None:
    found = serve_for(fake_clock(), 1000.0, draw_arrivals(1000.0, 10, seed=0), limit=0.02)

    assert not found.complete
    assert not found.held
    assert len(found.latencies) < 1000


def test_exactly_the_99th_percentile_is_held_against_the_limit() -> None:
    latencies = np.full(300, 0.001)
    latencies[:2] = 1.0

    assert Trial(1, latencies, 300, True, 0.002).held
    latencies[:4] = 1.0
    assert not Trial(1, latencies, 300, True, 0.002).held


@pytest.mark.parametrize("limit", [0.03, 0.06])
def test_the_largest_rate_is_where_a_queue_of_known_service_time_reaches_the_limit(
    fake_clock: Callable[..., Any], limit: float
) -> None:
    clock = fake_clock()

    def trial(rate: float) -> Trial:
        return serve_for(clock, rate, draw_arrivals(rate, 100.0, seed=0), limit=limit)

    rate, tried = find_largest_rate(trial, 1 / SERVICE)

    assert 0 < rate < 1 / SERVICE
    assert trial(rate).held
    assert not trial(1.1 * rate).held
    # the decay of waiting in a queue with Poisson arrivals and constant service (M/D/1): P(wait > t) ~ exp(-theta t),
    # where rate (exp(theta S) - 1) = theta
    theta = next(t for t in np.linspace(1, 2000, 20_000) if rate * (np.exp(t * SERVICE) - 1) >= t)
    assert np.exp(-theta * (limit - SERVICE)) == pytest.approx(0.01, rel=1.0, abs=0.012)
    assert len(tried) <= 10


def test_a_limit_below_the_service_time_is_held_by_no_rate(fake_clock: Callable[..., Any]) -> None:
    clock = fake_clock()

    rate, tried = find_largest_rate(
        lambda rate: serve_for(clock, rate, draw_arrivals(rate, 1.0, seed=0), limit=0.5 * SERVICE), 100.0
    )

    assert rate == 0
    assert not any(served.held for served in tried)


def test_a_rate_must_hold_with_other_arrivals_too() -> None:
    def trial(rate: float, repeat: int) -> Trial:
        latency = 0.1 if rate > 85 and repeat == 1 else 0.001
        return Trial(rate, np.full(100, latency), 100, True, 0.01)

    rate, held, failed = confirm_rate(trial, 100.0, 3)

    assert rate == pytest.approx(81.0)
    assert len(held) == 3
    assert [served.rate for served in failed] == pytest.approx([100.0, 90.0])


def test_a_model_of_known_service_time(opened: Callable[..., Any]) -> None:
    options = ServerOptions(limit_ms=20, max_batch=4, seconds=0.2, repeats=1, warm_up_seconds=0)

    found = measure_server(opened(0.004), options)

    assert found.kind == "server"
    assert found.case == {"scenario": "server", "limit_ms": 20, "max_batch": 4, "threads": 1}
    # four at once every 4 ms is the most that there can be
    assert 0 < found.figures["queries_per_second"].value < 1000
    assert found.figures["p99_ms"].value <= 20
    assert found.figures["lone_p50_ms"].value == pytest.approx(4, rel=0.2)
    assert all(served["held"] for served in found.details["held"])
    assert max(served["queries"] for served in found.details["tried"]) >= 20


def test_a_limit_that_nothing_can_keep_is_said(opened: Callable[..., Any]) -> None:
    found = measure_server(
        opened(0.01), ServerOptions(limit_ms=5, max_batch=2, seconds=0.1, repeats=1, warm_up_seconds=0)
    )

    assert "queries_per_second" not in found.figures
    assert any(mark.startswith("unattainable: no rate that was tried kept 5 ms") for mark in found.marks)


def test_the_models_largest_batch_is_kept(opened: Callable[..., Any]) -> None:
    model = opened(0.002)

    measure_server(model, ServerOptions(limit_ms=50, max_batch=3, seconds=0.05, repeats=1, warm_up_seconds=0))

    assert set(model.session.batches) <= {1, 2, 3}


def test_percentiles_of_a_trial_are_told() -> None:
    told = Trial(10.0, np.arange(1, 101) / 1e3, 50, True, 1.0).to_dict()

    assert told["p99_ms"] == pytest.approx(1e3 * percentile(np.arange(1, 101) / 1e3, 99))
    assert told["mean_batch"] == 2.0
