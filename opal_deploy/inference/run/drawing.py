"""The drawings of a run: overlays, evidence sheets, and the report that shows the overlays.

Overlays and sheets are drawn by threads of their own from the forward pass that made the record. The report is written
once the run is complete, from its records and the overlays on the disk, so that a run that was interrupted and resumed
has the same report as one that ran through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from PIL import Image

from opal_deploy.artifact.receptive_field import EffectiveField
from opal_deploy.errors import ArtifactError, ImageError, StoppedEarly, UsageError
from opal_deploy.inference.decoding.prepare import timed_open
from opal_deploy.inference.executor import prefetch, thread_pool
from opal_deploy.inference.run.results import read_records
from opal_deploy.inference.run_files import (
    OVERLAYS,
    REPORT,
    RESULTS,
    SHEETS,
    overlay_name,
    remove_image_files,
    sheet_name,
    write_image_file,
)
from opal_deploy.inference.sheets import SheetBuilder
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Request, Result
from opal_deploy.preprocess.decode import decode
from opal_deploy.records.record import Record
from opal_deploy.visualization.overlay import draw_overlay, encode_jpeg
from opal_deploy.visualization.report import (
    EMBED_LIMIT,
    REPORT_LIMIT,
    Fact,
    ImageMode,
    ReportWriter,
    Thumbnail,
    choose_image_mode,
    make_thumbnail,
)

# by the image's number in the run
Thumbnails: TypeAlias = dict[int, Thumbnail]

# kept in memory for the report, a few megabytes; later ones are made from the overlays on the disk
_MAX_THUMBNAILS = 500


@dataclass(frozen=True)
class ReportOptions:
    """The content of report.html.

    Attributes:
        facts: (name, value) pairs about the run, below the head of the page.
        evidence: what was measured of the model's evidence, at the head of the page; empty shows nothing.
        field: the model's effective receptive field, which the page shows on demand; None where it is not known.
        draw_field: draw it on the overlays, always.
        limit: images shown; all are counted.
        images: `embed` overlays in the page or show the `files` beside it; None: embed them where they are few.
    """

    facts: tuple[Fact, ...] = ()
    limit: int = REPORT_LIMIT
    images: ImageMode | None = None
    evidence: str = ""
    field: EffectiveField | None = None
    draw_field: bool = False


@contextmanager
def draw_records(
    results: Iterable[Result],
    out: Path,
    report: ReportOptions | None,
    sheets: SheetBuilder | None,
    inference: InferenceOptions,
    *,
    first: int,
    thumbnails: Thumbnails,
    timer: StageTimer,
) -> Iterator[Iterator[Record]]:
    """Open the threads that draw, and yield the records with the names of their drawings, in order.

    Args:
        results: with whole images where they are small, and with outputs where there are `sheets`.
        out: the run directory.
        report: draw overlays; None: draw none.
        sheets: draw evidence sheets; None: draw none.
        inference: `workers` images are drawn at a time; `max_pixels` bounds those that are decoded again.
        first: number of the first result's image; drawings of it and of all after it are removed.
        thumbnails: gets those of the report's first images, made here where the overlay is in memory.
        timer: gets the times of drawing and writing, under the role `drawers`.

    Raises:
        UsageError: the folders cannot be written to.
    """
    drawer = _Drawer(out, report, sheets, inference.max_pixels, thumbnails, timer)
    drawer.prepare_folders(first)
    with thread_pool(inference.workers, "draw", timer, "drawers") as threads:

        def futures() -> Iterator[Future[Record]]:
            for index, result in enumerate(results, first):
                yield threads.submit(drawer.draw, index, result)

        yield prefetch(futures(), 2 * inference.workers, lambda: timer.waiting("drawing"))


class _Drawer:
    """Draws and writes the overlay and the sheet of one result; used by several threads."""

    def __init__(
        self,
        out: Path,
        report: ReportOptions | None,
        sheets: SheetBuilder | None,
        max_pixels: int,
        thumbnails: Thumbnails,
        timer: StageTimer,
    ) -> None:
        self._out, self._report, self._sheets = out, report, sheets
        self._max_pixels, self._thumbnails, self._timer = max_pixels, thumbnails, timer
        if report is not None:
            limit = {"embed": _MAX_THUMBNAILS, "files": 0, None: EMBED_LIMIT}[report.images]
            self._num_thumbnails = min(report.limit, limit)

    def prepare_folders(self, first: int) -> None:
        try:
            for folder, needed in ((OVERLAYS, self._report is not None), (SHEETS, self._sheets is not None)):
                if needed:
                    (self._out / folder).mkdir(exist_ok=True)
                    remove_image_files(self._out, folder, first)
        except OSError as error:
            raise UsageError(
                f"{self._out}: cannot be written ({error.strerror or error}); choose another --out"
            ) from None

    def draw(self, index: int, result: Result) -> Record:
        """Return the record, which names the drawings that were written."""
        record = result.record
        if record["status"] == "error":
            return record
        try:
            image = result.prepared.image or self._decode_again(result.prepared.request)
            if image.size == (record["width"], record["height"]):
                if self._report is not None:
                    self._draw_overlay(index, record, image)
                if self._sheets is not None:
                    self._draw_sheet(index, result, image, self._sheets)
        except ImageError:
            # its file has gone or changed since it was classified: the record stands, without a drawing
            pass
        return record

    def _decode_again(self, request: Request) -> Image.Image:
        """Return an image too large to be kept while its batch was predicted."""
        with self._timer.stage("decode"):
            return decode(request.source, max_pixels=self._max_pixels, open_file=timed_open(self._timer))

    def _draw_overlay(self, index: int, record: Record, image: Image.Image) -> None:
        report = self._report
        field = report.field if report is not None and report.draw_field else None
        with self._timer.stage("draw"):
            overlay = draw_overlay(image, record, field)
            encoded = encode_jpeg(overlay)
            if index < self._num_thumbnails:
                self._thumbnails[index] = make_thumbnail(overlay, record)
        name = overlay_name(index, record["image"])
        with self._timer.stage("write"):
            write_image_file(self._out, name, encoded)
        record["overlay"] = name

    def _draw_sheet(self, index: int, result: Result, image: Image.Image, sheets: SheetBuilder) -> None:
        with self._timer.stage("draw"):
            try:
                encoded = sheets.build(result, image).encode()
            except ArtifactError as error:
                raise StoppedEarly(str(error)) from None
        name = sheet_name(index, result.record["image"])
        with self._timer.stage("write"):
            write_image_file(self._out, name, encoded)
        result.record["sheet"] = name


def write_report(out: Path, options: ReportOptions, thumbnails: Thumbnails) -> None:
    """Write report.html of the run in `out`.

    Args:
        out: the run directory.
        options: the content.
        thumbnails: those that are in memory; the others are made from the overlays on the disk.

    Raises:
        StoppedEarly: the disk is full; everything else is there.
    """
    try:
        images = options.images
        if images is None:
            images = choose_image_mode(min(options.limit, _count_lines(out / RESULTS)))
        with ReportWriter(
            out / REPORT,
            title="OPAL explanations",
            facts=options.facts,
            limit=options.limit,
            image_mode=images,
            evidence=options.evidence,
            field=None if options.draw_field else options.field,
        ) as writer:
            for index, record in enumerate(read_records(out / RESULTS)):
                name = record.get("overlay")
                overlay: bytes | None = thumbnails.get(index)
                if overlay is None and name is not None and writer.embeds_images:
                    overlay = _read_overlay(out / name)
                writer.add(record, overlay)
    except OSError as error:
        raise StoppedEarly(
            f"the report cannot be written ({error.strerror or error}); make room and run again"
        ) from None


def _count_lines(path: Path) -> int:
    with path.open("rb") as stream:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))


def _read_overlay(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        # it was taken away; the card says that there is no image
        return None
