"""The overlays and evidence sheets of a run.

They are drawn from the forward pass that made the record, in processes of their own: a drawing that crashes, takes too
long or runs out of memory is missing from its record, which says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self, TypeAlias

from opal_deploy.errors import UsageError
from opal_deploy.inference.drawings import DrawingPool, DrawTask, Part
from opal_deploy.inference.executor import prefetch, thread_pool
from opal_deploy.inference.run.report import ReportOptions
from opal_deploy.inference.run_files import (
    OVERLAYS,
    SHEETS,
    overlay_name,
    remove_image_files,
    sheet_name,
    write_image_file,
)
from opal_deploy.inference.sheets import SheetBuilder
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Result
from opal_deploy.records.record import Record
from opal_deploy.storage.files import RemoteFile
from opal_deploy.visualization.report import EMBED_LIMIT, Thumbnail

# by the image's number in the run
Thumbnails: TypeAlias = dict[int, Thumbnail]
# kept in memory for the report, a few megabytes; later ones are made from the overlays on the disk
_MAX_THUMBNAILS = 500


def prepare_folders(out: Path, *, overlays: bool, sheets: bool, first: int) -> None:
    """Make the folders of a run's drawings, and remove what is there of the image `first` and of all after it.

    Raises:
        UsageError: they cannot be written to.
    """
    try:
        for folder, needed in ((OVERLAYS, overlays), (SHEETS, sheets)):
            if needed:
                (out / folder).mkdir(exist_ok=True)
                remove_image_files(out, folder, first)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from None


class Drawer:
    """Has the overlay and the sheet of each result drawn, and writes them; a context manager, which ends its processes.

    Every method may be called from any thread.
    """

    def __init__(
        self,
        out: Path | RemoteFile,
        report: ReportOptions | None,
        sheets: SheetBuilder | None,
        inference: InferenceOptions,
        *,
        thumbnails: Thumbnails,
        timer: StageTimer,
    ) -> None:
        """Start nothing yet.

        Args:
            out: the run directory, with the folders of `prepare_folders`, or its URL.
            report: draw overlays; None: draw none.
            sheets: draw evidence sheets; None: draw none.
            inference: `workers` images are drawn at a time, with `isolate` in processes, each for at most
                `decode_timeout`.
            thumbnails: gets those of the report's first images, made here where the overlay is in memory.
            timer: gets the times of drawing and writing, under the role `drawers`.
        """
        self._out, self._workers = out, inference.workers
        self._thumbnails, self._timer = thumbnails, timer
        self._num_thumbnails = 0
        if report is not None:
            limit = {"embed": _MAX_THUMBNAILS, "files": 0, None: EMBED_LIMIT}[report.images]
            self._num_thumbnails = min(report.limit, limit)
        field = report.field if report is not None and report.draw_field else None
        self._parts: tuple[Part, ...] = () if report is None else ("overlay", "thumbnail")
        self._parts += () if sheets is None else ("sheet",)
        self._pool = DrawingPool(DrawTask(field, sheets), inference, timer)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(closing(self._pool))
        self._threads = self._stack.enter_context(thread_pool(self._workers, "draw", self._timer, "drawers"))
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def draw_all(self, results: Iterable[Result], first: int) -> Iterator[Record]:
        """Yield the records with the names of their drawings, in order.

        Args:
            results: with images, and with outputs where there are sheets.
            first: number of the first result's image in the run.

        Raises:
            StoppedEarly: the disk is full or gone, or no process can be started.
        """
        futures = (self._threads.submit(self.draw, index, result) for index, result in enumerate(results, first))
        return prefetch(futures, 2 * self._workers, lambda: self._timer.waiting("drawing"))

    def draw(self, index: int, result: Result) -> Record:
        """Return the record, which names the drawings that were written, or the reason why one is missing."""
        record = result.record.copy()
        if record["status"] == "error":
            return record
        parts = (
            self._parts if index < self._num_thumbnails else tuple(part for part in self._parts if part != "thumbnail")
        )
        drawings = self._pool.draw(result, parts)
        drawn = drawings.files
        if "thumbnail" in drawn:
            self._thumbnails[index] = Thumbnail(drawn["thumbnail"])
        with self._timer.stage("write"):
            if "overlay" in drawn:
                record["overlay"] = overlay_name(index, record["image"])
                write_image_file(self._out, record["overlay"], drawn["overlay"])
            if "sheet" in drawn:
                record["sheet"] = sheet_name(index, record["image"])
                write_image_file(self._out, record["sheet"], drawn["sheet"])
        if drawings.error is not None:
            record["drawing_error"] = drawings.error
        return record
