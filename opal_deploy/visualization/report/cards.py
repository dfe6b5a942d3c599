"""One record as the report shows it: values for the page's script, a card for pages without one, and a thumbnail."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from opal_deploy.artifact.measurements import EffectiveField
from opal_deploy.records.record import STATUSES, Answer, Failed, Record, Slot, describe_status
from opal_deploy.visualization.overlay import (
    MEANINGS,
    NO_EVIDENCE,
    build_bars,
    overlay_width,
    photograph_size,
)
from opal_deploy.visualization.pages import load_templates
from opal_deploy.visualization.style import escape_unprintable

_NO_NAME = "(no name)"
# digits after the point; results.jsonl has full precision
_DIGITS = 6
_MESSAGE_LIMIT = 500
# names that a run gives its drawings; other texts in a record, such as an address, become no link
_OVERLAY_NAME = re.compile(r"overlays/(\d+/)?[A-Za-z0-9._-]+\.jpg")
_SHEET_NAME = re.compile(r"sheets/(\d+/)?[A-Za-z0-9._-]+\.png")
THUMBNAIL_WIDTH, THUMBNAIL_HEIGHT, THUMBNAIL_QUALITY = 480, 640, 80
# images that would shrink by less are embedded in full size
_SMALL_ENOUGH = 0.75


def index_row(record: Record, number: int, label_index: Callable[[str], int]) -> list[Any]:
    """Return the values by which the page's script filters and sorts, loaded for all images at once.

    Args:
        number: the image's number in the run.
        label_index: returns a label's index among the report's labels, adding it if it is new.
    """
    label = None if record.label is None else label_index(record.label)
    row = [number, image_name(record), STATUSES.index(record.status)]
    if isinstance(record, Failed):
        return [*row, None, label, None, None, escape_unprintable(record.error.code)]
    answer = record.prediction
    return [*row, label_index(answer.label), label, _round(record.margin), _match(answer), ""]


def describe_card(
    record: Record, label_index: Callable[[str], int], field: EffectiveField | None = None, *, drawn: bool = False
) -> dict[str, Any]:
    """Return the values that the page's script needs only for visible cards.

    Args:
        label_index: see `index_row`.
        field: the effective receptive field, whose frames are listed per cell; None: it is not known.
        drawn: whether the boxes are in the image, which is an overlay.
    """
    if isinstance(record, Failed):
        return {"message": shorten(record.error.message)}
    slots = [
        (
            slot.slot, slot.cell, _round(slot.score), _round(slot.contribution), [round(side, 1) for side in slot.box],
            None if slot.name is None else escape_unprintable(slot.name),
        )
        for slot in record.evidence
    ]  # fmt: skip
    undrawn = record.drawing_error
    width = overlay_width(record.width, record.height) / photograph_size(record.width, record.height)[0]
    return {
        "rest": record.rest, "bias": record.bias, "cosine": record.prediction.cosine is not None,
        "size": [record.width, record.height], "drawn": drawn, "slots": slots,
        "meaning": MEANINGS.index(build_bars(record)[0]), "flag": describe_status(record),
        "probability": _round(record.prediction.calibrated_probability),
        "top": [(label_index(answer.label), _match(answer)) for answer in record.top],
        "fields": [] if field is None else _place_fields(record.evidence, field),
        "overlay": _accept(record.overlay, _OVERLAY_NAME), "sheet": _accept(record.sheet, _SHEET_NAME),
        "overlay_width": round(width, 4), "undrawn": f"not drawn: {shorten(undrawn.message)}" if undrawn else "",
    }  # fmt: skip


def render_card(record: Record, number: int, source: str | None) -> str:
    """Return a record's card as HTML; `source` is the address of its image, None without one."""
    template = load_templates(__package__).get_template("card.html.jinja")
    content = {"name": image_name(record), "flag": describe_status(record), "no_evidence": NO_EVIDENCE}
    return template.render(record=record, number=number, source=source, **content)


def image_name(record: Record) -> str:
    """Return the image's printable name."""
    return escape_unprintable(record.image) if record.image else _NO_NAME


def shorten(message: str) -> str:
    """Return a printable message of at most 500 characters."""
    return escape_unprintable(message if len(message) <= _MESSAGE_LIMIT else message[:_MESSAGE_LIMIT] + " …")


def _accept(name: str | None, pattern: re.Pattern[str]) -> str | None:
    return name if name is not None and pattern.fullmatch(name) else None


def _match(answer: Answer) -> float | None:
    return _round(answer.logit if answer.cosine is None else answer.cosine)


def _place_fields(evidence: Sequence[Slot], field: EffectiveField) -> list[tuple[int, int, int, int, int]]:
    """Return (x0, y0, x1, y1, slot) of the effective receptive field of each different cell."""
    by_cell = {slot.cell: slot for slot in reversed(evidence)}
    rectangles = []
    for slot in sorted(by_cell.values(), key=lambda slot: slot.slot):
        x0, y0, x1, y1 = map(round, field.surround(slot.cell, slot.box))
        rectangles.append((x0, y0, x1, y1, slot.slot))
    return rectangles


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, _DIGITS)


class Thumbnail(bytes):
    """A JPEG made by `make_thumbnail` of a photograph without boxes, ready to be embedded in a card."""


def make_thumbnail(overlay: bytes | Image.Image, record: Record) -> Thumbnail:
    """Return a photograph, or an overlay without its caption, as JPEG of about 480 x 640 pixels at most."""
    image = Image.open(io.BytesIO(overlay)) if isinstance(overlay, bytes) else overlay
    whole = image.size
    width, height = whole if isinstance(record, Failed) else photograph_size(record.width, record.height)
    share = min(1.0, THUMBNAIL_WIDTH / width, THUMBNAIL_HEIGHT / height)
    if share > _SMALL_ENOUGH:
        share = 1.0
    if isinstance(overlay, bytes):
        # the decoder halves large images by itself, which is fast
        image.draft("RGB", (round(whole[0] * share), round(whole[1] * share)))
    # crop first: resizing a part would blend the caption into its last rows
    part = (max(1, width * image.size[0] // whole[0]), max(1, height * image.size[1] // whole[1]))
    size = (max(1, round(width * share)), max(1, round(height * share)))
    cut = image.convert("RGB").crop((0, 0, *part))
    small = cut if cut.size == size else cut.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=THUMBNAIL_QUALITY, subsampling=0)
    return Thumbnail(buffer.getvalue())
