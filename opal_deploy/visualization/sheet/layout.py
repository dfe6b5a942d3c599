"""The layout of a sheet: one column, from the answer over both classes and their slots to the exemplars.

A sheet is 455 pixels wide and drawn at two pixels each, so that it can be read on a phone.
"""

from __future__ import annotations

from typing import Final

from PIL import Image

from opal_deploy.records.names import hide_folders
from opal_deploy.visualization.atlas.entries import Exemplars
from opal_deploy.visualization.overlay import check_display
from opal_deploy.visualization.sheet.content import HEADINGS, ClassView, SheetContent, SlotView
from opal_deploy.visualization.sheet.drawing import (
    SCALE,
    Anchor,
    Bitmap,
    Box,
    Drawing,
    Rect,
    Shape,
    Text,
    cut_context,
    draw_class_boxes,
    enlarge,
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
    wrap_text,
)

# font sizes
TITLE, HEAD, BODY, SMALL = 34, 19, 16, 14
RULE: RGB = (208, 208, 203)
_NOTE_PAPER: RGB = (241, 241, 238)
_ALERT_PAPER: RGB = (251, 236, 232)
_BAR: RGB = (70, 70, 70)
_MARKS: Final[dict[str, RGB]] = {"correct": (22, 101, 52), "wrong": ALERT}
_ROLES: Final = ("predicted", "runner-up")
_EVIDENCE_OF: Final = ("Evidence for the answer", "Evidence for the runner-up")
_MARGIN: Final = 40  # font size
_WIDTH, _LEFT, _RIGHT = 455, 20, 435
_INNER: Final = _RIGHT - _LEFT
# largest size of the photograph with each class's boxes, and right end of the bars of cosines
_PHOTOGRAPHS: Final = ((_INNER, 520), (_INNER, 330))
_COSINE_END: Final = 300
# a slot's row: number, patch, gap after the patch, value after the bar; its height for few slots, and for many
_SWATCH, _PATCH, _GAP, _VALUE = 42, 110, 14, 62
_TALL, _LOW = 96, 62
# smallest cell outline with a white line inside it
_MIN_WHITE: Final = 8
# exemplars side by side, and the largest height of one
_ACROSS, _EXEMPLAR_HEIGHT = 3, 120


def layout_sheet(content: SheetContent, photograph: Image.Image, exemplars: Exemplars | None = None) -> Drawing:
    """Return the drawing of one sheet.

    Args:
        photograph: the whole oriented image, RGB, or its `to_display`.

    Raises:
        ValueError: the photograph has another size than the content.
    """
    check_display(photograph, (content.width, content.height))
    page = _Page(content, photograph)
    page.add_answer()
    for index in range(len(content.views)):
        page.add_class(index)
    page.add_explanations()
    if exemplars is not None:
        page.add_exemplars(exemplars)
    return page.to_drawing()


class _Page:
    """The parts of a sheet, from the top; the next one starts at `y`."""

    def __init__(self, content: SheetContent, photograph: Image.Image) -> None:
        self.content, self.photograph = content, photograph
        self.size = content.width, content.height
        self.y = _LEFT
        self.shapes: list[Shape] = []

    def to_drawing(self) -> Drawing:
        """Return everything added so far as a drawing."""
        return Drawing(_WIDTH, self.y + _LEFT, tuple(self.shapes))

    def add_answer(self) -> None:
        """Add the predicted label, the image's label and name, both cosines, the margin and notes."""
        content = self.content
        title, below = content.headline
        for text, size in ((title, TITLE), (below, HEAD)):
            for line in wrap_text(text, size, _INNER, 3):
                self.y += size + 6
                self._text(_LEFT, self.y - 10, line, size, bold=size == TITLE)
        self._verdict()
        self.y += 24
        self._text(_LEFT, self.y - 8, fit_line(hide_folders(content.image) or "(no name)", BODY, _INNER), color=FAINT)
        self.y += 14
        for view, role in zip(content.views, _ROLES, strict=False):
            self._cosine_bar(view, role)
        if content.margin is not None:
            number = format_number(content.margin)
            self.y += 50
            self._text(_LEFT, self.y - 12, number, _MARGIN, bold=True)
            self._text(_LEFT + round(measure_text(number, _MARGIN)) + 12, self.y - 12, "margin")
        self.y += 6
        for sentence in content.sentences:
            self._paragraph(sentence, lines=14)
        self.y += 8
        self._notes()

    def add_class(self, index: int) -> None:
        """Add the photograph with the boxes of one class, and a row per slot with patch and bar."""
        content = self.content
        view, bounds = content.views[index], _PHOTOGRAPHS[index]
        self.y += 14
        self._text(_LEFT, self.y + 20, _EVIDENCE_OF[index], HEAD, bold=True)
        self._text(_LEFT, self.y + 42, fit_line(view.name, BODY, _INNER))
        self.y += 54
        drawn = draw_class_boxes(
            self.photograph, self.size, view, bounds, are_parts=content.meaning == "cosine", min_letters=SMALL
        )
        size = self._bitmap(_LEFT, self.y, drawn, f"the image with the evidence boxes for {view.name}")
        self._view_frame(_LEFT, self.y, size)
        self.y += size[1]
        self._paragraph(view.describe_places(), size=SMALL, color=FAINT, lines=1)
        self.y += 14
        self._text(_LEFT, self.y + 22, HEADINGS[content.meaning].capitalize(), BODY, bold=index == 0)
        self.y += 42
        tall = _TALL if index == 0 and len(view.slots) <= 5 else _LOW
        for slot in view.slots:
            self._slot(slot, tall)
            self.y += tall + 18
        if view.total is not None:
            self._rule(INK)
            self._text(_RIGHT - 74, self.y + 14, content.label_sum(view), color=FAINT, anchor="end")
            self._text(_RIGHT, self.y + 14, format_number(view.total), anchor="end", bold=True)
            self.y += 34
        self.y += 8
        self._rule()

    def add_explanations(self) -> None:
        """Add sentences on how to read the sheet."""
        for sentence in self.content.explain_figures():
            self._paragraph(sentence, size=SMALL, color=FAINT, lines=5)

    def add_exemplars(self, exemplars: Exemplars) -> None:
        """Add "this looks like that": per slot of the predicted class its patch, then patches of other images."""
        view = self.content.predicted
        self.y += 18
        self._rule()
        relation = "of" if exemplars.of_class else "predicted as"
        for line in wrap_text(f"This looks like that: other images {relation} {view.name}", HEAD, _INNER, 2):
            self._text(_LEFT, self.y + 22, line, HEAD, bold=True)
            self.y += 26
        self.y += 6
        self._paragraph(f"Framed: this image. {exemplars.origin}", size=SMALL, color=FAINT)
        self.y += 10
        column = _INNER // _ACROSS
        bounds = (column - 12, _EXEMPLAR_HEIGHT)
        for slot in view.slots:
            self._swatch(slot.slot, _LEFT, self.y)
            self._text(_LEFT + 40, self.y + 20, fit_line(slot.place, SMALL, _INNER - 52), SMALL, FAINT)
            self.y += 40
            own = cut_context(self.photograph, self.size, slot.box, slot.field, bounds)
            self._framed_patch(_LEFT + 4, self.y, own, slot)
            tallest = own.height // SCALE
            for number, exemplar in enumerate(exemplars.by_slot.get(slot.slot, ()), 1):
                if number % _ACROSS == 0:
                    self.y, tallest = self.y + tallest + 14, 0
                x = _LEFT + 4 + number % _ACROSS * column
                size = self._bitmap(x, self.y, enlarge(exemplar.image, bounds), exemplar.alt)
                if exemplar.field is not None:
                    self._cell_outline(x, self.y, size, exemplar.box, exemplar.field, slot.slot)
                baseline = self.y + size[1] + SMALL + 3
                self._text(x, baseline, fit_line(exemplar.caption, SMALL, bounds[0]), SMALL, FAINT)
                tallest = max(tallest, size[1] + SMALL + 3)
            self.y += tallest + 14
        if not any(exemplars.by_slot.values()):
            self._paragraph("The atlas has no other image of this class.", lines=1)

    def _text(
        self,
        x: int,
        y: int,
        text: str,
        size: int = BODY,
        color: RGB = INK,
        *,
        anchor: Anchor = "start",
        bold: bool = False,
    ) -> None:
        """Add one line of text with its baseline at `y`."""
        self.shapes.append(Text(x, y, text, size, color, anchor, bold))

    def _paragraph(self, text: str, *, size: int = BODY, color: RGB = INK, lines: int = 4) -> None:
        """Add at most `lines` lines of text."""
        for line in wrap_text(text, size, _INNER, lines):
            self.y += round(size * 1.4)
            self._text(_LEFT, self.y - round(size * 0.4), line, size, color)

    def _bitmap(self, x: int, y: int, image: Image.Image, alt: str) -> tuple[int, int]:
        """Add an image, and return its width and height on the sheet."""
        bitmap = Bitmap(x, y, image, alt)
        self.shapes.append(bitmap)
        return bitmap.size

    def _rule(self, color: RGB = RULE) -> None:
        self.shapes.append(Rect(_LEFT, self.y, _INNER, 1, color))
        self.y += 10

    def _swatch(self, slot: int, x: int, y: int) -> None:
        """Add a slot's number on its colour."""
        color = slot_color(slot)
        self.shapes.append(Rect(x, y, 30, 30, color, INK))
        self._text(x + 15, y + 21, str(slot), color=text_color(color), anchor="middle")

    def _framed_patch(self, x: int, y: int, patch: Image.Image, slot: SlotView) -> None:
        """Add a slot's patch in its colour, with the cell outlined where the patch shows more than the cell."""
        width, height = self._bitmap(x, y, patch, f"patch of slot {slot.slot}, {slot.place}")
        if slot.field is not None:
            self._cell_outline(x, y, (width, height), slot.box, slot.field, slot.slot)
        self.shapes.append(Rect(x - 3, y - 3, width + 6, height + 6, edge=slot_color(slot.slot), line=3))
        self.shapes.append(Rect(x - 4, y - 4, width + 8, height + 8, edge=INK))

    def _cell_outline(self, x: int, y: int, size: tuple[int, int], box: Box, field: Box, slot: int) -> None:
        """Outline a cell, `box`, in a bitmap of `size` at (x, y) that shows `field`."""
        left, top, width, height = locate_cell(box, field, size)
        left, top = x + left, y + top
        self.shapes.append(Rect(left - 2, top - 2, width + 4, height + 4, edge=INK))
        self.shapes.append(Rect(left - 1, top - 1, width + 2, height + 2, edge=slot_color(slot)))
        # keeps a dark colour visible on a dark photograph
        if min(width, height) >= _MIN_WHITE:
            self.shapes.append(Rect(left, top, width, height, edge=WHITE))

    def _verdict(self) -> None:
        """Add the image's label, if it is known, with the mark `correct` or `wrong`."""
        mark, label = self.content.verdict
        if not mark and not label:
            return
        self.y += 28
        x = _LEFT
        if mark:
            width = round(measure_text(mark, BODY)) + 20
            self.shapes.append(Rect(x, self.y - 22, width, 22, _MARKS[mark]))
            self._text(x + width // 2, self.y - 6, mark, color=WHITE, anchor="middle", bold=True)
            x += width + 10
        self._text(x, self.y - 6, fit_line(label, BODY, _RIGHT - x))
        self.y += 4

    def _cosine_bar(self, view: ClassView, role: str) -> None:
        self._text(_LEFT, self.y + 22, role, SMALL, FAINT)
        self._text(_LEFT + 84, self.y + 22, fit_line(view.name, BODY, _INNER - 84))
        middle = self.y + 42
        if view.cosine is not None:
            share = min(max(view.cosine, 0.0), 1.0)
            for length, color in ((_COSINE_END - _LEFT, TRACK), (round((_COSINE_END - _LEFT) * share), _BAR)):
                self.shapes.append(Rect(_LEFT, middle - 8, length, 16, color))
        self._text(_COSINE_END + 12, middle + 6, view.match)
        self.y += 58

    def _notes(self) -> None:
        """Add the content's cautions: calmly, unless the answer is known to be wrong."""
        wrong = self.content.correct is False
        lines = [line for caution in self.content.cautions() for line in wrap_text(caution, BODY, _INNER - 28, lines=3)]
        if not lines:
            return
        paper, edge, color = (_ALERT_PAPER, ALERT, ALERT) if wrong else (_NOTE_PAPER, RULE, INK)
        self.shapes.append(Rect(_LEFT, self.y, _INNER, 26 * len(lines) + 12, paper, edge))
        self.y += 8
        for line in lines:
            self._text(_LEFT + 14, self.y + 18, line, color=color)
            self.y += 26
        self.y += 10

    def _view_frame(self, x: int, y: int, size: tuple[int, int]) -> None:
        """Add a frame around the crop that the model was shown, where that is not the whole image."""
        content = self.content
        if content.crop == (0, 0, content.width, content.height):
            return
        scale = size[0] / content.width, size[1] / content.height
        x0, y0, x1, y1 = (round(value * scale[axis % 2]) for axis, value in enumerate(content.crop))
        self.shapes.append(Rect(x + x0, y + y0, x1 - x0, y1 - y0, edge=INK))
        self.shapes.append(Rect(x + x0 + 1, y + y0 + 1, x1 - x0 - 2, y1 - y0 - 2, edge=WHITE))

    def _slot(self, slot: SlotView, tall: int) -> None:
        middle = self.y + tall // 2
        self._swatch(slot.slot, _LEFT, middle - 15)
        x = _LEFT + _SWATCH
        patch = cut_context(self.photograph, self.size, slot.box, slot.field, (_PATCH, tall))
        self._framed_patch(x, middle - patch.height // (2 * SCALE), patch, slot)
        x += _PATCH + _GAP
        place, end = slot.cell_text, _RIGHT - _VALUE
        if slot.name:
            name = fit_line(slot.name, SMALL, _RIGHT - x - measure_text(f", {place}", SMALL))
            place = f"{name}, {place}"
        self._text(x, middle - 10, place, SMALL, FAINT)
        self.shapes.append(Rect(x, middle + 2, end - x, 18, TRACK))
        start, stop = round(slot.start * (end - x)), round(slot.stop * (end - x))
        self.shapes.append(Rect(x + start, middle + 2, stop - start, 18, slot_color(slot.slot), INK))
        self._text(_RIGHT, middle + 17, format_number(slot.value), anchor="end")
