"""A record in words that need no knowledge of the method: its headline, two sentences, and the words explained.

`visualization/pages/evidence.js` says the same in browsers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from opal_deploy.records.record import Answered, Slot
from opal_deploy.visualization.style import format_number

# cosine and contributions are float64 sums of the same values in different orders
_SUM_TOLERANCE: Final = 1e-9
# A slot is weak if it adds less than the share `weak` of the cosine, or than `weakPart` of an equal part if that is
# less. A margin below `close` is a close call. A sentence names at most `named` of the strongest slots, up to the share
# `mostly` of the cosine. The script has the same numbers.
WORDS: Final = {"weak": 0.1, "weakPart": 0.5, "close": 0.1, "mostly": 2 / 3, "named": 3}
_ROWS, _COLUMNS = ("upper", "middle", "lower"), ("left", "centre", "right")


def adds_up(evidence: Sequence[Slot], cosine: float | None) -> bool:
    """Return whether the slots' contributions add up to the cosine."""
    parts = [slot.contribution for slot in evidence if slot.contribution is not None]
    return cosine is not None and 0 < len(evidence) == len(parts) and abs(math.fsum(parts) - cosine) <= _SUM_TOLERANCE


def find_weak(parts: Sequence[float]) -> list[bool]:
    """Return which contributions to a cosine add little to it."""
    limit = math.fsum(parts) * min(WORDS["weak"], WORDS["weakPart"] / max(len(parts), 1))
    return [part < limit for part in parts]


def describe_weak(slots: Sequence[int], parts: Sequence[float]) -> str:
    """Return the weak slots with their share of the cosine, as in `slots 0 and 2, together 11%`; empty if none is."""
    weak = [(slot, part) for slot, part, is_weak in zip(slots, parts, find_weak(parts), strict=True) if is_weak]
    if not weak:
        return ""
    share = f"{math.fsum(part for _, part in weak) / math.fsum(parts):.0%}"
    names = _join([str(slot) for slot, _ in weak])
    return f"slots {names}, together {share}" if weak[1:] else f"slot {names}, {share}"


def headline(status: str, label: str) -> tuple[str, str]:
    """Return an answer's headline and the line below: the class, or the refusal and the closest class."""
    refused = {"unknown": "Unknown", "abstained": "Not sure"}.get(status)
    return (label, "") if refused is None else (refused, f"closest class: {label}")


def describe_answer(record: Answered) -> list[str]:
    """Return sentences on where the answer comes from and how safe it is, as far as the record tells."""
    total = adds_up(record.evidence, record.prediction.cosine) and math.fsum(_part(slot) for slot in record.evidence)
    ranked = sorted(record.evidence, key=lambda slot: (-_part(slot), slot.slot)) if total and total > 0 else []
    sentences, reached = [], 0.0
    named = list[str]()
    for slot in ranked[: int(WORDS["named"])]:
        if reached < WORDS["mostly"] * total:
            source = f"slot {slot.slot}{f', {slot.name}' if slot.name else ''} ({_place(slot, record)})"
            named.append(f"{_part(slot) / total:.0%} {'' if named else 'of the match comes '}from {source}")
            reached += _part(slot)
    if named:
        sentences.append(f"{_join(named)}.")
    if record.rest is not None:
        parts = math.fsum(_part(slot) for slot in record.evidence)
        values = [format_number(value) for value in (parts, record.prediction.logit, record.rest, record.bias)]
        sentences.append(
            "The parts listed add {} to the logit {}, everything else {}, the class's bias {}.".format(*values)
        )
    if record.labels is not None:
        count, listed = len(record.labels), [label.label for label in record.labels[: int(WORDS["named"])]]
        named = listed if len(listed) == count else [*listed, f"{count - len(listed)} more"]
        several = f"One of {count} labels: {_join(named)}." if count > 1 else "The only label."
        sentences.append(several if count else "No label is likelier than not.")
    if record.margin is not None and len(record.top) > 1:
        runner_up, margin = record.top[1].label, record.margin
        # logits have no common scale
        start = "Close call: the" if margin < WORDS["close"] and record.rest is None else "The"
        text = f"{start} runner-up, {runner_up}, is {abs(margin):.3f} {'behind' if margin >= 0 else 'ahead'}"
        if ranked[1:]:
            # a slot that scores 0 leaves the order of all other totals as it is
            answer = "the same" if margin > _part(ranked[0]) else runner_up
            text += f"; without what slot {ranked[0].slot} found, the answer would be {answer}"
        sentences.append(f"{text}.")
    return sentences


def _part(slot: Slot) -> float:
    return slot.contribution or 0.0


def _place(slot: Slot, record: Answered) -> str:
    """Return the third of the picture's height and width where a slot's box lies, in words."""
    column, row = (
        min(2, int(3 * (slot.box[axis] + slot.box[axis + 2]) / 2 / side))
        for axis, side in enumerate((record.width, record.height))
    )
    return "centre" if row == column == 1 else f"{_ROWS[row]} {_COLUMNS[column]}"


def _join(parts: Sequence[str]) -> str:
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), parts[-1]])


# tooltips on pages, and the glossary of the documentation
_GLOSSARY = files("opal_deploy.visualization").joinpath("pages/glossary.json")
GLOSSARY: Final[dict[str, str]] = json.loads(_GLOSSARY.read_text(encoding="utf-8"))
