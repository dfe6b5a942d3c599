"""The evidence sheet of one image: what the report's detail view shows, as one picture.

The photograph with the boxes of the predicted class; a row per slot with what it found, training images' patches that
it finds similar, and what it adds to the answer; the runner-up below, or the other labels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.patches import Patch
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import hide_folders
from opal_deploy.records.record import Answer, Answered, Label, Slot, describe_status
from opal_deploy.visualization.boxes import draw_boxes
from opal_deploy.visualization.drawing import SCALE, Bitmap, Drawing, Rect, Text
from opal_deploy.visualization.overlay import (
    COSINE,
    DISTANCE,
    LOGIT,
    bar_ends,
    bar_value,
    build_bars,
    check_display,
    cut_patch,
    describe_match,
    place_boxes,
)
from opal_deploy.visualization.sentences import describe_answer, headline
from opal_deploy.visualization.style import (
    ALERT,
    FAINT,
    INK,
    RGB,
    TRACK,
    WHITE,
    fit_line,
    format_number,
    slot_color,
    text_color,
    wrap_text,
)

# font sizes
_TITLE, _HEAD, _BODY, _SMALL = 32, 18, 15, 13
_RULE: Final[RGB] = (208, 208, 203)
_GOOD: Final[RGB] = (22, 101, 52)
_MARGIN: Final = 24
# largest size of the photograph, and of the runner-up's
_PHOTOGRAPH, _SMALLER = (400, 460), (220, 150)
# beside the photograph: x of a row's number, patches and bar, and the row's height
_ROWS: Final = _MARGIN + _PHOTOGRAPH[0] + 28
_CHIP, _PATCH, _ROW = 34, 86, 98
_BAR: Final = 118
# smallest outline of a cell with a white line inside it
_MIN_WHITE: Final = 8


class OtherClass(NamedTuple):
    """A class below the answer: its slots, and the photograph to show their boxes on."""

    answer: Answer | Label
    slots: Sequence[Slot]
    photograph: Image.Image


def draw_sheet(
    photograph: Image.Image,
    record: Answered,
    others: Sequence[OtherClass],
    metadata: Metadata,
    crop: tuple[int, int, int, int] | None = None,
) -> Drawing:
    """Return the sheet of one image.

    Args:
        photograph: the whole oriented image, RGB, or its `to_display`.
        record: with evidence.
        others: the runner-up, or the other labels; none for a model with one class.
        metadata: the model's; its patches are shown where it has any.
        crop: what the model saw, see `Geometry`; None for the whole image.

    Raises:
        ValueError: the photograph has another size than the record says.
    """
    check_display(photograph, (record.width, record.height))
    sheet = _Sheet(photograph, record, metadata, crop or (0, 0, record.width, record.height))
    sheet.add_answer()
    sheet.add_evidence()
    for other in others:
        sheet.photograph = other.photograph
        sheet.add_other(other.answer, other.slots)
    return sheet.finish()


def rank_slots(slots: Sequence[Slot], meaning: str) -> list[Slot]:
    """Return slots, strongest first; parts of a distance do not tell strong from weak, so these go by score."""

    def strength(slot: Slot) -> float:
        part = slot.contribution or 0.0
        return {COSINE: part, LOGIT: abs(part)}.get(meaning, slot.score)

    return sorted(slots, key=lambda slot: (-strength(slot), slot.slot))


class _Sheet:
    """A sheet so far; the next part begins at `y`."""

    def __init__(self, photograph: Image.Image, record: Answered, metadata: Metadata, crop: Box) -> None:
        self.photograph, self.record, self.metadata, self.crop = photograph, record, metadata, crop
        self.size = record.width, record.height
        self.meaning = build_bars(record)[0]
        self.patches = [
            () if metadata.known_patches is None
            else metadata.known_patches.find(record.prediction.class_id, slot.slot, record.image)
            for slot in record.evidence
        ]  # fmt: skip
        columns = 1 + max(map(len, self.patches), default=0)
        self.width = _ROWS + _CHIP + columns * (_PATCH + 8) + _BAR + _MARGIN
        self.drawing = Drawing(self.width, 0)
        self._add = self.drawing.shapes.append
        self.y = _MARGIN

    def finish(self) -> Drawing:
        """Return the sheet."""
        notes = [
            "A numbered slot is a detector that the class learned; its box is where it answered most strongly. "
            "The cosine says how well the image matches the class, at most 1."
        ]
        if self.metadata.evidence == "regions":
            notes = ["Red cells speak for the class, black ones against it; a box holds neighbouring strong cells."]
        elif self.metadata.head_kind == "additive":
            notes = ["A slot adds up its part of each cell's share of the logit; its box is the strongest cell."]
        if self.crop != (0, 0, *self.size):
            notes.append("The white frame is what the model saw.")
        self._lines(" ".join(notes), _SMALL, FAINT)
        self.drawing.height = self.y + _MARGIN - 8
        return self.drawing

    def add_answer(self) -> None:
        """Add the class, the label, reasons to doubt, and two sentences."""
        record = self.record
        title, below = headline(record.status, record.prediction.label.strip() or f"class {record.prediction.class_id}")
        self._lines(title, _TITLE, bold=True)
        if below:
            self._lines(below, _HEAD)
        label = record.label
        if label is not None:
            known = label in self.metadata.class_names
            right = label == record.prediction.label
            verdict = "correct" if right else f"wrong, label {label}" if known else f"label {label}, not of the model"
            self._lines(verdict, _BODY, _GOOD if right else ALERT if known else FAINT, bold=True)
        if flag := describe_status(record):
            self._lines(f"{flag}.", _BODY, ALERT)
        self._lines(" ".join(describe_answer(record)), _BODY, lines=4)
        if len(record.evidence) > 1 and len({slot.cell for slot in record.evidence}) == 1:
            self._lines(f"All {len(record.evidence)} slots chose the same cell: the answer rests on one place.", _BODY)
        if record.prediction.cosine is not None and (record.margin or 0.0) < 0:
            self._lines("The runner-up has the higher cosine; this head decides by its distance.", _BODY)
        self.y += 12

    def add_evidence(self) -> None:
        """Add the photograph, and next to it a row per slot."""
        record, top = self.record, self.y
        _, height = self._photograph(record.evidence, _PHOTOGRAPH, _MARGIN, top, record.prediction.label)
        below = top + height + 18
        facts = [describe_match(record.prediction)]
        if record.margin is not None:
            facts.append(f"margin {format_number(record.margin)}")
        if (probability := record.prediction.calibrated_probability) is not None:
            facts.append(f"calibrated probability {format_number(probability)}")
        for line in (hide_folders(record.image) or "(no name)", ", ".join(facts)):
            self._add(Text(_MARGIN, below, fit_line(line, _SMALL, _PHOTOGRAPH[0]), _SMALL, FAINT))
            below += 20
        x = _ROWS + _CHIP
        self._add(Text(x, top + 10, "found here", _SMALL, FAINT))
        if any(self.patches):
            self._add(Text(x + _PATCH + 8, top + 10, "looks like, in training images", _SMALL, FAINT))
        self._add(Text(self.width - _MARGIN, top + 10, _HEADINGS.get(self.meaning, self.meaning), _SMALL, FAINT, "end"))
        y = top + 20
        patches = {slot.slot: patch for slot, patch in zip(record.evidence, self.patches, strict=True)}
        values = [bar_value(slot) for slot in record.evidence]
        ends = self._bar_ends(record.evidence)
        for slot in rank_slots(record.evidence, self.meaning):
            self._row(slot, patches[slot.slot], ends[slot.slot], y)
            y += _ROW
        if self.meaning == COSINE:
            total = f"sum {format_number(math.fsum(values))}"
            self._add(Text(self.width - _MARGIN, y + 8, total, _BODY, anchor="end", bold=True))
            y += 14
        self.y = max(below, y) + 10

    def add_other(self, answer: Answer | Label, slots: Sequence[Slot]) -> None:
        """Add another class: a small photograph with its boxes, and its bars on the scale of the answer's."""
        self._add(Rect(_MARGIN, self.y, self.width - 2 * _MARGIN, 1, _RULE))
        self.y += 12
        name = answer.label.strip() or f"class {answer.class_id}"
        if isinstance(answer, Answer):
            self._lines(f"Runner-up: {name}, {describe_match(answer)}", _HEAD)
        else:
            values = f"logit {format_number(answer.logit)}, probability {format_number(answer.probability)}"
            self._lines(f"{name}, {values}", _HEAD)
        self.y += 6
        top = self.y
        width, height = self._photograph(slots, _SMALLER, _MARGIN, top, answer.label)
        x, y = _MARGIN + width + 24, top
        ends = self._bar_ends([*self.record.evidence, *slots])
        for slot in rank_slots(slots, self.meaning):
            self._chip(slot.slot, x, y)
            self._bar(slot, ends[slot.slot], x + _CHIP, y + 4, 2 * _BAR)
            self._add(Text(x + _CHIP + 2 * _BAR + 62, y + 18, format_number(bar_value(slot)), _BODY, anchor="end"))
            y += 30
        self.y = max(top + height, y) + 10

    def _bar_ends(self, slots: Sequence[Slot]) -> dict[int, tuple[float, float]]:
        """Return the ends of the bars of slots by number; of two with one number, the last one's."""
        ends = bar_ends([bar_value(slot) for slot in slots], self.meaning, len(self.record.evidence))
        return dict(zip((slot.slot for slot in slots), ends, strict=True))

    def _photograph(
        self, slots: Sequence[Slot], bounds: tuple[int, int], x: int, y: int, label: str
    ) -> tuple[int, int]:
        """Add the photograph with the boxes of some slots; return its width and height."""
        drawn = _fit(self.photograph, bounds)
        boxes = place_boxes(sorted(slots, key=lambda slot: slot.slot), self.meaning)
        draw_boxes(drawn, boxes, (drawn.width / self.size[0], drawn.height / self.size[1]), min_letters=SCALE * _SMALL)
        size = self._bitmap(x, y, drawn, f"the image with the evidence boxes for {label}")
        x0, y0, x1, y1 = (round(side * size[i % 2] / self.size[i % 2]) for i, side in enumerate(self.crop))
        if (x0, y0, x1, y1) != (0, 0, *size):
            # the part that the model saw
            self._add(Rect(x + x0, y + y0, x1 - x0, y1 - y0, edge=INK))
            self._add(Rect(x + x0 + 1, y + y0 + 1, x1 - x0 - 2, y1 - y0 - 2, edge=WHITE))
        return size

    def _row(self, slot: Slot, patches: Sequence[Patch], ends: tuple[float, float], y: int) -> None:
        self._chip(slot.slot, _ROWS, y + _PATCH // 2 - 13)
        x = _ROWS + _CHIP
        cut, cell = cut_patch(self.photograph, slot.box, self.metadata.reach, self.size)
        self._patch(cut, cell, slot.slot, x, y, f"slot {slot.slot}: found here")
        for number, patch in enumerate(patches, 1):
            image = Image.open(io.BytesIO(patch.decode())).convert("RGB")
            alt = f"slot {slot.slot}: in {patch.image}, a training image"
            self._patch(image, patch.cell, slot.slot, x + number * (_PATCH + 8), y, alt)
        bar = self.width - _MARGIN - _BAR
        self._add(Text(bar + _BAR, y + 34, format_number(bar_value(slot)), _HEAD, anchor="end"))
        self._bar(slot, ends, bar, y + 42, _BAR)
        self._add(Text(bar, y + 76, fit_line(slot.name or "", _SMALL, _BAR), _SMALL, FAINT))

    def _patch(self, image: Image.Image, cell: Box, slot: int, x: int, y: int, alt: str) -> None:
        """Add a patch with its cell outlined, in the middle of its square."""
        shown = _fit(image, (_PATCH, _PATCH))
        y += (_PATCH - shown.height // SCALE) // 2
        width, height = self._bitmap(x + (_PATCH - shown.width // SCALE) // 2, y, shown, alt)
        x += (_PATCH - width) // 2
        left, top = x + round(cell[0] * width), y + round(cell[1] * height)
        across, down = max(3, round((cell[2] - cell[0]) * width)), max(3, round((cell[3] - cell[1]) * height))
        self._add(Rect(left - 2, top - 2, across + 4, down + 4, edge=INK))
        self._add(Rect(left - 1, top - 1, across + 2, down + 2, edge=slot_color(slot)))
        if min(across, down) >= _MIN_WHITE:
            # keeps a dark colour visible on a dark photograph
            self._add(Rect(left, top, across, down, edge=WHITE))

    def _chip(self, slot: int, x: int, y: int) -> None:
        """Add a slot's number on its colour."""
        color = slot_color(slot)
        self._add(Rect(x, y, 26, 26, color, INK))
        self._add(Text(x + 13, y + 19, str(slot), _BODY, text_color(color), "middle"))

    def _bar(self, slot: Slot, ends: tuple[float, float], x: int, y: int, width: int) -> None:
        self._add(Rect(x, y, width, 16, TRACK))
        start, stop = round(ends[0] * width), round(ends[1] * width)
        self._add(Rect(x + start, y, stop - start, 16, slot_color(slot.slot), INK))

    def _lines(self, text: str, size: int, color: RGB = INK, *, lines: int = 2, bold: bool = False) -> None:
        """Add wrapped text across the sheet."""
        # a PNG's larger letters are a little wider than those measured
        for line in wrap_text(text, size, 0.97 * (self.width - 2 * _MARGIN), lines):
            self.y += round(size * 1.35)
            self._add(Text(_MARGIN, self.y - round(size * 0.35), line, size, color, bold=bold))

    def _bitmap(self, x: int, y: int, image: Image.Image, alt: str) -> tuple[int, int]:
        """Add an image; return its width and height on the sheet."""
        self._add(Bitmap(x, y, image, alt))
        return image.width // SCALE, image.height // SCALE


_HEADINGS: Final = {COSINE: "adds to the cosine", DISTANCE: "share of the distance", LOGIT: "adds to the logit"}


def _fit(image: Image.Image, bounds: tuple[int, int]) -> Image.Image:
    """Return an image scaled to fit `bounds` (width, height), `SCALE` pixels each, with its own aspect ratio."""
    scale = min(bounds[0] / image.width, bounds[1] / image.height)
    size = max(1, round(image.width * scale)) * SCALE, max(1, round(image.height * scale)) * SCALE
    return image.resize(size, Image.Resampling.LANCZOS)
