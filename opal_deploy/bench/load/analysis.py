"""Figures of what each request got, and of memory."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

Outcome = Literal["right", "refused", "wrong"]
HOSTILE = "hostile: "
# of the curve of memory
_POINTS = 60


@dataclass(frozen=True)
class Sent:
    """A request and what came of it.

    Attributes:
        start: seconds since 1970.
        name: of its kind.
        ms: milliseconds until its answer.
        status: of HTTP; 0 where no answer came.
        outcome: `refused` is a 429.
        problem: what was wrong.
    """

    start: float
    name: str
    ms: float
    status: int
    outcome: Outcome
    problem: str

    @property
    def end(self) -> float:
        """Seconds since 1970 at its answer."""
        return self.start + self.ms / 1e3


def read_log(path: Path) -> list[Sent]:
    """Return the requests in a log of `locustfile`."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            Sent(float(row["start"]), row["name"], float(row["ms"]), int(row["status"]), row["outcome"], row["problem"])  # type: ignore[arg-type]
            for row in csv.DictReader(stream)
        ]


def split_hostile(sent: Iterable[Sent]) -> tuple[list[Sent], list[Sent]]:
    """Return the requests for photographs, and those of hostile users."""
    found = list(sent)
    return (
        [one for one in found if not one.name.startswith(HOSTILE)],
        [one for one in found if one.name.startswith(HOSTILE)],
    )


def summarize(sent: Sequence[Sent], seconds: float) -> dict[str, Any]:
    """Return counts, rates and percentiles; the latter of right answers alone.

    Args:
        sent: the requests.
        seconds: time in which they were sent.
    """
    outcomes = Counter(one.outcome for one in sent)
    right = [one.ms for one in sent if one.outcome == "right"]
    percentiles = {f"p{share}_ms": _round(np.percentile(right, share)) for share in (50, 90, 99)} if right else {}
    problems = Counter(f"{one.name}: {one.problem}" for one in sent if one.outcome == "wrong")
    return {
        "requests": len(sent),
        "right": outcomes["right"],
        "refused_429": outcomes["refused"],
        "wrong": outcomes["wrong"],
        "right_per_second": _round(outcomes["right"] / seconds),
        "offered_per_second": _round(len(sent) / seconds),
        **percentiles,
        **({"max_ms": _round(max(right))} if right else {}),
        "problems": dict(problems.most_common(20)),
        "by_name": {
            name: dict(Counter(one.outcome for one in sent if one.name == name))
            for name in sorted({one.name for one in sent})
        },
    }


def p99_last_over_first(sent: Sequence[Sent], window: float) -> dict[str, float] | None:
    """Return the p99 in ms of the first and of the last `window` seconds, and their ratio; None without answers."""
    right = [one for one in sent if one.outcome == "right"]
    if not right:
        return None
    begin, end = min(one.start for one in right), max(one.start for one in right)
    first = np.percentile([one.ms for one in right if one.start <= begin + window], 99)
    last = np.percentile([one.ms for one in right if one.start >= end - window], 99)
    return {"window_seconds": window, "first_ms": _round(first), "last_ms": _round(last), "ratio": _round(last / first)}


def memory_slope(samples: Sequence[tuple[float, float]], skip: float = 0.2) -> dict[str, Any] | None:
    """Return megabytes at the start, at the end, at most and over time, and the least-squares slope in MB a minute.

    Args:
        samples: seconds and megabytes.
        skip: share of the time that is left out of the slope: caches fill up and decoders start.
    """
    if len(samples) < 3:
        return None
    times, megabytes = np.array(samples, dtype=np.float64).T
    kept = times >= times[0] + skip * (times[-1] - times[0])
    slope = np.polyfit(times[kept] - times[0], megabytes[kept], 1)[0]
    return {
        "first_mb": _round(megabytes[0]),
        "last_mb": _round(megabytes[-1]),
        "max_mb": _round(megabytes.max()),
        "slope_mb_per_minute": _round(60 * slope),
        "slope_without_first_seconds": _round(skip * (times[-1] - times[0])),
        "seconds_and_mb": [[round(t - times[0]), round(mb, 1)] for t, mb in samples[:: -(-len(samples) // _POINTS)]],
    }


def _round(value: float) -> float:
    return round(float(value), 3)
