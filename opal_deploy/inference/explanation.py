"""Records as Python hands them out: plain dictionaries that print in one line and show themselves in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.prepare import read_whole
from opal_deploy.preprocess.decode import MAX_PIXELS, Source, decode
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import Answer, Record, Slot
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
from opal_deploy.visualization.palette import slot_color, to_hex
from opal_deploy.visualization.text import escape_unprintable

if TYPE_CHECKING:
    from opal_deploy.records.tables import Rows

# of a drawing in a notebook, pixels
_SIDE = 420
# rows of a list's table
_SHOWN = 50


class Explanation(dict[str, Any]):
    """A record; equal to, and in JSON the same as, the plain dictionary."""

    def __str__(self) -> str:
        """One line for a person."""
        return line_of(cast(Record, self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer, the slots, and the drawing where the file is still the one explained."""
        record = cast(Record, self)
        parts = [f"<p><strong>{_safe(line_of(record))}</strong></p>"]
        if drawing := _drawing(record):
            parts.append(drawing)
        if slots := record.get("evidence"):
            rows = "".join(map(_slot_row, slots))
            parts.append(
                "<table><thead><tr><th>slot</th><th>cell</th><th>score</th><th>contribution</th></tr></thead>"
                f"<tbody>{rows}</tbody></table>"
            )
        return f"<div>{''.join(parts)}</div>"


class Explanations(list[Record]):
    """Records of several images; equal to the plain list."""

    def to_pandas(self, rows: Rows = "images") -> Any:
        """As `opal_deploy.to_pandas`."""
        from opal_deploy.records.tables import to_pandas

        return to_pandas(self, rows)

    def __str__(self) -> str:
        """A line an image."""
        return "\n".join(map(line_of, self))

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{_safe(line_of(record))}</td></tr>" for record in self[:_SHOWN])
        more = f"<p>and {len(self) - _SHOWN} more</p>" if len(self) > _SHOWN else ""
        return f"<div><table><tbody>{rows}</tbody></table>{more}</div>"


def explained(record: Record) -> Record:
    """The record as an Explanation, which is what a `Record` is to a type checker."""
    return cast(Record, Explanation(record))


def explained_all(records: Iterable[Record]) -> Explanations:
    """The records as Explanations."""
    return Explanations(map(explained, records))


def line_of(record: Record) -> str:
    """One line for a person, which no name from outside can break."""
    name = escape_unprintable(record["image"]) if record["image"] is not None else "image"
    if "error" in record:
        return f"{name}: error {record['error']['code']}: {escape_unprintable(record['error']['message'])}"
    margin = record.get("margin")
    sure = "" if margin is None else f", margin {margin:.4f}"
    mark = " (abstained)" if record["status"] == "abstained" else ""
    return f"{name}: {_answer(record['prediction'])}{sure}{mark}"


def _answer(answer: Answer) -> str:
    how = f"logit {answer['logit']:.4f}" if answer["cosine"] is None else f"cosine {answer['cosine']:.4f}"
    return f"{escape_unprintable(answer['label'])}, {how}"


def _safe(text: str) -> str:
    return escape(escape_unprintable(text), quote=True)


def _slot_row(slot: Slot) -> str:
    swatch = f'<span style="color:{to_hex(slot_color(slot["slot"]))}">&#9632;</span>'
    name = f" {_safe(slot['name'])}" if slot.get("name") else ""
    part = "" if slot["contribution"] is None else f"{slot['contribution']:.4f}"
    row, col = slot["cell"]
    cells = (f"{swatch} {slot['slot']}{name}", f"{row}, {col}", f"{slot['score']:.4f}", part)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _drawing(record: Record) -> str:
    """The overlay as an element with the picture in it; empty where the file is gone, or another by now."""
    name = record["image"]
    if "prediction" not in record or name is None:
        return ""
    picture = load_record_image(record, unescape_name(name))
    if picture is None:
        return ""
    overlay = draw_overlay(picture, record)
    overlay.thumbnail((2 * _SIDE, 2 * _SIDE), Image.Resampling.BILINEAR)
    data = base64.b64encode(encode_jpeg(overlay)).decode()
    return f'<img alt="{_safe(line_of(record))}" style="max-width:{_SIDE}px" src="data:image/jpeg;base64,{data}">'


def load_record_image(record: Record, source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image | None:
    """The photograph that a record is about, where its file is at hand and still the same; else None."""
    if isinstance(source, Image.Image | np.ndarray):
        return None
    data, digest = read_whole(source)
    if digest is None or digest != record.get("file_sha256"):
        return None
    try:
        picture = decode(data, max_pixels=max_pixels)
    except ImageError:
        return None
    return picture if picture.size == (record.get("width"), record.get("height")) else None
