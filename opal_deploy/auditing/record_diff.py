"""Comparison of a recorded explanation with a computed one, field by field.

Discrete fields (names, classes, cells, digests, sizes, codes) must be equal, numbers within a tolerance: the same file
on the same runtime gives the same bits, but kernels of other machines sum in another order. The class may differ if
both margins are within twice the cosine's tolerance; slots are then not compared.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import PER_IMAGE
from opal_deploy.runtime.gates import Gate

# fields that no model computes
NOT_COMPUTED = frozenset({"image", "image_index", "overlay", "sheet", "drawing_error", "label", "signature"})
# a slot's name is given by people, and messages may change between versions
_NOT_COMPARED = re.compile(r"evidence\[\d+\]\.name|error\.message")
# the code of a damaged file depends on the decoder's version
_UNREADABLE = ("not_an_image", "truncated_image", "corrupt_image", "unsupported_image")
# relative
_BOX_TOLERANCE = 1e-6
# the value of a missing key, which JSON can hold
_ABSENT = "nothing"


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted differences of numbers, absolute but for logits."""

    cosine: float  # of cosines, margins and contributions
    logit: float  # relative to max(1, |logit|)
    score: float
    others: Mapping[str, float] = field(default_factory=dict)  # by name of an output with one number per image
    temperature: float | None = None  # of calibrated probabilities, which follow from logits; None for a model without

    @staticmethod
    def for_model(metadata: Metadata) -> Tolerance:
        """Return the differences that another machine may cause with the same file.

        For fp32 that is the gate of `verify MODEL`. A lower precision's gate compares it with fp32, which would let far
        too much pass, so its tolerances cover only rounding.
        """
        if metadata.precision != "fp32":
            return replace(_LOW_PRECISION[metadata.precision], temperature=metadata.temperature)
        gate = Gate.of_model(metadata).relaxed_for_machine()
        return Tolerance(gate.cosine, gate.logit, gate.score, gate.others, metadata.temperature)

    def find_limit(self, path: str, expected: Mapping[str, Any]) -> float | None:
        """Return the largest accepted difference of a number, absolute; None for fields that are no such number.

        Args:
            path: the field, such as `evidence[2].score`.
            expected: all computed values by path.
        """
        parent, _, name = path.rpartition(".")
        if name in ("logit", "calibrated_probability", "probability"):
            limit = self.logit * max(1.0, abs(float(expected[f"{parent}.logit"])))
            if name == "logit":
                return limit
            # with p = softmax(l / T), logits that differ by d each change p by at most 2 d p (1 - p) / T <= d / (2 T)
            temperature = 1.0 if name == "probability" else self.temperature
            return 0.0 if temperature is None else limit / (2.0 * temperature)
        limits = {"cosine": self.cosine, "contribution": self.cosine, "score": self.score}
        limits |= dict.fromkeys(("margin", "rest"), 2 * self.cosine)
        return limits[name] if name in limits else self.others.get(name)


# ten units in the last place of the body's format, at values near 1; int8 kernels differ in how they saturate
_LOW_PRECISION = {
    "fp16": Tolerance(cosine=5e-3, logit=1e-2, score=1e-2, others=dict.fromkeys(PER_IMAGE, 1e-2)),
    "bf16": Tolerance(cosine=4e-2, logit=8e-2, score=8e-2, others=dict.fromkeys(PER_IMAGE, 4e-2)),
    "int8": Tolerance(cosine=4e-2, logit=8e-2, score=8e-2, others=dict.fromkeys(PER_IMAGE, 4e-2)),
}


@dataclass(frozen=True)
class FieldDifference:
    """One field whose recorded value is not the computed one; `field` is a path such as `evidence[2].box`."""

    field: str
    recorded: Any
    computed: Any

    def __str__(self) -> str:
        """Return one line for a person."""
        old, new = (f"{text:.77}..." if len(text := repr(v)) > 80 else text for v in (self.recorded, self.computed))
        return f"{self.field} is recorded as {old}, computed as {new}"


def diff_records(
    recorded: Mapping[str, Any], computed: Mapping[str, Any], tolerance: Tolerance
) -> list[FieldDifference]:
    """Return the fields of a record's document, which may hold any JSON, that differ from the one computed now.

    The computed document has all of the model's classes in `top`.
    """
    old, new = (
        {key: value for key, value in record.items() if key not in NOT_COMPUTED} for record in (recorded, computed)
    )
    if "prediction" in new:
        new["top"] = _choose_top(old.get("top"), computed["top"], tolerance)
        margins = [_finite_number(record.get("margin")) for record in (old, new)]
        answer = _find_answer(old.get("prediction"), computed["top"])
        is_undecided = all(margin is not None and abs(margin) <= 2 * tolerance.cosine for margin in margins)
        if is_undecided and answer is not None and answer != new["prediction"]:
            new["prediction"] = answer
            # slots of another class
            old, new = ({k: v for k, v in record.items() if k != "evidence"} for record in (old, new))
    before, after = _flatten(old), _flatten(new)
    differences = [
        FieldDifference(path, before.get(path, _ABSENT), after.get(path, _ABSENT))
        for path in dict.fromkeys([*after, *before])
        if not _NOT_COMPARED.fullmatch(path) and not _is_equal(path, before, after, tolerance)
    ]
    top = recorded.get("top")
    if isinstance(top, list) and top and top[0] != recorded.get("prediction"):
        differences.append(FieldDifference("top[0]", top[0], recorded.get("prediction")))
    return differences


def _find_answer(answer: Any, top: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the computed answer of the same class at any rank; None without one."""
    class_id = answer.get("class_id") if isinstance(answer, dict) else None
    return next((other for other in top if other["class_id"] == class_id), None)


def _choose_top(old: Any, new: list[dict[str, Any]], tolerance: Tolerance) -> list[dict[str, Any]]:
    """Return the computed answers to compare a record's `top` with: equal logits may come in any order."""
    if not isinstance(old, list) or not 0 < len(old) <= len(new):
        return new
    expected = []
    for answer, usual in zip(old, new, strict=False):
        other = _find_answer(answer, new) or usual
        is_tied = abs(other["logit"] - usual["logit"]) <= 2 * tolerance.logit * max(1.0, abs(usual["logit"]))
        expected.append(other if is_tied else {**other, "class_id": usual["class_id"]})
    return expected


def _flatten(document: Any) -> dict[str, Any]:
    """Return the values of a document by their paths: the fields of objects, also of those in lists."""
    leaves: dict[str, Any] = {}
    # a document may be nested more deeply than Python's stack
    pending = [("", document)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict) and value:
            pending += [(f"{path}.{key}".lstrip("."), entry) for key, entry in reversed(value.items())]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            pending += [(f"{path}[{index}]", entry) for index, entry in reversed(list(enumerate(value)))]
        else:
            leaves[path] = value
    return leaves


def _is_equal(path: str, before: Mapping[str, Any], after: Mapping[str, Any], tolerance: Tolerance) -> bool:
    if path not in before or path not in after:
        return False
    old, new = before[path], after[path]
    if path == "error.code" and old in _UNREADABLE and new in _UNREADABLE:
        return True
    if path.endswith(".box") and isinstance(old, list) and len(old) == len(new):
        return all(_is_close(a, b, _BOX_TOLERANCE * max(1.0, abs(b))) for a, b in zip(old, new, strict=True))
    if (limit := tolerance.find_limit(path, after)) is not None:
        return _is_close(old, new, limit)
    return type(old) is type(new) and bool(old == new)


def _is_close(old: Any, new: Any, limit: float) -> bool:
    a, b = _finite_number(old), _finite_number(new)
    return (old is None and new is None) or (a is not None and b is not None and abs(a - b) <= limit)


def _finite_number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None
