"""Axes, and the two layouts of charts: named rows over one axis, and a plane with two axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from opal_deploy.bench.report.drawing import Element, Line, Text
from opal_deploy.bench.tables import format_number, shorten

T = TypeVar("T")

# heights in pixels: of a named row, of its middle under the name, of an axis under a drawing, of a plane
ROW_HEIGHT, ROW_MIDDLE, AXIS_HEIGHT, PLOT_HEIGHT = 46, 31, 38, 300
# as long as fits beside a value on a phone
_MAX_LABEL = 44


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return where a value is drawn."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def ticks(self, limit: int) -> list[float]:
        """Return about so many round values."""
        if self.logarithmic:
            return _logarithmic_ticks(self.low, self.high, limit)
        size = (self.high - self.low) / limit
        power = 10.0 ** math.floor(math.log10(size))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]


def span_zero(values: Sequence[float], start: float, end: float) -> Axis:
    """Return a linear axis that shows zero and all values."""
    low, high = min(0.0, *values), max(0.0, *values) * 1.03
    return Axis(low, high if high > low else low + 1.0, start, end)


def draw_rows(x: Axis, labels: Sequence[str], values: Sequence[str], title: str) -> list[Element]:
    """Draw names and values over the tracks of named rows, and the axis under them."""
    elements: list[Element] = []
    ticks = x.ticks(5)
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        top = index * ROW_HEIGHT
        elements += [Text((0, top + 15), shorten(label, _MAX_LABEL)), Text((1, top + 15), value, "end", "soft")]
        elements += [Line((x(tick), top + ROW_MIDDLE - 9), (x(tick), top + ROW_MIDDLE + 9)) for tick in ticks]
    bottom = len(labels) * ROW_HEIGHT
    elements += [Text((x(tick), bottom + 14), format_number(tick), "middle", "soft") for tick in ticks]
    elements.append(Text((1, bottom + 33), title, "end", "soft"))
    return elements


def draw_axes(x: Axis, y: Axis, x_ticks: Sequence[tuple[float, str]], x_title: str, y_title: str) -> list[Element]:
    """Draw two axes; the values upwards stand on their lines, so that a phone loses no width to them."""
    elements: list[Element] = []
    y_ticks = y.ticks(6)
    for tick in y_ticks:
        label = f"{format_number(tick)} {y_title}" if tick == y_ticks[-1] else format_number(tick)
        elements += [Line((0, y(tick)), (1, y(tick))), Text((0, y(tick) - 4), label, color="soft")]
    elements += [Text((x(tick), y.start + 16), label, "middle", "soft") for tick, label in x_ticks]
    elements.append(Text((1, y.start + 34), x_title, "end", "soft"))
    return elements


def label_ticks(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return each tick with its number."""
    return [(tick, format_number(tick)) for tick in ticks]


def _logarithmic_ticks(low: float, high: float, limit: int) -> list[float]:
    """Return 1, 2 and 5 of each decade, or fewer."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for leading in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in leading if low <= step * 10.0**decade <= high]
        if len(ticks) <= limit:
            return ticks
    return ticks[:: -(-len(ticks) // limit)]


def split_series(items: Sequence[T], limit: int) -> Iterator[tuple[str, Sequence[T]]]:
    """Yield items in even groups of at most `limit`, with what a title says of each: nothing, or `, part 2`."""
    count = -(-len(items) // limit)
    for part in range(count):
        group = items[part * len(items) // count : (part + 1) * len(items) // count]
        yield f", part {part + 1}" if count > 1 else "", group


def join_labels(*texts: str) -> str:
    """Join the texts that are not empty with commas."""
    return ", ".join(text for text in texts if text)
