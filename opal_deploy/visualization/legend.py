"""The legend of an overlay: what was predicted, how clearly, and a bar for what each slot added.

`build_bars` computes the bars of a record for the legend and the report alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import ImageDraw

from opal_deploy.records.record import Answer, Record
from opal_deploy.visualization.palette import RGB, slot_color, text_color
from opal_deploy.visualization.text import draw_text, font, to_drawable, wrap_text

COSINE = "contribution to the cosine"
DISTANCE = "part of the distance (smaller: closer)"
SCORE = "score"

PAPER: RGB = (250, 250, 248)
INK: RGB = (26, 26, 26)
_FAINT: RGB = (96, 96, 96)
_TRACK: RGB = (226, 226, 222)
_ALERT: RGB = (150, 40, 27)

NO_EVIDENCE = "This model has no exact evidence: no cell of the image decided alone."
BOX_NOTE = "The thicker a box, the more its slot adds."
FIELD_NOTE = "Solid: the cell of a score. Dashed: its effective receptive field."
MIN_WIDTH_EM = 22
_ROWS_PER_COLUMN = 6
_MIN_COLUMN_EM, _MAX_COLUMN_EM = 17, 40

_HEADINGS = {COSINE: "adds to cosine", DISTANCE: "distance part, less is closer", SCORE: ""}
# cosine and sum of contributions are float64 sums over one block, in different orders
_SUM_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Bar:
    """One slot's bar.

    Attributes:
        slot: the slot, 0 ... m-1.
        color: the slot's colour.
        value: the contribution, or the score where there is no contribution.
        score: the slot's score, in [0, 1].
        start: the bar's left end as a share of the full bar; 0 <= start <= stop <= 1.
        stop: the bar's right end.
    """

    slot: int
    color: RGB
    value: float
    score: float
    start: float
    stop: float


@dataclass(frozen=True)
class Bars:
    """The bars of one record.

    Attributes:
        meaning: what the length of a bar means: COSINE, DISTANCE or SCORE.
        bars: in slot order.
    """

    meaning: str
    bars: tuple[Bar, ...]


def build_bars(record: Record) -> Bars:
    """Return the bars of a record's evidence; none without evidence.

    All bars of a record share one scale. For contributions to the cosine a full bar is at least 1/m: where all bars are
    full, the cosine is 1. For scores it is 1. The bar of a negative value points left from a common zero.
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
    bars = [
        Bar(slot["slot"], slot_color(slot["slot"]), value, slot["score"], *ends)
        for slot, value, ends in zip(slots, values, bar_ends(values, full), strict=True)
    ]
    return Bars(meaning, tuple(bars))


def bar_ends(values: Sequence[float], full: float) -> list[tuple[float, float]]:
    """Return the ends of bars that share one scale, as shares of the full bar, which stands for at least `full`.

    The bar of a negative value points left from a common zero; what is no finite number has none.
    """
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    high, low = max([full, 0.0, *finite]), min([0.0, *finite])
    span = (high - low) or 1.0
    return [((min(0.0, value) - low) / span, (max(0.0, value) - low) / span) for value in finite]


def format_number(value: float | None) -> str:
    """Return a number with three decimals, never `-0.000`; a dash for None."""
    if value is None:
        return "–"
    text = f"{value:.3f}"
    return "0.000" if text == "-0.000" else text


class Legend:
    """The legend of one record.

    Attributes:
        height: in pixels.
    """

    def __init__(self, record: Record, width: int, size: int, note: str = "") -> None:
        """Lay the legend out.

        Args:
            record: a record with a prediction.
            width: of the legend, in pixels.
            size: of the letters, in pixels.
            note: sentences to stand above the bars.

        Raises:
            ValueError: the record has no prediction.
        """
        self._size, self._width = size, width
        self._pad = size
        self._line = round(size * 1.5)
        self._text, self._small = font(size), font(max(12, round(size * 0.8)))
        self._title = font(round(size * 1.35))
        inner = width - 2 * self._pad
        prediction = get_prediction(record)
        label = to_drawable(prediction["label"]) or f"class {prediction['class_id']}"
        self._title_lines = wrap_text(label, self._title, inner, lines=2)
        self._facts = wrap_text(format_facts(record), self._text, inner, lines=3)
        self._abstained = wrap_text("abstained: margin below the threshold", self._text, inner, lines=2)
        if record["status"] != "abstained":
            self._abstained = []
        self._bars = build_bars(record)
        count = len(self._bars.bars)
        self._note = wrap_text(note if count else NO_EVIDENCE, self._small, inner, lines=4)
        self._columns = max(1, min(-(-count // _ROWS_PER_COLUMN), (inner + 2 * size) // (_MIN_COLUMN_EM * size)))
        self._rows = -(-count // self._columns)
        rows = (self._rows + 1) * self._line * bool(count) + len(self._note) * self._line
        head = len(self._title_lines) * round(size * 1.35 * 1.35) + len(self._facts + self._abstained) * self._line
        self.height = 2 * self._pad + head + round(size * 0.5) + rows

    def draw(self, draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
        """Draw the legend with its upper left corner at (x, y)."""
        size, left = self._size, x + self._pad
        y += self._pad
        for line in self._title_lines:
            draw_text(draw, (left, y), line, INK, self._title)
            y += round(size * 1.35 * 1.35)
        for line in self._facts:
            draw_text(draw, (left, y), line, INK, self._text)
            y += self._line
        for line in self._abstained:
            draw_text(draw, (left, y), line, _ALERT, self._text)
            y += self._line
        y += round(size * 0.5)
        for line in self._note:
            draw_text(draw, (left, y), line, _FAINT, self._small)
            y += self._line
        gap = 2 * size
        column = (self._width - 2 * self._pad - gap * (self._columns - 1)) // self._columns
        column = min(column, _MAX_COLUMN_EM * size)
        for index in range(self._columns if self._bars.bars else 0):
            shown = self._bars.bars[index * self._rows : (index + 1) * self._rows]
            if shown:
                self._draw_column(draw, shown, left + index * (column + gap), y, column)

    def _draw_column(self, draw: ImageDraw.ImageDraw, bars: tuple[Bar, ...], x: int, y: int, width: int) -> None:
        size, line = self._size, self._line
        both = self._bars.meaning != SCORE
        score_right = x + width
        value_right = score_right - round(3.6 * size) if both else score_right
        bar_left, bar_right = x + round(2.1 * size), value_right - round(3.4 * size)
        middle = y + line // 2
        draw_text(draw, (x, middle), "slot", _FAINT, self._small, "lm")
        draw_text(draw, (score_right, middle), "score", _FAINT, self._small, "rm")
        if both:
            draw_text(draw, (value_right, middle), _HEADINGS[self._bars.meaning], _FAINT, self._small, "rm")
        hair = max(1, size // 14)
        for bar in bars:
            y += line
            middle = y + line // 2
            half = round(size * 0.58)
            swatch = (x, middle - half, x + round(size * 1.5), middle + half)
            draw.rectangle(swatch, fill=bar.color, outline=INK, width=hair)
            draw_text(
                draw, ((swatch[0] + swatch[2]) / 2, middle), str(bar.slot), text_color(bar.color), self._small, "mm"
            )
            thick = max(2, round(size * 0.32))
            full = bar_right - bar_left
            draw.rectangle((bar_left, middle - thick, bar_right, middle + thick), fill=_TRACK)
            start, stop = bar_left + round(bar.start * full), bar_left + round(bar.stop * full)
            if stop > start:
                draw.rectangle((start, middle - thick, stop, middle + thick), fill=bar.color)
            draw_text(draw, (value_right, middle), format_number(bar.value), INK, self._text, "rm")
            if both:
                draw_text(draw, (score_right, middle), format_number(bar.score), _FAINT, self._text, "rm")


def get_prediction(record: Record) -> Answer:
    """Return a record's prediction.

    Raises:
        ValueError: the record has none: its image could not be used.
    """
    if "prediction" not in record:
        raise ValueError(f"the record of {record['image']!r} has status {record['status']!r} and nothing to draw")
    return record["prediction"]


def format_facts(record: Record) -> str:
    """Return one line with cosine and margin, or the logit where the model has no cosine."""
    prediction = get_prediction(record)
    parts = [f"class {prediction['class_id']}"]
    if prediction["cosine"] is None:
        parts.append(f"logit {format_number(prediction['logit'])}")
    else:
        parts.append(f"cosine {format_number(prediction['cosine'])}")
        parts.append(f"margin {format_number(record.get('margin')).replace('–', '-')}")
    return "   ".join(parts)
