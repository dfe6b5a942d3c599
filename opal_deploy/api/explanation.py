"""Records as the Python API returns them: they print, draw and show themselves in a notebook."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
from msgspec.structs import replace
from PIL import Image

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.options import StrPath
from opal_deploy.predict.prepare import InferenceOptions, read_file
from opal_deploy.preprocess.decode import MAX_PIXELS, Source, decode
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.records.names import find_common_folder, unescape_name
from opal_deploy.records.record import Answer, Answered, Failed, Problem, Record, Slot, Status, to_record
from opal_deploy.records.run_files import REPORT, RESULTS, RUN, overlay_name, write_image_file
from opal_deploy.records.tables import to_coco, to_pandas
from opal_deploy.run.directory import RecordWriter
from opal_deploy.sources.image import InputImage
from opal_deploy.visualization.overlay import draw_overlay, embed_jpeg, encode_jpeg, show_photograph
from opal_deploy.visualization.report import ReportOptions, make_thumbnail
from opal_deploy.visualization.style import escape_unprintable

if TYPE_CHECKING:
    from opal_deploy.api.model import Model
    from opal_deploy.run.drawing import Thumbnails

# width of an overlay in a notebook, pixels
_WIDTH = 420
# rows of a list's table
_MAX_ROWS = 50


@dataclass(frozen=True)
class Origin:
    """The model, image, crop and options of a prediction, which draw its record again.

    `image` is as it was given; None if only the record's name says where it is.
    """

    model: Model
    image: Source | None
    box: Box | None
    options: InferenceOptions


class Explanation(dict[str, Any]):
    """The explanation of one image: a line of results.jsonl as a dictionary, with methods that draw it.

    It keeps its model, and an image that was given as bytes or pixels. A copy or a pickle keeps neither.
    """

    def __init__(self, record: Record | Mapping[str, Any], origin: Origin | None = None) -> None:
        """Wrap a record or its fields; without `origin`, the image is the file that the record names."""
        super().__init__(record if isinstance(record, Mapping) else to_document(record))
        self._origin = origin

    @property
    def record(self) -> Record:
        """The record with typed attributes, as in `explanation.record.image`; ValueError if it was made invalid."""
        return to_record(self)

    @property
    def answered(self) -> Answered:
        """The record of an image with an answer.

        Raises:
            ImageError: the image could not be classified, as the record's `error` says.
        """
        record = self.record
        if isinstance(record, Failed):
            raise ImageError(record.error.code, f"{record.image or 'the image'}: {record.error.message}")
        return record

    @property
    def label(self) -> str:
        """The predicted class, even if a threshold refused the answer; raises as `answered`."""
        return self.answered.prediction.label

    @property
    def true_label(self) -> str | None:
        """The image's own label, which is the record's field `label`; None where it is not known."""
        return self.record.label

    @property
    def status(self) -> Status:
        """`ok`, `abstained`, `unknown` or `error`."""
        return self.record.status

    @property
    def probability(self) -> float | None:
        """The calibrated probability of the predicted class, 0 ... 1; None where no temperature was fitted."""
        return self.answered.prediction.calibrated_probability

    @property
    def margin(self) -> float | None:
        """The lead over the runner-up, see `Answered.margin`; raises as `answered`."""
        return self.answered.margin

    @property
    def top(self) -> tuple[Answer, ...]:
        """The best classes, best first, as many as `predict(top=)` asked for; raises as `answered`."""
        return self.answered.top

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The evidence: slots with cell, box, score and contribution; raises as `answered`."""
        return self.answered.evidence

    @property
    def boxes(self) -> list[tuple[float, float, float, float]]:
        """The slots' boxes (x0, y0, x1, y1) in pixels of the whole image; raises as `answered`."""
        return [slot.box for slot in self.slots]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain dictionaries and lists."""
        document: dict[str, Any] = json.loads(self.to_json())
        return document

    def to_json(self) -> str:
        """Return the record as a line of results.jsonl."""
        return to_json_line(dict(self)).decode().rstrip("\n")

    def overlay(self) -> Image.Image:
        """Return the image with the evidence drawn over it, RGB.

        Raises:
            ImageError: there is no prediction, or the image was not kept, is gone or has changed.
        """
        return draw_overlay(self._load_image(), self.record)

    def sheet(self) -> Image.Image:
        """Return the evidence sheet, RGB; the model runs again. Raises as `save_sheet`."""
        return Image.open(io.BytesIO(self._encode_sheet("sheet.png"))).convert("RGB")

    def save_overlay(self, path: StrPath) -> Path:
        """Draw the evidence over the image, as `opal-deploy infer --explain` does, and return the path.

        Args:
            path: the JPEG file to write, or to replace; its folder is created.

        Raises:
            ImageError: there is no prediction, or the image was not kept, is gone or has changed.
            UsageError: not a .jpg file, or it cannot be written.
        """
        picture = self.overlay()
        if Path(path).suffix.lower() not in (".jpg", ".jpeg"):
            raise UsageError(f"{path}: expected a .jpg file; for others: explanation.overlay().save(path)")
        return save_bytes(path, encode_jpeg(picture))

    def save_sheet(self, path: StrPath) -> Path:
        """Draw the evidence sheet, as `opal-deploy explain` does, and return the path; the model runs again.

        Args:
            path: the .png or .svg file to write, or to replace; its folder is created.

        Raises:
            ImageError: as for `save_overlay`.
            UsageError: the record has no model, its evidence is not single cells, or the file cannot be written.
        """
        return save_bytes(path, self._encode_sheet(path))

    def _encode_sheet(self, path: StrPath) -> bytes:
        origin = self._origin
        if origin is None:
            raise UsageError("the record was copied or read, so it has no model; predict its image again")
        self._load_image()
        record = self.record
        source = unescape_name(record.image or "") if origin.image is None else origin.image
        request = InputImage(record.image, source, origin.box, record.label)
        return origin.model.encode_sheet(request, path, origin.options)

    def _load_image(self) -> Image.Image:
        if self._origin is None:
            return load_record_image(self.record)
        return load_record_image(self.record, self._origin.image, self._origin.options.max_pixels)

    def __reduce__(self) -> tuple[type[Explanation], tuple[dict[str, Any]]]:
        # the record alone: opening the model again takes seconds
        return type(self), (dict(self),)

    def __str__(self) -> str:
        """Return one line of text: image, label and margin, or the error."""
        return format_line(self.record)

    def __repr__(self) -> str:
        return f"<Explanation {self}>"

    def _repr_html_(self) -> str:
        """Return the HTML of a notebook: the prediction, and the overlay if the image is still the same."""
        record = self.record
        parts = [f"<p><strong>{_safe(format_line(record))}</strong></p>"]
        with suppress(ImageError):
            overlay = self.overlay()
            overlay.thumbnail((2 * _WIDTH, 2 * _WIDTH), Image.Resampling.BILINEAR)
            style = f'style="max-width:{_WIDTH}px"'
            parts.append(f'<img alt="{_safe(format_line(record))}" {style} src="{embed_jpeg(overlay)}">')
        return f"<div>{''.join(parts)}</div>"


class Explanations(list[Explanation]):
    """Records of several images, equal to the plain list. For a slice use `Explanations(records[:9])`."""

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Explanation: ...

    @overload
    def __getitem__(self, index: slice, /) -> Explanations: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> Explanation | Explanations:
        # without the slice's type a report could not be saved
        return Explanations(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def to_coco(self) -> dict[str, Any]:
        """Return `opal_deploy.to_coco` of the records."""
        return to_coco(self)

    def to_pandas(self) -> Any:
        """Return `opal_deploy.to_pandas` of the records."""
        return to_pandas(self)

    def save_report(self, folder: StrPath) -> Path:
        """Write report.html, overlays/ and results.jsonl, as `infer --explain` does; return the page's path.

        An image that is gone or has changed gets a card without an overlay. If records have a `label`, the report shows
        accuracy and confusions.

        Args:
            folder: is created; an earlier report in it is replaced.

        Raises:
            UsageError: the folder is named like a page, holds a run of `infer`, or cannot be written.
            StoppedEarly: the disk is full.
        """
        # slow to import
        from opal_deploy.run import drawing

        out = Path(folder)
        if out.suffix in (".html", ".htm") or (out / RUN).exists():
            raise UsageError(f"{out}: a page or a run of `infer`; give another folder for {REPORT} and its files")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{out}: cannot be written ({error.strerror or error}); choose another folder") from None
        drawing.prepare_overlays(out)
        folder = find_common_folder(record["image"] or "" for record in self)
        thumbnails: Thumbnails = {}
        report = drawing.open_report(out, self._report_options(), len(self), folder, thumbnails)
        with RecordWriter(out / RESULTS) as writer, report as add:
            for index, explanation in enumerate(self):
                record = _save_drawing(out, index, explanation, thumbnails)
                writer.write(record)
                add(record)
        return out / REPORT

    def _report_options(self) -> ReportOptions:
        from opal_deploy.run.drawing import describe_report

        model = next((record._origin.model for record in self if record._origin is not None), None)
        if model is None:
            return ReportOptions()
        path = model.path or Path("model")
        images = [record["image"] for record in self if record["image"] is not None] or ["images"]
        command = f"opal_deploy.load({path.name!r}).predict(...)"
        return describe_report(path, model.metadata, images, runtime=model.description, command=command)

    def __str__(self) -> str:
        """Return one line per image."""
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        """Return the HTML of a notebook: one line per image, up to 50."""
        rows = "".join(f"<tr><td>{_safe(str(record))}</td></tr>" for record in self[:_MAX_ROWS])
        more = f"<p>and {len(self) - _MAX_ROWS} more</p>" if len(self) > _MAX_ROWS else ""
        return f"<div><table><tbody>{rows}</tbody></table>{more}</div>"


def _save_drawing(out: Path, index: int, explanation: Explanation, thumbnails: Thumbnails) -> Record:
    """Write a record's overlay; return the record with the overlay's name, or with the reason why it is missing."""
    record = explanation.record
    if isinstance(record, Failed):
        return record
    try:
        image, name = explanation._load_image(), overlay_name(index, record.image)
        write_image_file(out, name, encode_jpeg(draw_overlay(image, record)))
        thumbnails[index] = make_thumbnail(show_photograph(image, record), record)
        return replace(record, overlay=name)
    except ImageError as error:
        return replace(record, drawing_error=Problem(code="drawing_failed", message=str(error)))


def save_bytes(path: StrPath, data: bytes) -> Path:
    """Write a file, whole or not at all, and return its path; raise UsageError if it cannot be written."""
    with atomic_write(Path(path)) as temporary:
        temporary.write_bytes(data)
    return Path(path)


def format_line(record: Record) -> str:
    """Return the record as one line; line breaks in file names are escaped."""
    name = "image" if record.image is None else escape_unprintable(record.image)
    if isinstance(record, Failed):
        return f"{name}: error {record.error.code}: {escape_unprintable(record.error.message)}"
    answer = record.prediction
    parts = [escape_unprintable(answer.label)]
    parts.append(f"logit {answer.logit:.4f}" if answer.cosine is None else f"cosine {answer.cosine:.4f}")
    if answer.calibrated_probability is not None:
        parts.append(f"calibrated probability {answer.calibrated_probability:.3f}")
    if record.margin is not None:
        parts.append(f"margin {record.margin:.4f}")
    mark = "" if record.status == "ok" else f" ({record.status})"
    return f"{name}: {', '.join(parts)}{mark}"


def _safe(text: str) -> str:
    return escape(escape_unprintable(text), quote=True)


def load_record_image(record: Record, source: Source | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the image of a record with a prediction, RGB and oriented.

    Args:
        record: the record.
        source: the image; None: the file that the record names.
        max_pixels: width times height above which the image is refused.

    Raises:
        ImageError: there is no prediction, the record names no image, or its image is gone or has changed.
    """
    name = record.image
    if isinstance(record, Failed):
        raise ImageError("not_found", f"{name}: no prediction, so nothing to draw")
    if source is None:
        if name is None:
            raise ImageError("not_found", "the record names no image, and none was kept")
        source = unescape_name(name)
    changed = ImageError("not_found", f"{name or 'the image'}: is gone or has changed since its record was made")
    try:
        if not isinstance(source, Image.Image | np.ndarray):
            source, digest = read_file(source)
            if digest is None or digest != record.image_sha256:
                raise changed
        image = decode(source, max_pixels=max_pixels)
    except ImageError:
        raise changed from None
    if image.size != (record.width, record.height):
        raise changed
    return image
