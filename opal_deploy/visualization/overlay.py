"""Overlays: a photograph with the slots' boxes and a caption, for a person to check an answer with.

The photograph keeps its resolution, with two exceptions: one over 2 megapixels or 4096 pixels a side is reduced
(`display_size`), and one whose smaller side is under 160 pixels is enlarged, each pixel to k x k (`display_scale`).
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from opal_deploy.preprocess.geometry import Box
from opal_deploy.preprocess.resize import display_size, to_display
from opal_deploy.records.record import Answer, Answered, Failed, Label, Record, Slot, describe_status
from opal_deploy.visualization.boxes import SlotBox, Tag, TaggedBox, draw_boxes, emphasize, group_boxes, place_tags
from opal_deploy.visualization.sentences import adds_up, describe_answer, describe_weak, headline
from opal_deploy.visualization.style import FAINT, INK, PAPER, RGB, font, format_number, to_drawable, wrap_text

# meanings of a bar's length
COSINE = "contribution to the cosine"
DISTANCE = "share of the distance (smaller is closer)"
SCORE = "score"
LOGIT = "contribution to the logit"
MEANINGS = (COSINE, DISTANCE, SCORE, LOGIT)

NO_EVIDENCE = "No evidence boxes: this model's answers do not come from single cells."

# a smaller side under _MIN_SIDE is enlarged to about _ENLARGED_SIDE, the longer side to at most _MAX_SIDE
_MIN_SIDE, _ENLARGED_SIDE, _MAX_SIDE = 160, 256, 1600
# font size of tags on a page, where photographs are a few hundred pixels wide, as a share of the longer side
_PAGE_LETTERS = 1 / 38
# longest side of a JPEG
_MAX_JPEG_SIDE = 65_500
# opacity and colours of the strongest cell's tint
_TINT, _FOR, _AGAINST = 0.55, (222, 45, 38), (40, 40, 40)
# smallest width of the caption in font sizes
_MIN_WIDTH_EM = 22


class Bar(NamedTuple):
    """A slot's bar: its value, and the bar's ends as shares of the full bar; 0 <= start <= stop <= 1."""

    slot: int
    value: float
    start: float
    stop: float


def build_bars(record: Answered) -> tuple[str, list[Bar]]:
    """Return the meaning of the bars of a record's evidence, one of MEANINGS, and a bar per slot; see `bar_ends`."""
    slots = record.evidence
    if record.rest is not None:
        meaning = LOGIT
    elif not slots or any(slot.contribution is None for slot in slots):
        meaning = SCORE
    else:
        meaning = COSINE if adds_up(slots, record.prediction.cosine) else DISTANCE
    values = [bar_value(slot) for slot in slots]
    ends = bar_ends(values, meaning, len(slots))
    return meaning, [Bar(slot.slot, value, *end) for slot, value, end in zip(slots, values, ends, strict=True)]


def bar_value(slot: Slot) -> float:
    """Return what a slot's bar shows: its contribution, or its score where there is none."""
    return slot.score if slot.contribution is None else slot.contribution


def bar_ends(values: Sequence[float], meaning: str, slots: int) -> list[tuple[float, float]]:
    """Return the ends of bars on one scale, as shares of the full bar.

    For contributions to the cosine a full bar is at least 1/slots: if all bars are full, the cosine is 1. For scores it
    is 1. Bars of negative values point left from a common zero; values that are not finite have no bar.
    """
    full = {COSINE: 1 / max(slots, 1), SCORE: 1.0}.get(meaning, 0.0)
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    high, low = max([full, *finite]), min([0.0, *finite])
    span = (high - low) or 1.0
    return [((min(0.0, value) - low) / span, (max(0.0, value) - low) / span) for value in finite]


def display_scale(width: int, height: int) -> int:
    """Return how many times an image is enlarged: 1 unless its smaller side is under 160 pixels.

    The smaller side of a tiny image grows to about 256 pixels, as long as the longer side stays within 1600.
    """
    small, long = min(width, height), max(width, height)
    if small >= _MIN_SIDE:
        return 1
    return max(1, min(-(-_ENLARGED_SIDE // small), _MAX_SIDE // long))


def photograph_size(width: int, height: int) -> tuple[int, int]:
    """Return width and height of an image's photograph, in the upper left corner of its overlay."""
    scale = display_scale(width, height)
    width, height = display_size(width, height)
    return width * scale, height * scale


def overlay_width(width: int, height: int) -> int:
    """Return the width of the overlay of an image of `width` x `height` pixels."""
    width, height = photograph_size(width, height)
    return max(width, _MIN_WIDTH_EM * _font_size(width, height))


def _font_size(width: int, height: int) -> int:
    return max(12, round(math.sqrt(width * height) / 30))


def draw_overlay(image: Image.Image, record: Record, others: Sequence[Image.Image] = ()) -> Image.Image:
    """Return a photograph with a box per slot, and a caption below.

    Args:
        image: the whole image, EXIF orientation applied, or its `to_display`; not changed.
        record: the image's record; without `evidence` no boxes are drawn, and the caption says so.
        others: the same image for up to three further labels of several, shown smaller below the caption.

    Returns:
        RGB; the photograph in the upper left corner, of `photograph_size`.

    Raises:
        ValueError: the record has another image size, or no prediction.
    """
    if isinstance(record, Failed):
        raise ValueError(f"the record of {record.image!r} has status 'error' and nothing to draw")
    photograph = show_photograph(image, record)
    width, height = photograph.size
    size = _font_size(width, height)
    width = max(width, _MIN_WIDTH_EM * size)
    caption = _lay_out_caption(record, width - 2 * size, size)
    draw_evidence(photograph, record)
    below = 2 * size + sum(round(font_size * 1.4) for _, font_size, _ in caption)
    across, labels = width // 3, (record.labels or ())[1 : 1 + len(others)]
    panels = [_draw_label(other, label, record, across) for other, label in zip(others, labels, strict=True)]
    canvas = Image.new("RGB", (width, height + below + max((panel.height for panel in panels), default=0)), PAPER)
    for number, panel in enumerate(panels):
        canvas.paste(panel, (number * across, height + below))
    canvas.paste(photograph, (0, 0))
    draw, y = ImageDraw.Draw(canvas), height + size
    for text, font_size, color in caption:
        draw.text((size, y), to_drawable(text), color, font(font_size))
        y += round(font_size * 1.4)
    return canvas


def _draw_label(image: Image.Image, label: Label, record: Answered, width: int) -> Image.Image:
    """Return a small photograph with the boxes of one label, and its name and probability below."""
    size = max(12, width // 14)
    scale = (width - size) / max(record.width, record.height)
    small = image.convert("RGB").resize([max(1, round(scale * side)) for side in (record.width, record.height)])
    draw_boxes(small, place_boxes(label.evidence, LOGIT), (scale, scale))
    panel = Image.new("RGB", (width, small.height + 4 * size), PAPER)
    panel.paste(small, (size // 2, 0))
    lines = wrap_text(f"{to_drawable(label.label)}, {format_number(label.probability)}", size, width - size, 2)
    ImageDraw.Draw(panel).text((size // 2, small.height + size // 4), "\n".join(lines), INK, font(size))
    return panel


def paint_shares(image: Image.Image, shares: NDArray[np.floating], crop: tuple[int, int, int, int]) -> Image.Image:
    """Return a photograph with each cell tinted by its share of the logit: red speaks for the class, black against it.

    Cells are drawn as they are, since a smoothed map would not add up to the logit. The strongest cell is half opaque.

    Args:
        image: RGB, the whole image of the size that `crop` refers to, or its `to_display`.
        shares: [H, W].
        crop: what the model saw, see `Geometry`; here in pixels of `image`.
    """
    strongest = max(float(np.abs(shares).max()), 1e-12)
    size = (max(1, crop[2] - crop[0]), max(1, crop[3] - crop[1]))
    opacity = np.rint(_TINT * 255 * np.abs(shares) / strongest).astype(np.uint8)
    mask = Image.fromarray(opacity).resize(size, Image.Resampling.NEAREST)
    colors = np.where((shares > 0)[..., None], _FOR, _AGAINST).astype(np.uint8)
    painted = image.convert("RGB").copy()
    painted.paste(Image.fromarray(colors).resize(size, Image.Resampling.NEAREST), crop[:2], mask)
    return painted


def show_photograph(image: Image.Image, record: Answered) -> Image.Image:
    """Return the photograph of `draw_overlay` without boxes, RGB; ValueError for an image of another size."""
    check_display(image, (record.width, record.height))
    size = photograph_size(record.width, record.height)
    photograph = to_display(image if image.mode == "RGB" else image.convert("RGB"))
    return photograph.copy() if photograph.size == size else photograph.resize(size, Image.Resampling.NEAREST)


def check_display(image: Image.Image, size: tuple[int, int]) -> None:
    """Raise ValueError unless an image has the (width, height) of its record, or of the record's `to_display`."""
    if image.size != size and (0 in size or image.size != display_size(*size)):
        raise ValueError(f"the image is {image.size} pixels but its record says {size}")


def draw_evidence(photograph: Image.Image, record: Answered) -> None:
    """Draw the boxes of a record's slots on its photograph of any size."""
    scale = photograph.width / record.width, photograph.height / record.height
    draw_boxes(photograph, place_boxes(record.evidence, build_bars(record)[0]), scale)


def place_boxes(slots: Sequence[Slot], meaning: str) -> list[SlotBox]:
    """Return the boxes of slots, with their emphasis if the contributions add up to the cosine."""
    emphases = emphasize([slot.contribution if meaning == COSINE else None for slot in slots])
    return [SlotBox(slot.slot, slot.box, emphasis) for slot, emphasis in zip(slots, emphases, strict=True)]


def arrange_boxes(record: Answered) -> list[tuple[TaggedBox, Tag | None]]:
    """Return the boxes of a record with their tags for a page, in pixels of the image."""
    size = record.width, record.height
    boxes = group_boxes(place_boxes(record.evidence, build_bars(record)[0]), (1, 1), size)
    letters = max(1, round(max(size) * _PAGE_LETTERS))
    tags = {tag.slots: tag for tag in place_tags(boxes, size, max(1, letters // 12), letters)}
    return [(box, tags.get(box.slots)) for box in boxes]


def describe_boxes(slots: Sequence[int], parts: Sequence[float]) -> str:
    """Return how boxes differ by their slots' contributions to the cosine; empty for a single slot."""
    if len(slots) < 2:
        return ""
    weak = describe_weak(slots, parts)
    return f"Thick: the strongest slot.{f' Faint: {weak}.' if weak else ''}"


def encode_jpeg(overlay: Image.Image, quality: int = 90) -> bytes:
    """Return an image as JPEG with full colour resolution, which thin coloured lines need.

    `overlay` is reduced in place if a side exceeds JPEG's limit.
    """
    overlay.thumbnail((_MAX_JPEG_SIDE, _MAX_JPEG_SIDE))
    buffer = io.BytesIO()
    overlay.save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue()


def embed_jpeg(image: Image.Image) -> str:
    """Return an image as the URL of a JPEG that contains it, for a page; see `encode_jpeg`."""
    return f"data:image/jpeg;base64,{base64.b64encode(encode_jpeg(image)).decode()}"


def crop_box(image: Image.Image, box: Sequence[float], size: tuple[int, int]) -> Image.Image:
    """Return the pixels (at least one) of a box (x0, y0, x1, y1) in pixels of the whole image, of `size`."""
    x0, y0, x1, y1 = (round(value * image.size[axis % 2] / size[axis % 2]) for axis, value in enumerate(box))
    left, top = min(max(x0, 0), image.width - 1), min(max(y0, 0), image.height - 1)
    right, bottom = min(max(x1, left + 1), image.width), min(max(y1, top + 1), image.height)
    return image.crop((left, top, right, bottom))


def cut_patch(image: Image.Image, box: Box, reach: float, size: tuple[int, int]) -> tuple[Image.Image, Box]:
    """Return a cell's box with `reach` cells around it, and where the box lies in that, in shares of width and height.

    `box` is in pixels of the whole image, of `size`; `image` is that image, or a smaller one.
    """
    x0, y0, x1, y1 = box
    across, down = reach * (x1 - x0), reach * (y1 - y0)
    left, top = max(x0 - across, 0.0), max(y0 - down, 0.0)
    right, bottom = min(x1 + across, size[0]), min(y1 + down, size[1])
    width, height = right - left, bottom - top
    place = (x0 - left) / width, (y0 - top) / height, (x1 - left) / width, (y1 - top) / height
    return crop_box(image, (left, top, right, bottom), size), place


def describe_match(answer: Answer) -> str:
    """Return an answer's cosine in words, or its logit if the model has no cosine."""
    cosine = answer.cosine
    return f"logit {format_number(answer.logit)}" if cosine is None else f"cosine {format_number(cosine)}"


def _lay_out_caption(record: Answered, width: int, size: int) -> list[tuple[str, int, RGB]]:
    """Return the lines of a record's caption from the top, as text, font size and colour."""
    answer, small = record.prediction, max(12, round(size * 0.8))
    meaning, bars = build_bars(record)
    title, below = headline(record.status, to_drawable(answer.label) or f"class {answer.class_id}")
    facts = [f"class {answer.class_id}", describe_match(answer)]
    if record.margin is not None:
        facts.append(f"margin {format_number(record.margin)}")
    note = "" if bars else NO_EVIDENCE
    if meaning == COSINE:
        note = describe_boxes([bar.slot for bar in bars], [bar.value for bar in bars])
    caption: list[tuple[str, int, RGB]] = []
    for text, font_size, color, lines in (
        (title, round(size * 1.35), INK, 2), (below, size, INK, 2), (describe_status(record), size, INK, 4),
        (" ".join(describe_answer(record)), size, INK, 6), (", ".join(facts), small, FAINT, 4),
        (note, small, FAINT, 4),
    ):  # fmt: skip
        caption += [(line, font_size, color) for line in wrap_text(text, font_size, width, lines)]
    return caption
