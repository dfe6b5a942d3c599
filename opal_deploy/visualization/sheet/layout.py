"""The layout of a sheet: from content and photograph to a drawing 1200 pixels wide.

From the top: the answer with its margin and reasons to doubt it; the photograph with the predicted class's boxes and,
smaller, the runner-up's; patch and bar of each slot of both classes, strongest first, with the sums; patches of other
images of the predicted class, if there is an atlas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.records.names import hide_folders
from opal_deploy.visualization.atlas.entries import Exemplar, Exemplars
from opal_deploy.visualization.overlay import check_display
from opal_deploy.visualization.sheet.content import HEADINGS, ClassView, SheetContent, SlotView, format_difference
from opal_deploy.visualization.sheet.drawing import (
    Bitmap,
    Drawing,
    Rect,
    Rectangle,
    Shape,
    Text,
    cut_context,
    draw_attention_map,
    draw_class_boxes,
    enlarge,
    fit_size,
    locate_cell,
)
from opal_deploy.visualization.style import (
    ALERT,
    FAINT,
    INK,
    RGB,
    TRACK,
    WHITE,
    fit_line,
    format_number,
    measure_text,
    slot_color,
    text_color,
    truncate_middle,
    wrap_text,
)

WIDTH: Final = 1200
_EDGE: Final = 36
_INNER: Final = WIDTH - 2 * _EDGE
_RULE: RGB = (208, 208, 203)
_ALERT_PAPER: RGB = (251, 236, 232)
_BAR: RGB = (70, 70, 70)
_MARKS: Final[dict[str, RGB]] = {"correct": (22, 101, 52), "wrong": ALERT}
_TITLE, _HEAD, _BODY, _SMALL = 34, 19, 16, 14

# the two halves: the predicted class on the left, the runner-up on the right
_LEFT, _LEFT_END, _RIGHT, _RIGHT_END = _EDGE, 630, 732, WIDTH - _EDGE
_MIDDLE = (_LEFT_END + _RIGHT) // 2
_PHOTOGRAPH, _SMALL_PHOTOGRAPH = (_LEFT_END - _LEFT, 520), (_RIGHT_END - _RIGHT, 330)
# widths in a slot's row: number, runner-up's patch, gap after each bitmap, value after the bar
_SWATCH, _PATCH, _GAP, _VALUE = 42, 84, 14, 62
# exemplars: maximum number of columns, minimum width side by side
_MAX_COLUMNS: Final = 10
_MIN_EXEMPLAR_WIDTH: Final = 130
# smallest cell outline with a white line inside it
_MIN_WHITE: Final = 8


def layout_sheet(
    content: SheetContent, photograph: Image.Image, exemplars: Exemplars | None = None, *, fields: bool = False
) -> Drawing:
    """Return the drawing of one sheet.

    Args:
        photograph: the whole oriented image, RGB, or its `to_display`.

    Raises:
        ValueError: the photograph has another size than the content.
    """
    check_display(photograph, (content.width, content.height))
    page = _Page(content, photograph, fields=fields)
    page.add_answer()
    page.add_photographs()
    page.add_slots()
    if exemplars is not None:
        page.add_exemplars(exemplars)
    return page.to_drawing()


class _Page:
    """A sheet that grows downwards; the next part starts at `y`."""

    def __init__(self, content: SheetContent, photograph: Image.Image, *, fields: bool) -> None:
        self.content, self.photograph, self.fields = content, photograph, fields
        self.size = content.width, content.height
        self.shapes: list[Shape] = []
        self.y = _EDGE

    def to_drawing(self) -> Drawing:
        """Return everything added so far as a drawing."""
        return Drawing(WIDTH, self.y + _EDGE, self.content.title, self.content.describe(), tuple(self.shapes))

    def text(self, x: int, y: int, text: str, size: int = _BODY, color: RGB = INK, **how: object) -> None:
        self.shapes.append(Text(x, y, text, size, color, **how))  # type: ignore[arg-type]

    def paragraph(self, text: str, x: int, width: int, *, size: int = _BODY, color: RGB = INK, lines: int = 4) -> None:
        for line in wrap_text(text, size, width, lines):
            self.y += round(size * 1.4)
            self.text(x, self.y - round(size * 0.4), line, size, color)

    def add_answer(self) -> None:
        """Add the predicted label, the image's label and name, both cosines, the margin and cautions."""
        content = self.content
        for line in wrap_text(content.predicted.name, _TITLE, _INNER, 2):
            self.y += 40
            self.text(_EDGE, self.y - 10, line, _TITLE, bold=True)
        self._verdict()
        self.y += 24
        name = truncate_middle(hide_folders(content.image) or "(no name)", _BODY, _INNER)
        self.text(_EDGE, self.y - 8, name, _BODY, FAINT)
        self.y += 14
        top = self.y
        for view, role in ((content.predicted, "predicted"), (content.runner_up, "runner-up")):
            if view is not None:
                self._cosine_bar(view, role)
        if content.margin is not None:
            color = ALERT if content.abstained else INK
            middle = (top + self.y) // 2
            self.text(_RIGHT_END, middle, format_number(content.margin), 40, color, anchor="end", bold=True)
            self.text(_RIGHT_END, middle + 22, "margin", _BODY, color, anchor="end")
        self.y += 6
        cautions = content.cautions()
        if cautions:
            height = 26 * len(cautions) + 12
            self.shapes.append(Rect(_EDGE, self.y, _INNER, height, _ALERT_PAPER, ALERT))
            self.y += 8
            for caution in cautions:
                self.text(_EDGE + 14, self.y + 18, fit_line(caution, _BODY, _INNER - 28), _BODY, ALERT)
                self.y += 26
            self.y += 10

    def _verdict(self) -> None:
        """Add the image's label, if it is known, with the mark `correct` or `wrong`."""
        mark, label = self.content.verdict
        if not mark and not label:
            return
        self.y += 28
        x = _EDGE
        if mark:
            width = round(measure_text(mark, _BODY)) + 20
            self.shapes.append(Rect(x, self.y - 22, width, 22, _MARKS[mark]))
            self.text(x + width // 2, self.y - 6, mark, _BODY, WHITE, anchor="middle", bold=True)
            x += width + 10
        self.text(x, self.y - 6, fit_line(label, _BODY, _EDGE + _INNER - x), _BODY)
        self.y += 4

    def _cosine_bar(self, view: ClassView, role: str) -> None:
        middle = self.y + 16
        self.text(_EDGE, middle + 6, role, _SMALL, FAINT)
        self.text(_EDGE + 84, middle + 6, fit_line(view.name, _BODY, 320), _BODY)
        left, right = 452, 880
        share = min(max(view.cosine, 0.0), 1.0)
        self.shapes.append(Rect(left, middle - 8, right - left, 16, TRACK))
        self.shapes.append(Rect(left, middle - 8, round((right - left) * share), 16, _BAR))
        self.text(right + 12, middle + 6, f"cosine {format_number(view.cosine)}", _BODY)
        self.y += 32

    def add_photographs(self) -> None:
        """Add the photograph with the boxes of each class, and sentences on the difference."""
        content = self.content
        self.y += 14
        top = self.y
        left_end = self._photograph(content.predicted, "Evidence for the answer", _LEFT, _PHOTOGRAPH)
        self.y = top
        if content.runner_up is not None:
            self._photograph(content.runner_up, "Evidence for the runner-up", _RIGHT, _SMALL_PHOTOGRAPH)
            self.y += 6
            for sentence in content.describe_difference():
                self.paragraph(sentence, _RIGHT, _RIGHT_END - _RIGHT, lines=5)
                self.y += 4
        for sentence in content.explain_figures(fields=self.fields):
            self.paragraph(sentence, _RIGHT, _RIGHT_END - _RIGHT, size=_SMALL, color=FAINT, lines=5)
        self.y = max(self.y, left_end) + 18

    def _photograph(self, view: ClassView, heading: str, x: int, bounds: tuple[int, int]) -> int:
        self.text(x, self.y + 20, heading, _HEAD, bold=True)
        self.text(x, self.y + 42, fit_line(view.name, _BODY, bounds[0]), _BODY)
        self.y += 54
        drawn = draw_class_boxes(
            self.photograph, self.size, view, bounds, largest=self.content.largest, fields=self.fields
        )
        alt = f"the image with the evidence boxes for {view.name}"
        self.shapes.append(Bitmap(x, self.y, drawn, alt))
        self._view_frame(x, self.y, drawn.size)
        self.y += drawn.height
        self.paragraph(view.describe_places(), x, bounds[0], size=_SMALL, color=FAINT, lines=1)
        return self.y

    def _view_frame(self, x: int, y: int, size: tuple[int, int]) -> None:
        """Add a frame around the crop that the model was shown, where that is not the whole image."""
        content = self.content
        if content.crop == (0, 0, content.width, content.height):
            return
        across, down = size[0] / content.width, size[1] / content.height
        left, top = x + round(content.crop[0] * across), y + round(content.crop[1] * down)
        width = round((content.crop[2] - content.crop[0]) * across)
        height = round((content.crop[3] - content.crop[1]) * down)
        self.shapes.append(Rect(left, top, width, height, edge=INK))
        self.shapes.append(Rect(left + 1, top + 1, width - 2, height - 2, edge=WHITE))

    def add_slots(self) -> None:
        """Add a row per rank with patch, attention map and bar of both classes' slots; then the sums."""
        content = self.content
        self._rule()
        heading = fit_line(HEADINGS[content.meaning].capitalize(), _HEAD, _LEFT_END - _LEFT)
        self.text(_LEFT, self.y + 22, heading, _HEAD, bold=True)
        if content.runner_up is not None:
            label = fit_line(f"Runner-up: {content.runner_up.name}", _BODY, _RIGHT_END - _RIGHT)
            self.text(_RIGHT, self.y + 22, label, _BODY)
        if content.differences is not None:
            self.text(_MIDDLE, self.y + 22, "difference", _SMALL, FAINT, anchor="middle")
        self.y += 42
        # a class whose slots were dropped has fewer than the other
        count = max(len(view.slots) for view in content.views)
        tall = 96 if count <= 5 else 62
        max_attention = self._max_attention()
        differences = content.round_differences()
        for rank in range(count):
            for view, left, end in zip(content.views, (_LEFT, _RIGHT), (_LEFT_END, _RIGHT_END), strict=False):
                if rank < len(view.slots):
                    self._slot(view.slots[rank], left, end, tall, max_attention)
            if differences:
                text = format_difference(differences[rank])
                self.text(_MIDDLE, self.y + tall // 2 + 17, text, _BODY, anchor="middle")
            self.y += tall + 18
        self._sums()
        if max_attention is not None:
            self.y += 4
            note = f"Attention maps show the whole crop, from 0 (pale) to {format_number(max_attention)} (dark)."
            self.paragraph(note, _LEFT, _INNER, size=_SMALL, color=FAINT, lines=1)

    def _max_attention(self) -> float | None:
        maps = [slot.attention for view in self.content.views for slot in view.slots if slot.attention is not None]
        return max(float(np.max(each)) for each in maps) or 1.0 if maps else None

    def _slot(self, slot: SlotView, x: int, end: int, tall: int, max_attention: float | None) -> None:
        maps = max_attention is not None
        # bars of both halves have one scale; the predicted class's patches take the remaining width
        bar_width = _RIGHT_END - _RIGHT - _SWATCH - _VALUE - (2 if maps else 1) * (_PATCH + _GAP)
        wide = end - x - _SWATCH - _VALUE - bar_width - _GAP
        if maps:
            wide = (wide - _GAP) // 2
        self._swatch(slot.slot, x, self.y + (tall - 30) // 2)
        x += _SWATCH
        patch, cell = cut_context(self.photograph, self.size, slot.box, slot.field, (wide, tall))
        self._framed(patch, x, self.y + (tall - patch.height) // 2, slot, cell)
        x += wide + _GAP
        if max_attention is not None and slot.attention is not None:
            self._attention_map(slot, slot.attention, x, tall, wide, max_attention)
            x += wide + _GAP
        middle = self.y + tall // 2
        place = slot.cell_text
        if slot.name:
            name = fit_line(slot.name, _SMALL, end - x - measure_text(f", {place}", _SMALL))
            place = f"{name}, {place}"
        self.text(x, middle - 10, place, _SMALL, FAINT)
        self.shapes.append(Rect(x, middle + 2, bar_width, 18, TRACK))
        start, stop = round(slot.start * bar_width), round(slot.stop * bar_width)
        self.shapes.append(Rect(x + start, middle + 2, stop - start, 18, slot_color(slot.slot), INK))
        self.text(end, middle + 17, format_number(slot.value), _BODY, anchor="end")

    def _attention_map(
        self, slot: SlotView, attention: NDArray[np.float32], x: int, tall: int, wide: int, maximum: float
    ) -> None:
        x0, y0, x1, y1 = self.content.crop
        rows, cols = attention.shape
        size = fit_size((max(x1 - x0, 1), max(y1 - y0, 1)), (wide, tall))
        size = (max(size[0], cols), max(size[1], rows))
        left, top = x + wide - size[0], self.y + (tall - size[1]) // 2
        alt = f"attention map of slot {slot.slot}, highest in row {slot.cell[0]}, column {slot.cell[1]}"
        self.shapes.append(Bitmap(left, top, draw_attention_map(attention, maximum, size), alt))
        self.shapes.append(Rect(left - 1, top - 1, size[0] + 2, size[1] + 2, edge=_RULE))
        row, col = slot.cell
        cell_left, cell_top = left + col * size[0] // cols, top + row * size[1] // rows
        cell = (left + (col + 1) * size[0] // cols - cell_left, top + (row + 1) * size[1] // rows - cell_top)
        self.shapes.append(Rect(cell_left - 2, cell_top - 2, cell[0] + 4, cell[1] + 4, edge=INK))
        self.shapes.append(
            Rect(cell_left - 1, cell_top - 1, cell[0] + 2, cell[1] + 2, edge=slot_color(slot.slot), line=2)
        )

    def _sums(self) -> None:
        content = self.content
        if content.predicted.total is None:
            return
        self.shapes.append(Rect(_LEFT, self.y, _LEFT_END - _LEFT, 1, INK))
        baseline = self.y + 24
        halves = [(content.predicted, _LEFT, _LEFT_END)]
        if content.runner_up is not None:
            halves.append((content.runner_up, _RIGHT, _RIGHT_END))
            self.shapes.append(Rect(_RIGHT, self.y, _RIGHT_END - _RIGHT, 1, INK))
        for view, left, end in halves:
            label = fit_line(content.label_sum(view), _BODY, end - left - 80)
            self.text(end - 74, baseline, label, _BODY, FAINT, anchor="end")
            self.text(end, baseline, format_number(view.total), _BODY, anchor="end", bold=True)
        if content.differences is not None and content.margin is not None:
            self.shapes.append(Rect(_LEFT_END + 16, self.y, _RIGHT - _LEFT_END - 32, 1, INK))
            margin = format_difference(sum(content.round_differences()))
            self.text(_MIDDLE, baseline, margin, _BODY, anchor="middle", bold=True)
            self.text(_MIDDLE, baseline + 18, "margin", _SMALL, FAINT, anchor="middle")
        self.y += 44

    def add_exemplars(self, exemplars: Exemplars) -> None:
        """Add patches of other images below each slot's patch."""
        slots = self.content.predicted.slots
        self.y += 8
        self._rule()
        relation = "of" if exemplars.of_class else "predicted as"
        heading = f"This looks like that: other images {relation} {self.content.predicted.name}"
        self.text(_LEFT, self.y + 22, fit_line(heading, _HEAD, _INNER), _HEAD, bold=True)
        self.y += 32
        self.paragraph(f"Framed: this image. {exemplars.origin}", _LEFT, _INNER, size=_SMALL, color=FAINT, lines=2)
        self.y += 10
        columns = min(len(slots), _MAX_COLUMNS)
        for first in range(0, len(slots), columns):
            self._exemplar_columns(slots[first : first + columns], exemplars.by_slot, _INNER // columns)

    def _exemplar_columns(
        self, slots: Sequence[SlotView], by_slot: Mapping[int, Sequence[Exemplar]], column: int
    ) -> None:
        """Add a column per slot: its patch, and below it the exemplars, side by side if slots are few."""
        side_by_side = max(1, column // _MIN_EXEMPLAR_WIDTH)
        bounds = (column // side_by_side - 12, 120)
        own = [cut_context(self.photograph, self.size, slot.box, slot.field, bounds) for slot in slots]
        for index, slot in enumerate(slots):
            x = _LEFT + index * column
            self._swatch(slot.slot, x, self.y)
            self.text(x + 40, self.y + 20, fit_line(slot.name or "", _SMALL, column - 52), _SMALL, FAINT)
            self._framed(own[index][0], x + 4, self.y + 40, slot, own[index][1])
        self.y += 40 + max(patch.height for patch, _ in own) + 14
        depth = max((len(by_slot.get(slot.slot, ())) for slot in slots), default=0)
        for first in range(0, depth, side_by_side):
            tallest = 0
            for index, slot in enumerate(slots):
                for place, exemplar in enumerate(by_slot.get(slot.slot, ())[first : first + side_by_side]):
                    patch = enlarge(exemplar.image, bounds)
                    x = _LEFT + index * column + place * (column // side_by_side) + 4
                    self.shapes.append(Bitmap(x, self.y, patch, exemplar.alt))
                    if exemplar.field is not None:
                        self._cell_outline(x, self.y, locate_cell(exemplar.box, exemplar.field, patch.size), slot)
                    caption = truncate_middle(exemplar.caption, 12, bounds[0])
                    self.text(x, self.y + patch.height + 15, caption, 12, FAINT)
                    if exemplar.warning:
                        warning = truncate_middle(exemplar.warning, 12, bounds[0])
                        self.text(x, self.y + patch.height + 30, warning, 12, ALERT, bold=True)
                    tallest = max(tallest, patch.height + (15 if exemplar.warning else 0))
            self.y += tallest + 26
        if not depth:
            self.paragraph("The atlas has no other image of this class.", _LEFT, _INNER, lines=1)
        self.y += 10

    def _rule(self) -> None:
        self.shapes.append(Rect(_EDGE, self.y, _INNER, 1, _RULE))
        self.y += 10

    def _swatch(self, slot: int, x: int, y: int) -> None:
        color = slot_color(slot)
        self.shapes.append(Rect(x, y, 30, 30, color, INK))
        self.text(x + 15, y + 21, str(slot), _BODY, text_color(color), anchor="middle")

    def _cell_outline(self, x: int, y: int, cell: Rectangle, slot: SlotView) -> None:
        left, top, width, height = x + cell[0], y + cell[1], cell[2], cell[3]
        self.shapes.append(Rect(left - 2, top - 2, width + 4, height + 4, edge=INK))
        self.shapes.append(Rect(left - 1, top - 1, width + 2, height + 2, edge=slot_color(slot.slot)))
        if min(width, height) >= _MIN_WHITE:  # keeps a dark colour visible on a dark photograph
            self.shapes.append(Rect(left, top, width, height, edge=WHITE))

    def _framed(self, patch: Image.Image, x: int, y: int, slot: SlotView, cell: Rectangle | None) -> None:
        alt = f"patch of slot {slot.slot}, {slot.place}"
        self.shapes.append(Bitmap(x, y, patch, alt))
        if cell is not None:
            self._cell_outline(x, y, cell, slot)
        width, height = patch.size
        self.shapes.append(Rect(x - 3, y - 3, width + 6, height + 6, edge=slot_color(slot.slot), line=3))
        self.shapes.append(Rect(x - 4, y - 4, width + 8, height + 8, edge=INK))
