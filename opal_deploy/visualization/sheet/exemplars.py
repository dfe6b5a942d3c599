"""The last part of a sheet, "this looks like that": patches of other images below each slot's patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from opal_deploy.visualization.atlas.entries import Exemplar, Exemplars
from opal_deploy.visualization.sheet.canvas import HEAD, SMALL, Canvas
from opal_deploy.visualization.sheet.content import ClassView, SlotView
from opal_deploy.visualization.sheet.drawing import enlarge
from opal_deploy.visualization.style import ALERT, FAINT, fit_line, truncate_middle, wrap_text

# minimum width of exemplars that stand side by side
_MIN_WIDTH: Final = 130


def add_exemplars(canvas: Canvas, view: ClassView, exemplars: Exemplars) -> None:
    """Add a column per slot of the predicted class, `view`."""
    canvas.y += 8
    canvas.rule(canvas.left, canvas.inner)
    relation = "of" if exemplars.of_class else "predicted as"
    for line in wrap_text(f"This looks like that: other images {relation} {view.name}", HEAD, canvas.inner, 2):
        canvas.text(canvas.left, canvas.y + 22, line, HEAD, bold=True)
        canvas.y += 26
    canvas.y += 6
    canvas.paragraph(f"Framed: this image. {exemplars.origin}", canvas.left, canvas.inner, size=SMALL, color=FAINT)
    canvas.y += 10
    columns = min(len(view.slots), canvas.form.exemplar_columns)
    for first in range(0, len(view.slots), columns):
        _add_columns(canvas, view.slots[first : first + columns], exemplars.by_slot, canvas.inner // columns)


def _add_columns(
    canvas: Canvas, slots: Sequence[SlotView], by_slot: Mapping[int, Sequence[Exemplar]], column: int
) -> None:
    """Add slots in columns of a width: the own patch, and below it the exemplars, side by side if slots are few."""
    form = canvas.form
    side_by_side = max(1, column // _MIN_WIDTH)
    bounds = (column // side_by_side - 12, 120)
    own = [canvas.cut_patch(slot, bounds) for slot in slots]
    for index, (slot, patch) in enumerate(zip(slots, own, strict=True)):
        x = canvas.left + index * column
        canvas.swatch(slot.slot, x, canvas.y)
        canvas.text(x + 40, canvas.y + 20, fit_line(slot.name or "", SMALL, column - 52), SMALL, FAINT)
        canvas.framed_patch(x + 4, canvas.y + 40, patch, slot)
    canvas.y += 40 + max(patch.height for patch in own) // form.scale + 14
    depth = max((len(by_slot.get(slot.slot, ())) for slot in slots), default=0)
    line = form.caption + 3
    for first in range(0, depth, side_by_side):
        tallest = 0
        for index, slot in enumerate(slots):
            for place, exemplar in enumerate(by_slot.get(slot.slot, ())[first : first + side_by_side]):
                x = canvas.left + index * column + place * (column // side_by_side) + 4
                size = canvas.bitmap(x, canvas.y, enlarge(exemplar.image, bounds, form.scale), exemplar.alt)
                if exemplar.field is not None:
                    canvas.cell_outline(x, canvas.y, size, exemplar.box, exemplar.field, slot.slot)
                baseline = canvas.y + size[1] + line
                caption = truncate_middle(exemplar.caption, form.caption, bounds[0])
                canvas.text(x, baseline, caption, form.caption, FAINT)
                if exemplar.warning:
                    warning = truncate_middle(exemplar.warning, form.caption, bounds[0])
                    canvas.text(x, baseline + line, warning, form.caption, ALERT, bold=True)
                tallest = max(tallest, size[1] + (line if exemplar.warning else 0))
        canvas.y += tallest + line + 11
    if not depth:
        canvas.paragraph("The atlas has no other image of this class.", canvas.left, canvas.inner, lines=1)
    canvas.y += 10
