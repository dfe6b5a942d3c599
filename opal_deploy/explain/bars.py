"""What the bar of each slot shows, alike on the picture's legend and in the report."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opal_deploy.explain.palette import RGB, slot_color
from opal_deploy.explain.records import Record

COSINE = "contribution to the cosine"
DISTANCE = "part of the distance (smaller: closer)"
SCORE = "score"

# both are float64 sums over one block, in different orders
_SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Bar:
    """One slot's bar.

    Attributes:
        slot, color: which.
        value: the contribution, or the score where there is no contribution.
        score: the slot's score.
        start, stop: the bar's ends, as shares of the room for bars: 0 <= start <= stop <= 1.
    """

    slot: int
    color: RGB
    value: float
    score: float
    start: float
    stop: float


@dataclass(frozen=True)
class Bars:
    """The bars of one record, in slot order, and what their length means: COSINE, DISTANCE or SCORE."""

    meaning: str
    bars: tuple[Bar, ...]


def bars_of(record: Record) -> Bars:
    """The bars of a record's evidence; none without evidence.

    All bars of a record share one scale. For contributions to the cosine, the whole room is at least 1/m: where every
    bar fills it, the cosine is 1. Scores are drawn on 0 ... 1. A negative value's bar points left from a common zero.
    """
    slots = record.get("evidence", [])
    contributions = [s["contribution"] for s in slots]
    known = [c for c in contributions if c is not None]
    if len(known) < len(slots) or not slots:
        meaning, values, full = SCORE, [s["score"] for s in slots], 1.0
    else:
        cosine = record["prediction"]["cosine"] if "prediction" in record else None
        adds_up = cosine is not None and abs(math.fsum(known) - cosine) <= _SUM_TOLERANCE
        meaning, values, full = (COSINE, known, 1.0 / len(known)) if adds_up else (DISTANCE, known, 0.0)
    finite = [v for v in values if math.isfinite(v)]
    high, low = max([0.0, full, *finite]), min([0.0, *finite])
    span = (high - low) or 1.0
    bars = []
    for slot, value in zip(slots, values, strict=True):
        length = value if math.isfinite(value) else 0.0
        start, stop = sorted(((-low) / span, (length - low) / span))
        bars.append(Bar(slot["slot"], slot_color(slot["slot"]), value, slot["score"], start, stop))
    return Bars(meaning, tuple(bars))


def number(value: float | None) -> str:
    """Three decimals, `-0.000` never; a dash where there is no number."""
    if value is None:
        return "–"
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text
