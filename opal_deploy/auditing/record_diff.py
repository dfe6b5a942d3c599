"""Does a recorded explanation equal what was computed again? Field by field, and how near is near enough.

Discrete things (names, classes, slots, digests, sizes, codes) must be equal, numbers within a tolerance: the same file
on the same runtime gives the same bits, another machine's kernels sum in another order. Ties, which rounding decides:

    a cell     may be another one if its value is within `tie` of the largest, relative to it. That takes the attention
               maps: without them, in a model exported without `attention`, every other cell is a difference.
    the class  may be another one if both margins are within twice the cosine's tolerance; the slots, which are then
               those of another class, are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.records.record import Record
from opal_deploy.runtime.verification import GATES, Gate

# not computed: what a person was given or gave (`image` is how the picture was found, `name` a slot's)
GIVEN = frozenset({"image", "overlay", "sheet", "truth", "name"})
_BOX = 1e-6

# whether the recorded [row, col] of a channel is as good as the computed one
Tied = Callable[[int, Sequence[int]], bool]


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be apart.

    Attributes:
        cosine: cosines, margins and contributions, absolute. logit: relative to max(1, |logit|). score: absolute.
        tie: relative lead of a cell under which another one counts as equal.
    """

    cosine: float
    logit: float
    score: float
    tie: float

    @staticmethod
    def of(metadata: Metadata) -> Tolerance:
        """What another machine may make of the same file: for fp32 the gate of `verify M`; else what rounding explains.

        A lower precision's gate compares it with fp32, and would let far too much pass here.
        """
        if metadata.precision != "fp32":
            return _LOWER[metadata.precision]
        recorded = metadata.verification.get("gate")
        gate = (Gate(**recorded) if recorded else GATES["fp32"]).relaxed_for_machine()
        return Tolerance(gate.cosine, gate.logit, gate.score, gate.tie)


# ten units in the last place of the body's format, at values near 1; int8 kernels differ in how they saturate
_LOWER = {
    "fp16": Tolerance(cosine=5e-3, logit=1e-2, score=1e-2, tie=1e-2),
    "bf16": Tolerance(cosine=4e-2, logit=8e-2, score=8e-2, tie=8e-2),
    "int8": Tolerance(cosine=4e-2, logit=8e-2, score=8e-2, tie=8e-2),
}


@dataclass(frozen=True)
class Difference:
    """One field that is not what was computed. `field` is a path such as `evidence[2].box`."""

    field: str
    recorded: Any
    computed: Any

    def __str__(self) -> str:
        """One line for a person."""
        return f"{self.field} is recorded as {_shown(self.recorded)}, computed as {_shown(self.computed)}"


def diff_records(
    recorded: Record, computed: Record, tolerance: Tolerance, tied: Tied = lambda channel, cell: False
) -> list[Difference]:
    """Where a record is not what was computed for its image; empty if it is.

    Args:
        recorded: the record in question; anything that JSON can hold may be in it.
        computed: what the model answers, with all its classes in `top`.
        tolerance: for numbers.
        tied: whether another cell is as good.
    """
    return list(_differences(dict(recorded), dict(computed), tolerance, tied))


def _differences(
    recorded: dict[str, Any], computed: dict[str, Any], tolerance: Tolerance, tied: Tied
) -> Iterator[Difference]:
    keys = [key for key in dict.fromkeys([*computed, *recorded]) if key not in GIVEN]
    margins = [_number(recorded.get("margin")), _number(computed.get("margin"))]
    close_call = all(m is not None and abs(m) <= 2 * tolerance.cosine for m in margins)
    other_class = _class(recorded) != _class(computed)
    for key in keys:
        old, new = recorded.get(key, _Absent()), computed.get(key, _Absent())
        if isinstance(old, _Absent) or isinstance(new, _Absent):
            yield Difference(key, old, new)
        elif key == "prediction" and close_call and other_class:
            yield from _answer_among("prediction", old, computed.get("top"), tolerance)
        elif key == "prediction":
            yield from _answer("prediction", old, new, tolerance)
        elif key == "top":
            yield from _top(old, new, recorded, tolerance)
        elif key == "evidence":
            if not (close_call and other_class):
                yield from _evidence(old, new, tolerance, tied)
        elif key == "error":
            yield from _object(key, old, new, {})
        elif key == "margin":
            yield from _near(key, old, new, 2 * tolerance.cosine)
        elif old != new or type(old) is not type(new):
            yield Difference(key, old, new)


def _class(record: dict[str, Any]) -> Any:
    answer = record.get("prediction")
    return answer.get("class_id") if isinstance(answer, dict) else None


def _answer(field: str, old: Any, new: Mapping[str, Any], tolerance: Tolerance) -> Iterator[Difference]:
    yield from _object(
        field,
        old,
        new,
        {
            "logit": lambda f, a, b: _near(f, a, b, tolerance.logit * max(1.0, abs(b))),
            "cosine": lambda f, a, b: _near(f, a, b, tolerance.cosine),
        },
    )


def _answer_among(field: str, old: Any, every: Any, tolerance: Tolerance) -> Iterator[Difference]:
    """An answer against that for the same class, whatever its rank."""
    same = [answer for answer in every or [] if isinstance(old, dict) and answer["class_id"] == old.get("class_id")]
    if same:
        yield from _answer(field, old, same[0], tolerance)
    else:
        yield Difference(f"{field}.class_id", old.get("class_id") if isinstance(old, dict) else old, "no such class")


def _top(old: Any, new: list[Any], recorded: dict[str, Any], tolerance: Tolerance) -> Iterator[Difference]:
    if not isinstance(old, list) or not 0 < len(old) <= len(new):
        yield Difference("top", old, new)
        return
    seen = set()
    for rank, answer in enumerate(old):
        found = list(_answer_among(f"top[{rank}]", answer, new, tolerance))
        yield from found
        if found:
            continue
        # of equal logits any may come first
        lead = abs(answer["logit"] - new[rank]["logit"])
        if answer["class_id"] in seen or lead > 2 * tolerance.logit * max(1.0, abs(new[rank]["logit"])):
            yield Difference(f"top[{rank}].class_id", answer["class_id"], new[rank]["class_id"])
        seen.add(answer["class_id"])
    if old[0] != recorded.get("prediction"):
        yield Difference("top[0]", old[0], recorded.get("prediction"))


def _evidence(old: Any, new: list[Any], tolerance: Tolerance, tied: Tied) -> Iterator[Difference]:
    if not isinstance(old, list) or len(old) != len(new):
        yield Difference("evidence", old, new)
        return
    for index, (one, other) in enumerate(zip(old, new, strict=True)):
        field = f"evidence[{index}]"
        cell: Any = one.get("cell") if isinstance(one, dict) else None
        expected = other
        if cell != other["cell"] and _is_cell(cell) and tied(other["channel"], cell):
            # the box belongs to the cell: as far from the computed one as the cells are apart
            expected = {**other, "cell": cell, "box": _box_of(cell, other)}
        yield from _object(
            field,
            one,
            expected,
            {
                "score": lambda f, a, b: _near(f, a, b, tolerance.score),
                "contribution": lambda f, a, b: _near(f, a, b, tolerance.cosine),
                "box": _box,
            },
        )


def _is_cell(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(v) is int and v >= 0 for v in value)


def _box_of(cell: list[int], slot: Mapping[str, Any]) -> list[float]:
    (row, col), (x0, y0, x1, y1) = slot["cell"], slot["box"]
    across, down = (cell[1] - col) * (x1 - x0), (cell[0] - row) * (y1 - y0)
    return [x0 + across, y0 + down, x1 + across, y1 + down]


_Compare = Callable[[str, Any, Any], Iterator[Difference]]


def _object(field: str, old: Any, new: Mapping[str, Any], special: Mapping[str, _Compare]) -> Iterator[Difference]:
    if not isinstance(old, dict):
        yield Difference(field, old, new)
        return
    for key in dict.fromkeys([*new, *old]):
        if key in GIVEN:
            continue
        a, b = old.get(key, _Absent()), new.get(key, _Absent())
        where = f"{field}.{key}"
        if isinstance(a, _Absent) or isinstance(b, _Absent):
            yield Difference(where, a, b)
        elif key in special:
            yield from special[key](where, a, b)
        elif a != b or type(a) is not type(b):
            yield Difference(where, a, b)


def _near(field: str, old: Any, new: Any, allowed: float) -> Iterator[Difference]:
    a, b = _number(old), _number(new)
    nothing = old is None and new is None
    if not nothing and (a is None or b is None or abs(a - b) > allowed):
        yield Difference(field, old, new)


def _box(field: str, old: Any, new: Any) -> Iterator[Difference]:
    numbers = [_number(value) for value in old] if isinstance(old, list) else []
    if len(numbers) != 4 or any(
        a is None or abs(a - b) > _BOX * max(1.0, abs(b)) for a, b in zip(numbers, new, strict=True)
    ):
        yield Difference(field, old, new)


def _number(value: Any) -> float | None:
    """A finite number; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class _Absent:
    """Stands for a key that is not there."""

    def __repr__(self) -> str:
        return "nothing"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
