"""MLPerf's server scenario: pictures arrive at random, and the 99th percentile of their waiting must keep a limit.

Arrivals are a Poisson process, drawn beforehand. One loop answers: it takes everything that has arrived, up to
`max_batch`, or sleeps until the next arrival. A picture's latency is the time from its arrival to its answer, so that
waiting counts. The largest rate that keeps the limit is found by bisection, each rate with the same draws, stretched.
It must hold again with other draws; where it does not, a tenth less is tried.

MLPerf asks for 270,336 queries and a minute or more at one rate, and for a load generator outside the process. What is
told here is how long each rate was tried; a percentile of few hundred queries is a rough one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.bench.timing import gc_disabled
from opal_deploy.statistics.intervals import percentile

Answer = Callable[[int], object]
Clock = Callable[[], float]
Sleep = Callable[[float], None]

PERCENT = 99
MIN_QUERIES = 100
# the bisection ends when it knows the rate this well
_PRECISION = 0.05
_MAX_STEPS = 10
# a rate that does not hold again is lowered so often, by so much
_MAX_REDUCTIONS, _REDUCTION = 10, 0.9


@dataclass(frozen=True)
class Trial:
    """One rate, tried once.

    Attributes:
        rate: arrivals a second that were asked for.
        latencies: seconds from arrival to answer, of those that were answered.
        batches: calls that it took.
        complete: whether all were answered; a trial ends early once too many were late for the limit.
        limit: in seconds.
    """

    rate: float
    latencies: NDArray[np.float64]
    batches: int
    complete: bool
    limit: float

    @property
    def held(self) -> bool:
        """Whether the 99th percentile kept the limit."""
        return self.complete and percentile(self.latencies, PERCENT) <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """For the record: what was tried."""
        return {
            "queries_per_second": round(self.rate, 4),
            "queries": len(self.latencies),
            "p50_ms": round(1e3 * percentile(self.latencies, 50), 4),
            "p99_ms": round(1e3 * percentile(self.latencies, PERCENT), 4),
            "mean_batch": round(len(self.latencies) / self.batches, 3),
            "complete": self.complete,
            "held": self.held,
        }


def draw_arrivals(rate: float, seconds: float, *, seed: int) -> NDArray[np.float64]:
    """Seconds at which queries arrive: a Poisson process of `rate` for at least `seconds`, and 100 queries at least."""
    count = max(MIN_QUERIES, int(np.ceil(rate * seconds)))
    gaps = np.random.default_rng(seed).exponential(1.0, count)
    times: NDArray[np.float64] = np.cumsum(gaps) / rate
    return times


def serve(
    answer: Answer,
    rate: float,
    due: NDArray[np.float64],
    *,
    max_batch: int,
    limit: float,
    clock: Clock = time.perf_counter,
    sleep: Sleep = time.sleep,
) -> Trial:
    """Answer queries as they arrive.

    Args:
        answer: answers so many pictures, and returns when that is done.
        rate: that `due` was drawn for.
        due: when queries arrive, in seconds, ascending.
        max_batch: answered at once.
        limit: of the 99th percentile, in seconds.
        clock, sleep: in seconds.
    """
    latencies = np.zeros(len(due))
    done = late = batches = 0
    # with more late ones than this, the percentile is beyond the limit whatever follows
    bearable = len(due) * (1 - PERCENT / 100) + 1
    with gc_disabled():
        start = clock()
        while done < len(due) and late <= bearable:
            now = clock() - start
            waiting = int(np.searchsorted(due, now, side="right")) - done
            if waiting < 1:
                sleep(due[done] - now)
                continue
            taken = min(waiting, max_batch)
            answer(taken)
            finished = clock() - start
            latencies[done : done + taken] = finished - due[done : done + taken]
            late += int((latencies[done : done + taken] > limit).sum())
            done, batches = done + taken, batches + 1
    return Trial(rate, latencies[:done], batches, done == len(due), limit)


def find_largest_rate(trial: Callable[[float], Trial], capacity: float) -> tuple[float, list[Trial]]:
    """The largest rate that holds, to 5 %, by bisection below `capacity`; 0 if none did. And all that was tried.

    Args:
        trial: tries a rate.
        capacity: queries a second that nothing can exceed for long.
    """
    tried: list[Trial] = []
    low, high = 0.0, capacity
    while len(tried) < _MAX_STEPS and high - low > _PRECISION * high:
        tried.append(trial((low + high) / 2))
        if tried[-1].held:
            low = tried[-1].rate
        else:
            high = tried[-1].rate
    return low, tried


def confirm_rate(
    trial: Callable[[float, int], Trial], rate: float, repeats: int
) -> tuple[float, list[Trial], list[Trial]]:
    """The largest of `rate`, nine tenths of it, and so on, that holds in every repeat; 0 if none does.

    Args:
        trial: tries a rate with the arrivals of a repeat.
        rate: what the bisection found.
        repeats: how often a rate must hold.

    Returns:
        the rate, its trials, and the trials that failed.
    """
    failed: list[Trial] = []
    for _ in range(_MAX_REDUCTIONS):
        held: list[Trial] = []
        for number in range(repeats):
            served = trial(rate, number)
            if not served.held:
                failed.append(served)
                break
            held.append(served)
        else:
            return rate, held, failed
        rate *= _REDUCTION
    return 0.0, [], failed
