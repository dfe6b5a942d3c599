"""The overlays and evidence sheets of a run.

They are drawn from the forward pass that made the record, in separate processes: a drawing that crashes, takes too long
or runs out of memory is missing, and its record says why.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from msgspec.structs import replace

from opal_deploy.artifact.measurements import EffectiveField, list_evaluation
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.logs import one_line
from opal_deploy.predict.executor import prefetch
from opal_deploy.predict.types import InferenceOptions, Result
from opal_deploy.records.record import Answered, Failed, Record
from opal_deploy.records.run_files import (
    OVERLAYS,
    REPORT,
    SHEETS,
    overlay_name,
    remove_image_files,
    sheet_name,
    write_image_file,
)
from opal_deploy.remote import is_url, redact
from opal_deploy.run.draw_pool import DrawingPool, DrawTask, Part
from opal_deploy.run.sheets import SheetBuilder
from opal_deploy.timing import StageTimer
from opal_deploy.visualization.report import (
    EMBED_LIMIT,
    REPORT_LIMIT,
    Fact,
    ImageMode,
    ReportWriter,
    Thumbnail,
    choose_image_mode,
)
from opal_deploy.worker_pool import WorkerPool

# by the image's number in the run
Thumbnails: TypeAlias = dict[int, Thumbnail]
# thumbnails kept in memory, a few megabytes; later ones are made from the overlays on disk
_MAX_THUMBNAILS = 500


def prepare_folders(out: Path, *, overlays: bool, sheets: bool, first: int) -> None:
    """Make the folders of drawings, and remove drawings from the image `first` on; raise UsageError if that fails."""
    try:
        for folder, needed in ((OVERLAYS, overlays), (SHEETS, sheets)):
            if needed:
                (out / folder).mkdir(exist_ok=True)
                remove_image_files(out, folder, first)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from None


class Drawer:
    """Draws and writes the overlay and the sheet of each result, from any thread; a context manager."""

    def __init__(
        self,
        out: Path,
        report: ReportOptions | None,
        sheets: SheetBuilder | None,
        inference: InferenceOptions,
        processes: WorkerPool | None,
        *,
        thumbnails: Thumbnails,
        timer: StageTimer,
    ) -> None:
        """Start nothing yet.

        Args:
            out: the run directory, with the folders of `prepare_folders`.
            report, sheets: draw overlays, and evidence sheets; None: none.
            inference: `workers`, `decode_timeout` and `one_at_a_time` apply to drawing too.
            processes: where to draw; None: in threads of this process.
            thumbnails: receives those of the report's first images, while the overlays are in memory.
            timer: receives the times of drawing and writing, under the role `drawers`.
        """
        self._out, self._workers = out, inference.workers
        self._ahead = 0 if inference.one_at_a_time else 2 * inference.workers
        self._thumbnails, self._timer = thumbnails, timer
        self._num_thumbnails = 0
        if report is not None:
            limit = {"embed": _MAX_THUMBNAILS, "files": 0, None: EMBED_LIMIT}[report.images]
            self._num_thumbnails = min(report.limit, limit)
        field = report.field if report is not None and report.draw_field else None
        self._parts: tuple[Part, ...] = () if report is None else ("overlay", "thumbnail")
        self._parts += () if sheets is None else ("sheet",)
        self._pool = DrawingPool(DrawTask(field, sheets), inference, processes, timer)
        self._threads = ThreadPoolExecutor(
            self._workers, "draw", initializer=timer.register_thread, initargs=("drawers",)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        # an interrupted run drops what has not begun
        self._threads.shutdown(wait=True, cancel_futures=True)

    def draw_all(self, results: Iterable[Result], first: int) -> Iterator[Record]:
        """Yield the records with the names of their drawings, in order.

        Args:
            results: with images, and for sheets with outputs.
            first: number of the first image in the run.

        Raises:
            StoppedEarly: the disk is full or gone, or no process can be started.
        """
        futures = (self._threads.submit(self.draw, index, result) for index, result in enumerate(results, first))
        return prefetch(futures, self._ahead, lambda: self._timer.waiting("drawing"))

    def draw(self, index: int, result: Result) -> Record:
        """Return a record that names the drawings that were written, or says why one is missing."""
        record = result.record
        if isinstance(record, Failed):
            return record
        parts = (
            self._parts if index < self._num_thumbnails else tuple(part for part in self._parts if part != "thumbnail")
        )
        drawings = self._pool.draw(result, parts)
        drawn = drawings.files
        if "thumbnail" in drawn:
            self._thumbnails[index] = Thumbnail(drawn["thumbnail"])
        overlay = overlay_name(index, record.image) if "overlay" in drawn else None
        sheet = sheet_name(index, record.image) if "sheet" in drawn else None
        with self._timer.stage("write"):
            for name, data in ((overlay, drawn.get("overlay")), (sheet, drawn.get("sheet"))):
                if name is not None and data is not None:
                    write_image_file(self._out, name, data)
        return replace(record, overlay=overlay, sheet=sheet, drawing_error=drawings.error)


@dataclass(frozen=True)
class ReportOptions:
    """The content of report.html.

    Attributes:
        facts: (name, value) pairs about the run, below the head of the page.
        limit: images shown; all are counted.
        images: `embed` overlays in the page or show the `files` next to it; None: embed if there are few.
        evidence: (name, value) pairs of what was measured of the model's evidence.
        field: the model's effective receptive field, shown on demand; None if it is unknown.
        draw_field: always draw it on the overlays.
        title: the page's title.
        class_names: the labels that the model knows; None: all.
    """

    facts: tuple[Fact, ...] = ()
    limit: int = REPORT_LIMIT
    images: ImageMode | None = None
    evidence: tuple[Fact, ...] = ()
    field: EffectiveField | None = None
    draw_field: bool = False
    title: str = "Explanations"
    class_names: frozenset[str] | None = None


def report_title(inputs: Sequence[str], model: Path) -> str:
    """Return the title of a report: the first input and the model, each by at most two parts of its path."""
    more = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
    return f"{_shorten_path(inputs[0])}{more}, explained by {_shorten_path(str(model))}"


def _shorten_path(path: str) -> str:
    """Return the end of a path or URL, which does not tell where it lies; `standard input` for `-`."""
    if path == "-":
        return "standard input"
    if is_url(path):
        path = redact(path).partition("://")[2]
    parts = [part for part in path.split("/") if part not in ("", ".", "..")] or [Path(path).resolve().name or path]
    return "/".join(parts[-1:] if os.path.isabs(path) else parts[-2:])


def report_facts(path: Path, metadata: Metadata, runtime: str, command: str) -> tuple[Fact, ...]:
    """Return the (name, value) pairs at the head of the report."""
    head = [
        ("Model", f"{path.name}: {metadata.backbone}, {metadata.num_classes} classes, "
         f"{metadata.describe_head()}"),
        ("Runtime", runtime),
    ]  # fmt: skip
    if metadata.file_sha256.strip("0"):
        head.append(("Model digest", metadata.file_sha256))
    if metadata.source.get("sha256"):
        head.append(("Checkpoint", f"{metadata.source.get('file')}, sha256 {metadata.source['sha256']}"))
    if metadata.unverified:
        head.append(("Not verified", metadata.unverified))
    if metadata.verification.get("reference"):
        head.append(
            ("Verified", f"against {metadata.verification['reference']} on {metadata.verification.get('image_set')}")
        )
    return (*head, ("Command", command))


def list_evidence(path: Path, metadata: Metadata) -> tuple[Fact, ...]:
    """Return (name, value) pairs on the model's evidence as measured; none if it is not single cells."""
    if metadata.evidence != "exact":
        return ()
    checkpoint = metadata.find_checkpoint(path)
    rows = list_evaluation(metadata.evaluation, path, metadata.receptive_field, export_of=checkpoint)
    return tuple((name, one_line(value)) for name, value in rows)


@contextmanager
def open_report(
    out: Path, options: ReportOptions, images: int, folder: str = "", thumbnails: Mapping[int, bytes] | None = None,
) -> Iterator[Callable[[Record], None]]:  # fmt: skip
    """Yield a function that adds the next record to report.html, which is written when the block ends.

    Args:
        out: the run directory.
        options: the content.
        images: number of records that will be added.
        folder: prefix to leave out of images' names, see `find_common_folder`.
        thumbnails: those in memory; the others are made from the overlays.

    Raises:
        StoppedEarly: the disk is full; the records are safe.
    """
    numbers = itertools.count()
    mode = options.images or choose_image_mode(min(options.limit, images))
    with _writing_report(), ReportWriter(
        out / REPORT,
        title=options.title,
        facts=options.facts,
        limit=options.limit,
        image_mode=mode,
        evidence=options.evidence,
        # overlay files have it, the page's own pictures do not
        field=None if options.draw_field and mode == "files" else options.field,
        class_names=options.class_names,
        folder=folder,
    ) as writer:  # fmt: skip

        def add(record: Record) -> None:
            overlay = (thumbnails or {}).get(next(numbers))
            name = record.overlay if isinstance(record, Answered) else None
            if overlay is None and name is not None and writer.embeds_images:
                overlay = _read_overlay(out / name)
            with _writing_report():
                writer.add(record, overlay)

        yield add


@contextmanager
def _writing_report() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoppedEarly(
            f"the report cannot be written ({error.strerror or error}); make room and run again"
        ) from None


def _read_overlay(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        # it was removed; the card says so
        return None
