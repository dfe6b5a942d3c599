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


class _Absent(str):
    """The value of a missing key, which JSON can hold."""

    def __repr__(self) -> str:
        return "nothing"


_ABSENT: Any = _Absent("nothing")

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

    def of_field(self, field: str) -> float | None:
        """Return the largest accepted difference of a field such as `evidence[2].score`; None for others."""
        by_key = {"cosine": self.cosine, "contribution": self.cosine, "score": self.score}
        return (
            by_key.get(field.rpartition(".")[2])
            if "." in field
            else {**self.others, "margin": 2 * self.cosine}.get(field)
        )

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
    expected = {key: value for key, value in computed.items() if key not in NOT_COMPUTED}
    margins = [_finite_number(record.get("margin")) for record in (recorded, computed)]
    is_undecided = (
        all(margin is not None and abs(margin) <= 2 * tolerance.cosine for margin in margins)
        and "prediction" in expected
        and _class_id(recorded.get("prediction")) != expected["prediction"]["class_id"]
    )
    if is_undecided:
        expected["prediction"] = _find_answer(recorded.get("prediction"), computed) or expected["prediction"]
        # slots of another class
        expected["evidence"] = recorded.get("evidence", _ABSENT)
    if "top" in expected:
        expected["top"] = _choose_top(recorded.get("top"), computed, tolerance)
    if not is_undecided and "evidence" in expected and isinstance(recorded.get("evidence"), list):
        slots = [*recorded["evidence"], *[None] * len(expected["evidence"])]
        expected["evidence"] = [
            _choose_slot(slot, other, is_tied) for slot, other in zip(slots, computed["evidence"], strict=False)
        ]
    old = {key: value for key, value in recorded.items() if key not in NOT_COMPUTED}
    differences = list(
        _walk("", old, {key: value for key, value in expected.items() if value is not _ABSENT}, tolerance)
    )
    top = recorded.get("top")
    if isinstance(top, list) and top and top[0] != recorded.get("prediction"):
        differences.append(FieldDifference("top[0]", top[0], recorded.get("prediction")))
    return differences


def _class_id(answer: Any) -> Any:
    return answer.get("class_id") if isinstance(answer, dict) else None


def _find_answer(answer: Any, computed: Mapping[str, Any]) -> Any:
    """Return the computed answer of the same class at any rank; None without one."""
    return next((other for other in computed.get("top", ()) if other["class_id"] == _class_id(answer)), None)


def _choose_top(old: Any, computed: Mapping[str, Any], tolerance: Tolerance) -> Any:
    """Return the computed answers to compare a record's `top` with: equal logits may come in any order."""
    new = computed["top"]
    if not isinstance(old, list) or not 0 < len(old) <= len(new):
        return new
    expected = []
    for rank, answer in enumerate(old):
        other = _find_answer(answer, computed)
        if other is None:
            expected.append(new[rank])
            continue
        is_late = other["class_id"] in [_class_id(earlier) for earlier in old[:rank]]
        lead = abs(other["logit"] - new[rank]["logit"])
        if is_late or lead > 2 * tolerance.of_logit(new[rank]["logit"]):
            other = {**other, "class_id": new[rank]["class_id"]}
        expected.append(other)
    return expected


def _choose_slot(old: Any, new: Mapping[str, Any], is_tied: IsTied) -> Mapping[str, Any]:
    """Return the computed slot; where the recorded cell ties with its own, at that cell."""
    cell: Any = old.get("cell") if isinstance(old, dict) else None
    is_cell = isinstance(cell, list) and len(cell) == 2 and all(type(side) is int and side >= 0 for side in cell)
    if not is_cell or cell == new["cell"] or not is_tied(new["channel"], cell):
        return new
    # the box belongs to the cell: as far from the computed one as the cells are apart
    (row, col), (x0, y0, x1, y1) = new["cell"], new["box"]
    across, down = (cell[1] - col) * (x1 - x0), (cell[0] - row) * (y1 - y0)
    return {**new, "cell": cell, "box": [x0 + across, y0 + down, x1 + across, y1 + down]}


def _walk(field: str, old: Any, new: Any, tolerance: Tolerance) -> Iterator[FieldDifference]:
    """Yield the differences below a field: of objects by key, of lists of objects by place."""
    if isinstance(new, dict) and isinstance(old, dict):
        for key in dict.fromkeys([*new, *old]):
            # a slot's name is given by people, and messages may change between versions
            if (key, field[:8]) in (("name", "evidence"), ("message", "error")):
                continue
            a, b = old.get(key, _ABSENT), new.get(key, _ABSENT)
            where = f"{field}.{key}".lstrip(".")
            if a is _ABSENT or b is _ABSENT:
                yield FieldDifference(where, a, b)
            elif key in ("logit", _PROBABILITY):
                limit = tolerance.of_logit(new["logit"]) if key == "logit" else tolerance.of_probability(new["logit"])
                yield from _compare_numbers(where, a, b, limit)
            else:
                yield from _walk(where, a, b, tolerance)
    elif isinstance(new, list) and new and isinstance(new[0], dict) and isinstance(old, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _walk(f"{field}[{index}]", a, b, tolerance)
    elif (allowed := tolerance.of_field(field)) is not None:
        yield from _compare_numbers(field, old, new, allowed)
    elif field.endswith(".box"):
        sides = [_finite_number(side) for side in old] if isinstance(old, list) else []
        pairs = list(zip(sides, new, strict=False))
        if len(sides) != 4 or any(a is None or abs(a - b) > _BOX_TOLERANCE * max(1.0, abs(b)) for a, b in pairs):
            yield FieldDifference(field, old, new)
    # the code of a damaged file depends on the decoder's version
    elif field == "error.code" and old in _UNREADABLE and new in _UNREADABLE:
        return
    elif old != new or type(old) is not type(new):
        yield FieldDifference(field, old, new)


def _compare_numbers(field: str, old: Any, new: Any, allowed: float) -> Iterator[FieldDifference]:
    a, b = _finite_number(old), _finite_number(new)
    both_missing = old is None and new is None
    if not both_missing and (a is None or b is None or abs(a - b) > allowed):
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
