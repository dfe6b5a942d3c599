"""Comparison of a recorded explanation with a computed one, field by field.

Discrete fields (names, classes, slots, digests, sizes, codes) must be equal, numbers within a tolerance: the same file
on the same runtime gives the same bits, but kernels of other machines sum in another order. Rounding decides ties:

    a cell     may differ if its value is within `tie` of the largest (relative). This needs the attention maps: without
               `attention` among the model's outputs, every other cell is a difference.
    the class  may differ if both margins are within twice the cosine's tolerance; slots are then not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import PER_IMAGE
from opal_deploy.runtime.gates import Gate

# fields that no model computes
NOT_COMPUTED = frozenset({"image", "image_index", "overlay", "sheet", "drawing_error", "label", "signature"})
_UNREADABLE = ("not_an_image", "truncated_image", "corrupt_image", "unsupported_image")
_PROBABILITY = "calibrated_probability"
# relative
_BOX_TOLERANCE = 1e-6


class _Absent:
    """The value of a missing key."""

    def __repr__(self) -> str:
        return "nothing"


_ABSENT: Any = _Absent()

# returns whether the recorded [row, col] of a channel ties with the computed one
IsTied = Callable[[int, Sequence[int]], bool]


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted differences of numbers.

    Attributes:
        cosine: of cosines, margins and contributions, absolute.
        logit: relative to max(1, |logit|).
        score: absolute.
        tie: relative lead of a cell under which another one counts as equal.
        others: of each output with one number per image, by name, absolute.
        temperature: of calibrated probabilities, which follow from logits that may differ; None for a model without.
    """

    cosine: float
    logit: float
    score: float
    tie: float
    others: Mapping[str, float]
    temperature: float | None = None

    @staticmethod
    def for_model(metadata: Metadata) -> Tolerance:
        """Return the differences that another machine may cause with the same file.

        For fp32 that is the gate of `verify MODEL`. A lower precision's gate compares it with fp32, which would let far
        too much pass, so its tolerances cover only rounding.
        """
        if metadata.precision != "fp32":
            return replace(_LOW_PRECISION[metadata.precision], temperature=metadata.temperature)
        gate = Gate.of_model(metadata).relaxed_for_machine()
        return Tolerance(gate.cosine, gate.logit, gate.score, gate.tie, gate.others, metadata.temperature)

    def describe(self) -> str:
        """Return the main tolerances in words."""
        return f"cosine {self.cosine:g}, score {self.score:g}, logit {self.logit:g} relative"

    def of_logit(self, logit: float) -> float:
        """Return the largest accepted difference of a logit, absolute."""
        return self.logit * max(1.0, abs(logit))

    def of_probability(self, logit: float) -> float:
        """Return the largest accepted difference of the calibrated probability of a class with this logit, absolute.

        With p = softmax(l / T), logits that differ by d each change p by at most 2 d p (1 - p) / T, which is d / (2 T)
        or less.
        """
        return 0.0 if self.temperature is None else self.of_logit(logit) / (2.0 * self.temperature)


# ten units in the last place of the body's format, at values near 1; int8 kernels differ in how they saturate
_LOW_PRECISION = {
    "fp16": Tolerance(cosine=5e-3, logit=1e-2, score=1e-2, tie=1e-2, others=dict.fromkeys(PER_IMAGE, 1e-2)),
    "bf16": Tolerance(cosine=4e-2, logit=8e-2, score=8e-2, tie=8e-2, others=dict.fromkeys(PER_IMAGE, 4e-2)),
    "int8": Tolerance(cosine=4e-2, logit=8e-2, score=8e-2, tie=8e-2, others=dict.fromkeys(PER_IMAGE, 4e-2)),
}


@dataclass(frozen=True)
class FieldDifference:
    """One field whose recorded value is not the computed one; `field` is a path such as `evidence[2].box`."""

    field: str
    recorded: Any
    computed: Any

    def __str__(self) -> str:
        """Return one line for a person."""
        return f"{self.field} is recorded as {_format_value(self.recorded)}, computed as {_format_value(self.computed)}"


def diff_records(
    recorded: dict[str, Any],
    computed: dict[str, Any],
    tolerance: Tolerance,
    is_tied: IsTied = lambda channel, cell: False,
) -> list[FieldDifference]:
    """Return the fields of a record's document, which may hold any JSON, that differ from the one computed now.

    The computed document has all of the model's classes in `top`.
    """
    return list(_compare_records(recorded, computed, tolerance, is_tied))


def _compare_records(
    recorded: dict[str, Any], computed: dict[str, Any], tolerance: Tolerance, is_tied: IsTied
) -> Iterator[FieldDifference]:
    keys = [key for key in dict.fromkeys([*computed, *recorded]) if key not in NOT_COMPUTED]
    margins = [_finite_number(recorded.get("margin")), _finite_number(computed.get("margin"))]
    close_call = all(m is not None and abs(m) <= 2 * tolerance.cosine for m in margins)
    undecided = close_call and _class_id(recorded) != _class_id(computed)
    for key in keys:
        old, new = recorded.get(key, _ABSENT), computed.get(key, _ABSENT)
        if old is _ABSENT or new is _ABSENT:
            yield FieldDifference(key, old, new)
        elif key == "prediction" and undecided:
            yield from _compare_answer_of_class(key, old, computed.get("top"), tolerance)
        elif key == "prediction":
            yield from _compare_answer(key, old, new, tolerance)
        elif key == "top":
            yield from _compare_top(old, new, recorded, tolerance)
        elif key == "evidence":
            if not undecided:
                yield from _compare_evidence(old, new, tolerance, is_tied)
        elif key == "error":
            # messages may change between versions
            yield from _compare_object(key, old, new, {"code": _compare_code, "message": lambda *_: iter(())})
        elif key == "margin":
            yield from _compare_number(key, old, new, 2 * tolerance.cosine)
        elif key in tolerance.others:
            yield from _compare_number(key, old, new, tolerance.others[key])
        elif old != new or type(old) is not type(new):
            yield FieldDifference(key, old, new)


def _class_id(record: dict[str, Any]) -> Any:
    answer = record.get("prediction")
    return answer.get("class_id") if isinstance(answer, dict) else None


def _compare_answer(field: str, old: Any, new: Mapping[str, Any], tolerance: Tolerance) -> Iterator[FieldDifference]:
    comparisons: dict[str, _Comparison] = {
        "logit": lambda f, a, b: _compare_number(f, a, b, tolerance.of_logit(b)),
        "cosine": lambda f, a, b: _compare_number(f, a, b, tolerance.cosine),
        _PROBABILITY: lambda f, a, b: _compare_number(f, a, b, tolerance.of_probability(new["logit"])),
    }
    yield from _compare_object(field, old, new, comparisons)


def _compare_answer_of_class(field: str, old: Any, answers: Any, tolerance: Tolerance) -> Iterator[FieldDifference]:
    """Compare an answer with the computed answer of the same class at any rank."""
    class_id = old.get("class_id") if isinstance(old, dict) else old
    same = [answer for answer in answers or [] if isinstance(old, dict) and answer["class_id"] == class_id]
    if same:
        yield from _compare_answer(field, old, same[0], tolerance)
    else:
        yield FieldDifference(f"{field}.class_id", class_id, "no such class")


def _compare_top(old: Any, new: list[Any], recorded: dict[str, Any], tolerance: Tolerance) -> Iterator[FieldDifference]:
    if not isinstance(old, list) or not 0 < len(old) <= len(new):
        yield FieldDifference("top", old, new)
        return
    seen = set()
    for rank, answer in enumerate(old):
        differences = list(_compare_answer_of_class(f"top[{rank}]", answer, new, tolerance))
        yield from differences
        if differences:
            continue
        # equal logits may come in any order
        lead = abs(answer["logit"] - new[rank]["logit"])
        if answer["class_id"] in seen or lead > 2 * tolerance.of_logit(new[rank]["logit"]):
            yield FieldDifference(f"top[{rank}].class_id", answer["class_id"], new[rank]["class_id"])
        seen.add(answer["class_id"])
    if old[0] != recorded.get("prediction"):
        yield FieldDifference("top[0]", old[0], recorded.get("prediction"))


def _compare_evidence(old: Any, new: list[Any], tolerance: Tolerance, is_tied: IsTied) -> Iterator[FieldDifference]:
    if not isinstance(old, list) or len(old) != len(new):
        yield FieldDifference("evidence", old, new)
        return
    comparisons: dict[str, _Comparison] = {
        "score": lambda f, a, b: _compare_number(f, a, b, tolerance.score),
        "contribution": lambda f, a, b: _compare_number(f, a, b, tolerance.cosine),
        "box": _compare_box,
    }
    for index, (one, other) in enumerate(zip(old, new, strict=True)):
        field = f"evidence[{index}]"
        cell: Any = one.get("cell") if isinstance(one, dict) else None
        expected = other
        if cell != other["cell"] and _is_cell(cell) and is_tied(other["channel"], cell):
            # the box belongs to the cell: as far from the computed one as the cells are apart
            expected = {**other, "cell": cell, "box": _shift_box(cell, other)}
        yield from _compare_object(field, one, expected, comparisons)


def _is_cell(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(v) is int and v >= 0 for v in value)


def _shift_box(cell: list[int], slot: Mapping[str, Any]) -> list[float]:
    (row, col), (x0, y0, x1, y1) = slot["cell"], slot["box"]
    across, down = (cell[1] - col) * (x1 - x0), (cell[0] - row) * (y1 - y0)
    return [x0 + across, y0 + down, x1 + across, y1 + down]


_Comparison = Callable[[str, Any, Any], Iterator[FieldDifference]]


def _compare_object(
    field: str, old: Any, new: Mapping[str, Any], special: Mapping[str, _Comparison]
) -> Iterator[FieldDifference]:
    if not isinstance(old, dict):
        yield FieldDifference(field, old, new)
        return
    for key in dict.fromkeys([*new, *old]):
        if key == "name":  # of a slot, given by people
            continue
        a, b = old.get(key, _ABSENT), new.get(key, _ABSENT)
        where = f"{field}.{key}"
        if a is _ABSENT or b is _ABSENT:
            yield FieldDifference(where, a, b)
        elif key in special:
            yield from special[key](where, a, b)
        elif a != b or type(a) is not type(b):
            yield FieldDifference(where, a, b)


def _compare_code(field: str, old: Any, new: Any) -> Iterator[FieldDifference]:
    # the code of a damaged file depends on the decoder's version
    if old != new and not (old in _UNREADABLE and new in _UNREADABLE):
        yield FieldDifference(field, old, new)


def _compare_number(field: str, old: Any, new: Any, allowed: float) -> Iterator[FieldDifference]:
    a, b = _finite_number(old), _finite_number(new)
    both_missing = old is None and new is None
    if not both_missing and (a is None or b is None or abs(a - b) > allowed):
        yield FieldDifference(field, old, new)


def _compare_box(field: str, old: Any, new: Any) -> Iterator[FieldDifference]:
    numbers = [_finite_number(value) for value in old] if isinstance(old, list) else []
    if len(numbers) != 4 or any(
        a is None or abs(a - b) > _BOX_TOLERANCE * max(1.0, abs(b)) for a, b in zip(numbers, new, strict=True)
    ):
        yield FieldDifference(field, old, new)


def _finite_number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
