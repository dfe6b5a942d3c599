"""Records as the Python API returns them: dictionaries that print in one line and show themselves in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.prepare import read_small_file
from opal_deploy.preprocess.decode import MAX_PIXELS, Source, decode
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import Answer, Record, Slot
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
from opal_deploy.visualization.style import escape_unprintable, slot_color, to_hex

if TYPE_CHECKING:
    from opal_deploy.records.tables import Rows

# width of an overlay in a notebook, pixels
_WIDTH = 420
# rows of a list's table
_MAX_ROWS = 50


class Explanation(dict[str, Any]):
    """A record: equal to the plain dictionary, and the same in JSON."""

    def __str__(self) -> str:
        """Return one line of text: image, label and margin, or the error."""
        return format_line(cast(Record, self))

    def _repr_html_(self) -> str:
        """Return the HTML of a notebook: prediction, slots, and the overlay where the file is still the same."""
        record = cast(Record, self)
        parts = [f"<p><strong>{_safe(format_line(record))}</strong></p>"]
        if overlay := _overlay_html(record):
            parts.append(overlay)
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
        """Return `opal_deploy.to_pandas` of the records."""
        from opal_deploy.records.tables import to_pandas

        return to_pandas(self, rows)

    def __str__(self) -> str:
        """Return one line per image."""
        return "\n".join(map(format_line, self))

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><td>{_safe(format_line(record))}</td></tr>" for record in self[:_MAX_ROWS])
        more = f"<p>and {len(self) - _MAX_ROWS} more</p>" if len(self) > _MAX_ROWS else ""
        return f"<div><table><tbody>{rows}</tbody></table>{more}</div>"


def to_explanation(record: Record) -> Record:
    """Return the record as an Explanation, which a type checker sees as a `Record`."""
    return cast(Record, Explanation(record))


def to_explanations(records: Iterable[Record]) -> Explanations:
    """Return the records as Explanations."""
    return Explanations(map(to_explanation, records))


def format_line(record: Record) -> str:
    """Return the record in one line, which no character of a file name can break."""
    name = escape_unprintable(record["image"]) if record["image"] is not None else "image"
    if "error" in record:
        return f"{name}: error {record['error']['code']}: {escape_unprintable(record['error']['message'])}"
    margin = record.get("margin")
    margin_text = "" if margin is None else f", margin {margin:.4f}"
    mark = " (abstained)" if record["status"] == "abstained" else ""
    return f"{name}: {_format_answer(record['prediction'])}{margin_text}{mark}"


def _format_answer(answer: Answer) -> str:
    value = f"logit {answer['logit']:.4f}" if answer["cosine"] is None else f"cosine {answer['cosine']:.4f}"
    probability = answer.get("calibrated_probability")
    calibrated = "" if probability is None else f", calibrated probability {probability:.3f}"
    return f"{escape_unprintable(answer['label'])}, {value}{calibrated}"


def _safe(text: str) -> str:
    return escape(escape_unprintable(text), quote=True)


def _slot_row(slot: Slot) -> str:
    swatch = f'<span style="color:{to_hex(slot_color(slot["slot"]))}">&#9632;</span>'
    name = f" {_safe(slot['name'])}" if slot.get("name") else ""
    contribution = "" if slot["contribution"] is None else f"{slot['contribution']:.4f}"
    row, col = slot["cell"]
    cells = (f"{swatch} {slot['slot']}{name}", f"{row}, {col}", f"{slot['score']:.4f}", contribution)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _overlay_html(record: Record) -> str:
    """Return the overlay as an <img> element; empty if the file is gone or has changed."""
    name = record["image"]
    if "prediction" not in record or name is None:
        return ""
    image = load_record_image(record, unescape_name(name))
    if image is None:
        return ""
    overlay = draw_overlay(image, record)
    overlay.thumbnail((2 * _WIDTH, 2 * _WIDTH), Image.Resampling.BILINEAR)
    data = base64.b64encode(encode_jpeg(overlay)).decode()
    return f'<img alt="{_safe(format_line(record))}" style="max-width:{_WIDTH}px" src="data:image/jpeg;base64,{data}">'


def load_record_image(record: Record, source: Source, max_pixels: int = MAX_PIXELS) -> Image.Image | None:
    """Return the image of a record, RGB and oriented; None if its file at `source` is gone or has changed."""
    if isinstance(source, Image.Image | np.ndarray):
        return None
    try:
        data, digest = read_small_file(source)
        if digest is None or digest != record.get("image_sha256"):
            return None
        image = decode(data, max_pixels=max_pixels)
    except ImageError:
        return None
    return image if image.size == (record.get("width"), record.get("height")) else None
