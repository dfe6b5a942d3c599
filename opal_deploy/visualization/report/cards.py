"""The card of one record as plain values, which the page's template and its script draw alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.records.record import Record, Slot
from opal_deploy.visualization.legend import COSINE, DISTANCE, SCORE, build_bars, get_prediction
from opal_deploy.visualization.overlay import overlay_width, photograph_size
from opal_deploy.visualization.palette import COLORS, slot_color, text_color, to_hex
from opal_deploy.visualization.text import escape_unprintable

MEANINGS = (COSINE, DISTANCE, SCORE)
STATUSES = ("ok", "abstained", "error")
NO_NAME = "(no name)"
# (tag colour, text colour) of each slot as CSS; slots beyond them repeat the colours
SLOT_COLORS = tuple((to_hex(color), to_hex(text_color(color))) for color in COLORS)
# digits after the point; results.jsonl has every value in full precision
_DIGITS = 6
_MESSAGE_LIMIT = 500
# names that a run gives its drawings; anything else in a record, such as an address, is not linked to
_OVERLAY_NAME = re.compile(r"overlays/(\d+/)?[A-Za-z0-9._-]+\.jpg")
_SHEET_NAME = re.compile(r"sheets/(\d+/)?[A-Za-z0-9._-]+\.png")


@dataclass(frozen=True)
class SlotRow:
    """One row of a card's table of slots.

    Attributes:
        slot: the slot, 0 ... m-1.
        color: the tag's colour as CSS.
        text_color: the colour of the number on the tag.
        row: the cell's row.
        column: the cell's column.
        value: the value that the bar shows; None where it is not finite.
        score: the slot's score; None where it is not finite.
        start: the bar's left end in percent.
        stop: the bar's right end in percent.
        name: the slot's name; None if it has none.
    """

    slot: int
    color: str
    text_color: str
    row: int
    column: int
    value: float | None
    score: float | None
    start: float
    stop: float
    name: str | None


@dataclass(frozen=True)
class Card:
    """One record as the report shows it; texts are plain, not escaped for HTML.

    Attributes:
        number: the record's place in the input, 0, 1, ...
        name: the image's name.
        status: `ok`, `abstained` or `error`.
        label: index of the predicted class in the report's list of labels; None for a failed image.
        truth: index of the image's label in the report's list of labels; None where it is not known.
        margin: the margin; None where the record has none.
        value: the cosine of the predicted class, or its logit where `is_cosine` is false.
        is_cosine: whether values are cosines.
        probability: the calibrated probability of the predicted class; None where the record has none.
        top: (index of the label, cosine or logit) of the closest classes.
        meaning: what the bars show, an index of MEANINGS.
        slots: the evidence, in slot order.
        distinct: the number of different cells that the slots chose.
        fields: (x, y, width, height, colour) of the effective receptive field of each different cell, in pixels of the
            photograph; empty where it is not known.
        width: of the photograph in pixels.
        height: of the photograph in pixels.
        overlay: the overlay's file in the run's folder; None without one.
        sheet: the evidence sheet's file in the run's folder; None without one.
        overlay_width: the overlay's width as a multiple of the photograph's.
        undrawn: the reason why a drawing is missing; empty where there is none.
        code: the error code of a failed image.
        message: the error message of a failed image.
    """

    number: int
    name: str
    status: str
    label: int | None = None
    truth: int | None = None
    margin: float | None = None
    value: float | None = None
    is_cosine: bool = True
    probability: float | None = None
    top: tuple[tuple[int, float | None], ...] = ()
    meaning: int = 0
    slots: tuple[SlotRow, ...] = ()
    distinct: int = 0
    fields: tuple[tuple[int, int, int, int, str], ...] = ()
    width: int = 0
    height: int = 0
    overlay: str | None = None
    sheet: str | None = None
    overlay_width: float = 1.0
    undrawn: str = ""
    code: str = ""
    message: str = ""

    @property
    def stack(self) -> list[tuple[float, float, str]]:
        """Contributions that add up to the cosine, side by side: (start, width, colour), 100 being cosine 1."""
        values = [slot.value for slot in self.slots]
        if MEANINGS[self.meaning] != COSINE or any(value is None or value < 0 for value in values):
            return []
        parts, start = [], 0.0
        for slot in self.slots:
            width = 100 * (slot.value or 0.0)
            parts.append((round(start, 2), round(width, 2), slot.color))
            start += width
        return parts

    @property
    def is_right(self) -> bool | None:
        """Whether the predicted class is the image's label; None where one of them is missing."""
        return None if self.truth is None or self.label is None else self.truth == self.label

    def index_row(self) -> list[Any]:
        """Return what the page's script filters and sorts by, loaded for all images at once."""
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
        """Return what the page's script needs only for cards on view."""
        if self.status == "error":
            return {"message": self.message}
        return {
            "cosine": self.is_cosine,
            "probability": self.probability,
            "top": self.top,
            "meaning": self.meaning,
            "slots": [
                [s.slot, s.row, s.column, s.value, s.score, s.start, s.stop, *([s.name] if s.name else [])]
                for s in self.slots
            ],
            "distinct": self.distinct,
            "fields": self.fields,
            "size": [self.width, self.height],
            "overlay": self.overlay,
            "sheet": self.sheet,
            "overlay_width": self.overlay_width,
            "undrawn": self.undrawn,
        }


def build_card(
    record: Record, number: int, label_index: Callable[[str], int], field: EffectiveField | None = None
) -> Card:
    """Return the card of a record of any status.

    Args:
        record: the record.
        number: the record's place in the input.
        label_index: returns a label's index in the report's list of labels, adding it where it is new.
        field: the model's effective receptive field; None where it is not known.
    """
    name = escape_unprintable(record["image"]) if record["image"] else NO_NAME
    truth = label_index(record["truth"]) if "truth" in record else None
    if record["status"] == "error":
        error = record.get("error", {"code": "unknown", "message": ""})
        return Card(
            number,
            name,
            "error",
            truth=truth,
            code=escape_unprintable(error["code"]),
            message=escape_unprintable(shorten(error["message"])),
        )
    prediction = get_prediction(record)
    is_cosine = prediction["cosine"] is not None
    bars = build_bars(record)
    evidence = record.get("evidence", [])
    width, height = record.get("width", 1), record.get("height", 1)
    overlay, sheet, undrawn = record.get("overlay"), record.get("sheet"), record.get("drawing_error")
    return Card(
        number,
        name,
        record["status"],
        label=label_index(prediction["label"]),
        truth=truth,
        margin=_round(record.get("margin")),
        value=_round(prediction["cosine"] if is_cosine else prediction["logit"]),
        is_cosine=is_cosine,
        probability=_round(prediction.get("calibrated_probability")),
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
        fields=() if field is None else _place_fields(evidence, field),
        width=width,
        height=height,
        overlay=overlay if overlay is not None and _OVERLAY_NAME.fullmatch(overlay) else None,
        sheet=sheet if sheet is not None and _SHEET_NAME.fullmatch(sheet) else None,
        undrawn=f"not drawn: {escape_unprintable(shorten(undrawn['message']))}" if undrawn else "",
        overlay_width=round(overlay_width(width, height) / photograph_size(width, height)[0], 4),
    )


def _place_fields(evidence: list[Slot], field: EffectiveField) -> tuple[tuple[int, int, int, int, str], ...]:
    by_cell = {tuple(slot["cell"]): slot for slot in reversed(evidence)}
    rectangles = []
    for slot in sorted(by_cell.values(), key=lambda slot: slot["slot"]):
        x0, y0, x1, y1 = map(round, field.surround(slot["cell"], slot["box"]))
        rectangles.append((x0, y0, x1 - x0, y1 - y0, to_hex(slot_color(slot["slot"]))))
    return tuple(rectangles)


def shorten(message: str) -> str:
    """Return the first 500 characters of a message."""
    return message if len(message) <= _MESSAGE_LIMIT else message[:_MESSAGE_LIMIT] + " …"


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _DIGITS)
