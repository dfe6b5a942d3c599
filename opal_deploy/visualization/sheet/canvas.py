"""A sheet that grows downwards, and its recurring elements: lines of text, slot numbers, framed patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from PIL import Image

from opal_deploy.visualization.boxes import MIN_LETTERS
from opal_deploy.visualization.sheet.content import SlotView
from opal_deploy.visualization.sheet.drawing import Anchor, Bitmap, Box, Rect, Shape, Text, cut_context, locate_cell
from opal_deploy.visualization.style import INK, RGB, WHITE, slot_color, text_color, wrap_text

TITLE, HEAD, BODY, SMALL = 34, 19, 16, 14  # font sizes
RULE: RGB = (208, 208, 203)
# smallest cell outline with a white line inside it
_MIN_WHITE: Final = 8


@dataclass(frozen=True)
class Form:
    """The measures of a layout, in pixels of the sheet; the pairs are of the predicted class and of the runner-up.

    Attributes:
        columns: left and right end of the slots.
        difference: middle of the differences between their contributions.
        photographs: largest width and height.
        cosine_bar: left and right end of the bars of the cosines.
        patch: width of the runner-up's patches.
        caption: font size of the exemplars' captions.
        exemplar_columns: largest number of columns of exemplars.
        min_letters: smallest font size on photographs.
        scale: pixels of bitmaps, and of a PNG, per pixel of the sheet.
    """

    width: int
    columns: tuple[tuple[int, int], tuple[int, int]]
    difference: int
    photographs: tuple[tuple[int, int], tuple[int, int]]
    cosine_bar: tuple[int, int]
    patch: int
    caption: int
    exemplar_columns: int
    min_letters: int
    scale: int = 1

    @property
    def stacked(self) -> bool:
        """Whether the runner-up is below the predicted class instead of next to it."""
        return self.columns[0][0] == self.columns[1][0]


WIDE = Form(1200, ((36, 630), (732, 1164)), 681, ((594, 520), (432, 330)), (452, 880), 84, 12, 10, MIN_LETTERS)
# on a screen 390 CSS pixels wide the smallest text, 14 pixels, is 12 CSS pixels high
NARROW = Form(455, ((20, 435), (20, 352)), 400, ((415, 520), (415, 330)), (20, 300), 62, SMALL, 3, SMALL, scale=2)


class Canvas:
    """Shapes on a sheet in one of the two forms; the next part starts at `y`.

    Args:
        photograph: the whole oriented image, RGB, or its `to_display`.
        size: (width, height) of the whole image.
    """

    def __init__(self, photograph: Image.Image, size: tuple[int, int], form: Form) -> None:
        self.photograph, self.size, self.form = photograph, size, form
        self.left, self.right = form.columns[0][0], form.width - form.columns[0][0]
        self.inner = self.right - self.left
        self.y = self.left
        self.shapes: list[Shape] = []

    def text(
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

    def paragraph(self, text: str, x: int, width: int, *, size: int = BODY, color: RGB = INK, lines: int = 4) -> None:
        """Add at most `lines` lines of text, `width` pixels wide."""
        for line in wrap_text(text, size, width, lines):
            self.y += round(size * 1.4)
            self.text(x, self.y - round(size * 0.4), line, size, color)

    def bitmap(self, x: int, y: int, image: Image.Image, alt: str) -> tuple[int, int]:
        """Add an image that was drawn in the form's scale, and return its width and height on the sheet."""
        bitmap = Bitmap(x, y, image, alt, self.form.scale)
        self.shapes.append(bitmap)
        return bitmap.size

    def rule(self, x: int, width: int) -> None:
        """Add a thin horizontal line."""
        self.shapes.append(Rect(x, self.y, width, 1, RULE))
        self.y += 10

    def swatch(self, slot: int, x: int, y: int) -> None:
        """Add a slot's number on its colour."""
        color = slot_color(slot)
        self.shapes.append(Rect(x, y, 30, 30, color, INK))
        self.text(x + 15, y + 21, str(slot), color=text_color(color), anchor="middle")

    def cut_patch(self, slot: SlotView, bounds: tuple[int, int]) -> Image.Image:
        """Return the patch that a slot's score depends on, to fit `bounds` (width, height) on the sheet."""
        return cut_context(self.photograph, self.size, slot.box, slot.field, bounds, self.form.scale)

    def framed_patch(self, x: int, y: int, patch: Image.Image, slot: SlotView) -> None:
        """Add a slot's patch in its colour, with the cell outlined where the patch shows more than the cell."""
        width, height = self.bitmap(x, y, patch, f"patch of slot {slot.slot}, {slot.place}")
        if slot.field is not None:
            self.cell_outline(x, y, (width, height), slot.box, slot.field, slot.slot)
        self.shapes.append(Rect(x - 3, y - 3, width + 6, height + 6, edge=slot_color(slot.slot), line=3))
        self.shapes.append(Rect(x - 4, y - 4, width + 8, height + 8, edge=INK))

    def cell_outline(self, x: int, y: int, size: tuple[int, int], box: Box, field: Box, slot: int) -> None:
        """Outline a cell, `box`, in a bitmap of `size` at (x, y) that shows `field`."""
        left, top, width, height = locate_cell(box, field, size)
        left, top = x + left, y + top
        self.shapes.append(Rect(left - 2, top - 2, width + 4, height + 4, edge=INK))
        self.shapes.append(Rect(left - 1, top - 1, width + 2, height + 2, edge=slot_color(slot)))
        if min(width, height) >= _MIN_WHITE:  # keeps a dark colour visible on a dark photograph
            self.shapes.append(Rect(left, top, width, height, edge=WHITE))
