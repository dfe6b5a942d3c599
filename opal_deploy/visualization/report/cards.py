"""What a card says of one record: plain values, which the page's template and its script draw alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opal_deploy.records.record import Record
from opal_deploy.visualization.legend import COSINE, DISTANCE, SCORE, build_bars, get_prediction
from opal_deploy.visualization.overlay import overlay_width, photograph_size
from opal_deploy.visualization.palette import NUM_COLORS, slot_color, text_color, to_hex
from opal_deploy.visualization.text import escape_unprintable

MEANINGS = (COSINE, DISTANCE, SCORE)
STATUSES = ("ok", "abstained", "error")
NO_NAME = "(no name)"
# (tag, letters on it) of each slot; from the last on they repeat
SLOT_COLORS = tuple((to_hex(slot_color(slot)), to_hex(text_color(slot_color(slot)))) for slot in range(NUM_COLORS))
# digits after the point; every figure in full precision is in results.jsonl
_DIGITS = 6
_MESSAGE_LIMIT = 500
# what a run writes; anything else in a record, an address say, is not followed
_OVERLAY = re.compile(r"overlays/(\d+/)?[A-Za-z0-9._-]+\.jpg")
_SHEET = re.compile(r"sheets/(\d+/)?[A-Za-z0-9._-]+\.png")


@dataclass(frozen=True)
class SlotRow:
    """One slot: its tag's colours, its cell, what its bar shows and says, and its name if somebody named it."""

    slot: int
    paint: str
    letters: str
    row: int
    column: int
    value: float | None
    score: float | None
    start: float
    stop: float
    name: str | None


@dataclass(frozen=True)
class Card:
    """One record as the report shows it; texts are as they are read, not escaped.

    Attributes:
        number: the record's place in the input, 0, 1, ...
        label, truth: indices of texts in the report's list of labels; None: there is none.
        value: cosine of the predicted class, or its logit where `is_cosine` is false.
        top: (label's index, cosine or logit) of the closest classes.
        meaning: what bars show, an index of MEANINGS. distinct: cells that the slots lie in.
        width, height: of the photograph. overlay: its drawing's file, in the run's folder.
        sheet: its evidence sheet's, likewise.
        overlay_width: the drawing's, where the photograph's is 1.
        code, message: of a failure.
    """

    number: int
    name: str
    status: str
    label: int | None = None
    truth: int | None = None
    margin: float | None = None
    value: float | None = None
    is_cosine: bool = True
    top: tuple[tuple[int, float | None], ...] = ()
    meaning: int = 0
    slots: tuple[SlotRow, ...] = ()
    distinct: int = 0
    width: int = 0
    height: int = 0
    overlay: str | None = None
    sheet: str | None = None
    overlay_width: float = 1.0
    code: str = ""
    message: str = ""

    @property
    def stack(self) -> list[tuple[float, float, str]]:
        """Contributions one after the other, where they add up to the cosine: (start, width, colour), 100 is 1."""
        values = [slot.value for slot in self.slots]
        if MEANINGS[self.meaning] != COSINE or any(value is None or value < 0 for value in values):
            return []
        parts, start = [], 0.0
        for slot in self.slots:
            width = 100 * (slot.value or 0.0)
            parts.append((round(start, 2), round(width, 2), slot.paint))
            start += width
        return parts

    def order(self, position: int) -> tuple[bool, float, int]:
        """Sorts the least certain first; those without a margin last, in the order of the input."""
        return (self.margin is None, 0.0 if self.margin is None else self.margin, position)

    def index_row(self) -> list[Any]:
        """What the page's script filters and sorts by; at hand for all images at once."""
        return [
            self.number,
            self.name,
            STATUSES.index(self.status),
            self.label,
            self.truth,
            self.margin,
            self.value,
            self.code,
        ]

    def details(self) -> dict[str, Any]:
        """What only a card that is shown needs."""
        if self.status == "error":
            return {"message": self.message}
        return {
            "cosine": self.is_cosine,
            "top": self.top,
            "meaning": self.meaning,
            "slots": [
                [s.slot, s.row, s.column, s.value, s.score, s.start, s.stop, *([s.name] if s.name else [])]
                for s in self.slots
            ],
            "distinct": self.distinct,
            "size": [self.width, self.height],
            "overlay": self.overlay,
            "sheet": self.sheet,
            "wide": self.overlay_width,
        }


def build_card(record: Record, number: int, label_index: Callable[[str], int]) -> Card:
    """The card of a record of any status.

    Args:
        number: the record's place in the input.
        label_index: where a label is, or from now on will be, in the report's list.
    """
    name = escape_unprintable(record["image"]) if record["image"] else NO_NAME
    truth = label_index(record["truth"]) if "truth" in record else None
    if record["status"] == "error":
        problem = record.get("error", {"code": "unknown", "message": ""})
        return Card(
            number,
            name,
            "error",
            truth=truth,
            code=escape_unprintable(problem["code"]),
            message=escape_unprintable(shorten(problem["message"])),
        )
    answer = get_prediction(record)
    is_cosine = answer["cosine"] is not None
    bars = build_bars(record)
    evidence = record.get("evidence", [])
    width, height = record.get("width", 1), record.get("height", 1)
    overlay, sheet = record.get("overlay"), record.get("sheet")
    return Card(
        number,
        name,
        record["status"],
        label=label_index(answer["label"]),
        truth=truth,
        margin=_round(record.get("margin")),
        value=_round(answer["cosine"] if is_cosine else answer["logit"]),
        is_cosine=is_cosine,
        top=tuple(
            (label_index(a["label"]), _round(a["cosine"] if is_cosine else a["logit"])) for a in record.get("top", [])
        ),
        meaning=MEANINGS.index(bars.meaning),
        slots=tuple(
            SlotRow(
                bar.slot,
                to_hex(bar.color),
                to_hex(text_color(bar.color)),
                slot["cell"][0],
                slot["cell"][1],
                _round(bar.value),
                _round(bar.score),
                round(100 * bar.start, 2),
                round(100 * bar.stop, 2),
                escape_unprintable(slot["name"]) if "name" in slot else None,
            )
            for bar, slot in zip(bars.bars, evidence, strict=True)
        ),
        distinct=len({tuple(slot["cell"]) for slot in evidence}),
        width=width,
        height=height,
        overlay=overlay if overlay is not None and _OVERLAY.fullmatch(overlay) else None,
        sheet=sheet if sheet is not None and _SHEET.fullmatch(sheet) else None,
        overlay_width=round(overlay_width(width, height) / photograph_size(width, height)[0], 4),
    )


def shorten(message: str) -> str:
    """The first 500 characters."""
    return message if len(message) <= _MESSAGE_LIMIT else message[:_MESSAGE_LIMIT] + " …"


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _DIGITS)
