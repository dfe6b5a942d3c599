"""The layout of a sheet: from content and photograph to a drawing, in two columns or, for phones, in one.

From the top: the answer with its margin and notes on it; the photograph with the predicted class's boxes and the
runner-up's; patch and bar of each slot of both classes, strongest first, with the sums; patches of other images of the
predicted class, if there is an atlas. In one column, each class's slots follow its photograph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.records.names import hide_folders
from opal_deploy.visualization.atlas.entries import Exemplars
from opal_deploy.visualization.overlay import check_display
from opal_deploy.visualization.sheet.canvas import BODY, HEAD, NARROW, RULE, SMALL, TITLE, WIDE, Canvas, Form
from opal_deploy.visualization.sheet.content import HEADINGS, ClassView, SheetContent, SlotView, format_difference
from opal_deploy.visualization.sheet.drawing import (
    Drawing,
    Rect,
    draw_attention_map,
    draw_class_boxes,
    fit_size,
)
from opal_deploy.visualization.sheet.exemplars import add_exemplars
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
    truncate_middle,
    wrap_text,
)

_NOTE_PAPER: RGB = (241, 241, 238)
_ALERT_PAPER: RGB = (251, 236, 232)
_BAR: RGB = (70, 70, 70)
_MARKS: Final[dict[str, RGB]] = {"correct": (22, 101, 52), "wrong": ALERT}
_ROLES: Final = ("predicted", "runner-up")
_EVIDENCE_OF: Final = ("Evidence for the answer", "Evidence for the runner-up")
# widths in a slot's row: number, gap after each bitmap, value after the bar
_SWATCH, _GAP, _VALUE = 42, 14, 62
_MARGIN: Final = 40  # font size


def layout_sheet(
    content: SheetContent,
    photograph: Image.Image,
    exemplars: Exemplars | None = None,
    *,
    fields: bool = False,
    narrow: bool = False,
) -> Drawing:
    """Return the drawing of one sheet, 1200 pixels wide, or 455 with `narrow`.

    Args:
        photograph: the whole oriented image, RGB, or its `to_display`.
        fields: draw effective receptive fields on the photographs.
        narrow: one column, for phones.

    Raises:
        ValueError: the photograph has another size than the content.
    """
    check_display(photograph, (content.width, content.height))
    page = _Page(content, photograph, NARROW if narrow else WIDE, fields=fields)
    page.add_answer()
    if narrow:
        page.add_classes_in_turn()
    else:
        page.add_classes_side_by_side()
    if exemplars is not None:
        add_exemplars(page, content.predicted, exemplars)
    return page.to_drawing()


class _Page(Canvas):
    """The parts of a sheet, from the top."""

    def __init__(self, content: SheetContent, photograph: Image.Image, form: Form, *, fields: bool) -> None:
        super().__init__(photograph, (content.width, content.height), form)
        self.content, self.fields = content, fields
        maps = [slot.attention for view in content.views for slot in view.slots if slot.attention is not None]
        self.max_attention = max(float(np.max(each)) for each in maps) or 1.0 if maps else None

    def to_drawing(self) -> Drawing:
        """Return everything added so far as a drawing."""
        content, height = self.content, self.y + self.left
        return Drawing(self.form.width, height, content.title, content.describe(), tuple(self.shapes), self.form.scale)

    def add_answer(self) -> None:
        """Add the predicted label, the image's label and name, both cosines, the margin and notes."""
        content = self.content
        title, below = content.headline
        for text, size in ((title, TITLE), (below, HEAD)):
            for line in wrap_text(text, size, self.inner, 3 if self.form.stacked else 2):
                self.y += size + 6
                self.text(self.left, self.y - 10, line, size, bold=size == TITLE)
        self._verdict()
        self.y += 24
        name = truncate_middle(hide_folders(content.image) or "(no name)", BODY, self.inner)
        self.text(self.left, self.y - 8, name, color=FAINT)
        self.y += 14
        top = self.y
        for view, role in zip(content.views, _ROLES, strict=False):
            self._cosine_bar(view, role)
        if content.margin is not None:
            self._margin(format_number(content.margin), (top + self.y) // 2)
        self.y += 6
        for sentence in content.sentences:
            self.paragraph(sentence, self.left, self.inner, lines=14)
        self.y += 8
        self._notes()

    def _verdict(self) -> None:
        """Add the image's label, if it is known, with the mark `correct` or `wrong`."""
        mark, label = self.content.verdict
        if not mark and not label:
            return
        self.y += 28
        x = self.left
        if mark:
            width = round(measure_text(mark, BODY)) + 20
            self.shapes.append(Rect(x, self.y - 22, width, 22, _MARKS[mark]))
            self.text(x + width // 2, self.y - 6, mark, color=WHITE, anchor="middle", bold=True)
            x += width + 10
        self.text(x, self.y - 6, fit_line(label, BODY, self.right - x))
        self.y += 4

    def _cosine_bar(self, view: ClassView, role: str) -> None:
        left, right = self.form.cosine_bar
        self.text(self.left, self.y + 22, role, SMALL, FAINT)
        name_end = self.right if self.form.stacked else left - 12
        self.text(self.left + 84, self.y + 22, fit_line(view.name, BODY, name_end - self.left - 84))
        if self.form.stacked:
            self.y += 26
        middle = self.y + 16
        if view.cosine is not None:
            share = min(max(view.cosine, 0.0), 1.0)
            self.shapes.append(Rect(left, middle - 8, right - left, 16, TRACK))
            self.shapes.append(Rect(left, middle - 8, round((right - left) * share), 16, _BAR))
        self.text(right + 12, middle + 6, view.match)
        self.y += 32

    def _margin(self, number: str, middle: int) -> None:
        """Add the margin next to the bars of the cosines, whose middle is given, or below them."""
        if self.form.stacked:
            self.y += 50
            self.text(self.left, self.y - 12, number, _MARGIN, bold=True)
            self.text(self.left + round(measure_text(number, _MARGIN)) + 12, self.y - 12, "margin")
        else:
            self.text(self.right, middle, number, _MARGIN, anchor="end", bold=True)
            self.text(self.right, middle + 22, "margin", anchor="end")

    def _notes(self) -> None:
        """Add the content's cautions: calmly, unless the answer is known to be wrong."""
        wrong = self.content.correct is False
        lines = [
            line for caution in self.content.cautions() for line in wrap_text(caution, BODY, self.inner - 28, lines=3)
        ]
        if not lines:
            return
        paper, edge, color = (_ALERT_PAPER, ALERT, ALERT) if wrong else (_NOTE_PAPER, RULE, INK)
        self.shapes.append(Rect(self.left, self.y, self.inner, 26 * len(lines) + 12, paper, edge))
        self.y += 8
        for line in lines:
            self.text(self.left + 14, self.y + 18, line, color=color)
            self.y += 26
        self.y += 10

    def add_classes_side_by_side(self) -> None:
        """Add both photographs, then the slots of both classes in rows."""
        self.y += 14
        top = self.y
        self._photograph(0)
        left_end, self.y = self.y, top
        for index in range(1, len(self.content.views)):
            self._photograph(index)
        self._sentences(self.form.columns[1][0])
        self.y = max(self.y, left_end) + 18
        self.rule(self.left, self.inner)
        self._slots(range(len(self.content.views)))
        self._attention_note()

    def add_classes_in_turn(self) -> None:
        """Add the photograph and the slots of one class, then of the other."""
        for index in range(len(self.content.views)):
            self.y += 14
            self._photograph(index)
            self.y += 14
            self._slots([index])
            self.y += 8
            self.rule(self.left, self.inner)
        self._sentences(self.left)
        self._attention_note()

    def _photograph(self, index: int) -> None:
        """Add the photograph with the boxes of one class."""
        view, x, bounds = self.content.views[index], self.form.columns[index][0], self.form.photographs[index]
        self.text(x, self.y + 20, _EVIDENCE_OF[index], HEAD, bold=True)
        self.text(x, self.y + 42, fit_line(view.name, BODY, bounds[0]))
        self.y += 54
        drawn = draw_class_boxes(
            self.photograph, self.size, view, bounds, are_parts=self.content.meaning == "cosine", fields=self.fields,
            scale=self.form.scale, min_letters=self.form.min_letters,
        )  # fmt: skip
        size = self.bitmap(x, self.y, drawn, f"the image with the evidence boxes for {view.name}")
        self._view_frame(x, self.y, size)
        self.y += size[1]
        self.paragraph(view.describe_places(), x, bounds[0], size=SMALL, color=FAINT, lines=1)

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

    def _sentences(self, x: int) -> None:
        """Add sentences on how to read the sheet."""
        for sentence in self.content.explain_figures(fields=self.fields):
            self.paragraph(sentence, x, self.right - x, size=SMALL, color=FAINT, lines=5)

    def _slots(self, indices: Sequence[int]) -> None:
        """Add a row per rank with patch, attention map and bar of the slots of these classes; then the sums."""
        content, form = self.content, self.form
        headings = HEADINGS[content.meaning].capitalize(), f"Runner-up: {content.views[-1].name}"
        for index in indices:
            (x, end), size = form.columns[index], (HEAD, BODY)[index]
            self.text(x, self.y + 22, fit_line(headings[index], size, end - x), size, bold=index == 0)
        differences = content.round_differences() if 1 in indices else []
        if differences:
            self.text(form.difference, self.y + 22, "difference", SMALL, FAINT, anchor="middle")
        self.y += 42
        tall = 96 if 0 in indices and max(len(view.slots) for view in content.views) <= 5 else 62
        # a class whose slots were dropped has fewer than the other
        for rank in range(max(len(content.views[index].slots) for index in indices)):
            for index in indices:
                if rank < len(content.views[index].slots):
                    self._slot(content.views[index].slots[rank], *form.columns[index], tall)
            if differences:
                text = format_difference(differences[rank])
                self.text(form.difference, self.y + tall // 2 + 17, text, anchor="middle")
            self.y += tall + 18
        self._sums(indices, differences)

    def _slot(self, slot: SlotView, x: int, end: int, tall: int) -> None:
        maps, form = self.max_attention is not None, self.form
        # bars of both classes have one scale; the predicted class's patches take the remaining width
        right = form.columns[1][1] - form.columns[1][0]
        bar_width = right - _SWATCH - _VALUE - (2 if maps else 1) * (form.patch + _GAP)
        wide = end - x - _SWATCH - _VALUE - bar_width - _GAP
        if maps:
            wide = (wide - _GAP) // 2
        self.swatch(slot.slot, x, self.y + (tall - 30) // 2)
        x += _SWATCH
        patch = self.cut_patch(slot, (wide, tall))
        self.framed_patch(x, self.y + (tall - patch.height // form.scale) // 2, patch, slot)
        x += wide + _GAP
        if slot.attention is not None:
            self._attention_map(slot, slot.attention, x, tall, wide)
            x += wide + _GAP
        middle = self.y + tall // 2
        place = slot.cell_text
        if slot.name:
            name = fit_line(slot.name, SMALL, end - x - measure_text(f", {place}", SMALL))
            place = f"{name}, {place}"
        self.text(x, middle - 10, place, SMALL, FAINT)
        self.shapes.append(Rect(x, middle + 2, bar_width, 18, TRACK))
        start, stop = round(slot.start * bar_width), round(slot.stop * bar_width)
        self.shapes.append(Rect(x + start, middle + 2, stop - start, 18, slot_color(slot.slot), INK))
        self.text(end, middle + 17, format_number(slot.value), anchor="end")

    def _attention_map(self, slot: SlotView, attention: NDArray[np.float32], x: int, tall: int, wide: int) -> None:
        x0, y0, x1, y1 = self.content.crop
        rows, cols = attention.shape
        size = fit_size((max(x1 - x0, 1), max(y1 - y0, 1)), (wide, tall))
        size = (max(size[0], cols), max(size[1], rows))
        left, top = x + wide - size[0], self.y + (tall - size[1]) // 2
        alt = f"attention map of slot {slot.slot}, highest in row {slot.cell[0]}, column {slot.cell[1]}"
        pixels = size[0] * self.form.scale, size[1] * self.form.scale
        self.bitmap(left, top, draw_attention_map(attention, self.max_attention or 1.0, pixels), alt)
        self.shapes.append(Rect(left - 1, top - 1, size[0] + 2, size[1] + 2, edge=RULE))
        row, col = slot.cell
        cell_left, cell_top = left + col * size[0] // cols, top + row * size[1] // rows
        cell = (left + (col + 1) * size[0] // cols - cell_left, top + (row + 1) * size[1] // rows - cell_top)
        self.shapes.append(Rect(cell_left - 2, cell_top - 2, cell[0] + 4, cell[1] + 4, edge=INK))
        self.shapes.append(
            Rect(cell_left - 1, cell_top - 1, cell[0] + 2, cell[1] + 2, edge=slot_color(slot.slot), line=2)
        )

    def _attention_note(self) -> None:
        if self.max_attention is not None:
            self.y += 4
            note = f"Attention maps show the whole crop, from 0 (pale) to {format_number(self.max_attention)} (dark)."
            self.paragraph(note, self.left, self.inner, size=SMALL, color=FAINT, lines=2)

    def _sums(self, indices: Sequence[int], differences: Sequence[int]) -> None:
        if self.content.predicted.total is None:
            return
        baseline, form = self.y + 24, self.form
        for index in indices:
            view, (left, end) = self.content.views[index], form.columns[index]
            self.shapes.append(Rect(left, self.y, end - left, 1, INK))
            label = fit_line(self.content.label_sum(view), BODY, end - left - 80)
            self.text(end - 74, baseline, label, color=FAINT, anchor="end")
            self.text(end, baseline, format_number(view.total), anchor="end", bold=True)
        if differences:
            self.shapes.append(Rect(form.difference - 35, self.y, 70, 1, INK))
            self.text(form.difference, baseline, format_difference(sum(differences)), anchor="middle", bold=True)
            self.text(form.difference, baseline + 18, "margin", SMALL, FAINT, anchor="middle")
        self.y += 44
