"""One run of `opal-deploy infer`: images in, a run directory with records, drawings, tables and a report out.

A `Backend` turns images into records: `LocalBackend` in this process, `parallel` in several, `cluster` on many
machines. Everything else is the same for all: the order of the records, resuming, counts, the limit of errors,
interruption, tables and the report.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opal_deploy.errors import StoppedEarly
from opal_deploy.logs import Log
from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.predict.executor import predict_batches, release_each
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.records.record import Record
from opal_deploy.records.run_files import RESULTS
from opal_deploy.records.tables import Format, open_table
from opal_deploy.run.drawing import Drawer, ReportOptions, Thumbnails, open_report, prepare_folders
from opal_deploy.run.interrupt import Interrupt
from opal_deploy.run.results import RecordWriter, ResumePoint, has_drawings, load_resume_point, read_records
from opal_deploy.run.sheets import SheetBuilder
from opal_deploy.run.summary import ErrorLimit, Summary
from opal_deploy.runtime.devices import default_batch
from opal_deploy.runtime.session import Session
from opal_deploy.sources.image import InputImage
from opal_deploy.storage.files import RemoteFile
from opal_deploy.timing import StageTimer


@dataclass(frozen=True)
class RunOptions:
    """The files that a run writes, and when it ends.

    Attributes:
        out: the run directory, which exists.
        inference: how images are classified; see `inference_for_drawing`.
        report: draw an overlay per image and write report.html; None: neither.
        sheets: draw an evidence sheet per image; None: none.
        formats: tables to write at the end.
        max_errors: end the run if more images failed; None: never.
        resume: keep the records in `out` and continue after them; else replace them.
        remote: where `out` is uploaded to: drawings are written only there; None: nowhere.
        log: receives messages, from any thread.
    """

    out: Path
    inference: InferenceOptions
    report: ReportOptions | None = None
    sheets: SheetBuilder | None = None
    formats: tuple[Format, ...] = ()
    max_errors: ErrorLimit | None = None
    resume: bool = False
    remote: RemoteFile | None = None
    log: Log = lambda _: None

    @property
    def drawings_out(self) -> Path | RemoteFile:
        """The folder to which the names of drawings are relative."""
        return self.out if self.remote is None else self.remote

    @property
    def draws(self) -> bool:
        """Whether images are drawn."""
        return self.report is not None or self.sheets is not None

    @property
    def inference_for_drawing(self) -> InferenceOptions:
        """The inference options, with images and outputs kept for the drawings."""
        return replace(self.inference, keep_images=self.draws, keep_outputs=self.sheets is not None)


class Backend(ABC):
    """Turns images into records."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The engines and devices in one line."""

    @property
    @abstractmethod
    def default_batch(self) -> int:
        """The devices' default of images per forward pass."""

    def describe_progress(self) -> str:
        """Return a note for the progress bar; empty for none."""
        return ""

    def summarize(self) -> dict[str, Any]:
        """Return more entries of summary.json."""
        return {}

    @abstractmethod
    def predict(
        self,
        requests: Iterator[InputImage],
        options: RunOptions,
        *,
        first: int,
        thumbnails: Thumbnails,
        timer: StageTimer,
    ) -> AbstractContextManager[Iterator[Sequence[Record]]]:
        """Open the models, and yield the records in groups, one record per image, in the order of the images.

        Args:
            requests: the images, read a bounded distance ahead; every image that was read is predicted, so that ending
                `requests` ends the run without losing any.
            options: of the run; drawings are in `out` before their records are yielded.
            first: number of the first image in the run, from 0; not 0 in a resumed run.
            thumbnails: may receive those of the report's first images.
            timer: receives the times of the stages.

        Raises:
            StoppedEarly: it cannot continue; everything before was yielded.
            OpalError: `requests` raised it; everything before was yielded.
        """


class LocalBackend(Backend):
    """Predicts with the sessions of this process."""

    def __init__(
        self,
        sessions: Sequence[Session],
        open_decoders: Callable[..., AbstractContextManager[DecoderPool]] = DecoderPool,
    ) -> None:
        """Start nothing yet; `sessions` are of one model, and `open_decoders` is as for `predict_batches`."""
        self._sessions, self._open_decoders = sessions, open_decoders

    @property
    def description(self) -> str:
        """See `Backend.description`."""
        return "; ".join(session.description for session in self._sessions)

    @property
    def default_batch(self) -> int:
        """See `Backend.default_batch`."""
        return default_batch(self._sessions[0])

    @contextmanager
    def predict(
        self,
        requests: Iterator[InputImage],
        options: RunOptions,
        *,
        first: int,
        thumbnails: Thumbnails,
        timer: StageTimer,
    ) -> Iterator[Iterator[Sequence[Record]]]:
        """See `Backend.predict`."""
        inference = options.inference_for_drawing
        with ExitStack() as stack:
            stream = predict_batches(
                requests, self._sessions, inference, timer, options.log, self._open_decoders, first=first
            )
            # otherwise its threads would live as long as an exception's traceback
            batches = stack.enter_context(closing(stream))
            if not options.draws:
                yield ([result.record for result in results] for results in batches)
                return
            drawer = Drawer(
                options.drawings_out, options.report, options.sheets, inference, thumbnails=thumbnails, timer=timer
            )
            stack.enter_context(drawer)
            yield ([record] for record in drawer.draw_all(release_each(batches), first))


def run(
    requests: Iterator[InputImage],
    backend: Backend,
    options: RunOptions,
    *,
    summary: Summary | None = None,
    interrupt: Interrupt | None = None,
    timer: StageTimer | None = None,
    report: Callable[[Summary], None] = lambda _: None,
    sign: Callable[[Record], Record] | None = None,
) -> Summary:
    """Classify every image, and write exactly one record for each, in order.

    Report and tables are written after the last record.

    Args:
        requests: the images.
        backend: turns images into records.
        options: what the run writes, and when it ends.
        summary: counts the records as they are written, even if the run fails; None: a new one.
        interrupt: stops the run gracefully on request.
        timer: receives the times of every stage; None: a new one.
        report: is called after each write of records.
        sign: signs each record before it is written; None: no record is signed.

    Raises:
        StoppedEarly: the disk is full, a device was lost, or too many images failed; the records so far are whole.
        UsageError: `options.out` cannot be written to, the images are not those of the run to resume, or `requests`
            raised it.
    """
    summary = Summary() if summary is None else summary
    interrupt = Interrupt() if interrupt is None else interrupt
    timer = StageTimer() if timer is None else timer
    resume_point = _resume(requests, options, summary) if options.resume else ResumePoint()
    _check_errors(options, summary)
    thumbnails: Thumbnails = {}
    started = time.perf_counter()
    try:
        with ExitStack() as stack:
            stack.enter_context(interrupt.running())
            writer = stack.enter_context(RecordWriter(options.out / RESULTS, resume_point.size, resume_point.count))
            if options.remote is None:
                prepare_folders(
                    options.out,
                    overlays=options.report is not None,
                    sheets=options.sheets is not None,
                    first=resume_point.count,
                )
            chunks = stack.enter_context(
                backend.predict(
                    interrupt.stop_when_requested(requests), options,
                    first=resume_point.count, thumbnails=thumbnails, timer=timer,
                )
            )  # fmt: skip
            if options.max_errors is not None:
                # nothing is written after the error that exceeds the limit
                chunks = ([record] for chunk in chunks for record in chunk)
            for chunk in chunks:
                count = writer.count
                try:
                    with timer.waiting("disk"), timer.stage("write"):
                        chunk = chunk if sign is None else [*map(sign, chunk)]
                        writer.write(*chunk)
                finally:
                    for record in chunk[: writer.count - count]:
                        summary.count(record)
                if summary.seconds_to_first_record is None:
                    summary.seconds_to_first_record = time.perf_counter() - started
                report(summary)
                _check_errors(options, summary)
        if not interrupt.stopped:
            _finish(options, summary, thumbnails)
    finally:
        summary.seconds = time.perf_counter() - started
        summary.times = timer.read()
    return summary


def _finish(options: RunOptions, summary: Summary, thumbnails: Thumbnails) -> None:
    """Write report and tables, and check that the drawings are there, in one pass over the records."""
    check = options.draws and options.remote is None
    with ExitStack() as stack:
        outputs = [stack.enter_context(open_table(options.out, kind)) for kind in options.formats]
        if options.report is not None:
            report = open_report(
                options.out, options.report, summary.total, summary.folder or "", thumbnails, options.drawings_out
            )
            outputs.append(stack.enter_context(report))
        if not (outputs or check):
            return
        for number, record in enumerate(read_records(options.out / RESULTS), 1):
            if check and not has_drawings(options.out, record):
                raise StoppedEarly(
                    f"{options.out}: a drawing of record {number}, {record.image}, was removed during the run; leave "
                    "the folder as it is until the run ends"
                )
            for add in outputs:
                add(record)


def _resume(requests: Iterator[InputImage], options: RunOptions, summary: Summary) -> ResumePoint:
    # in a bucket, drawings exist before the records that name them
    resume_point = load_resume_point(options.out, requests, summary.count, check_drawings=options.remote is None)
    summary.resumed = resume_point.count
    if resume_point.count or resume_point.damaged:
        damage = f"; {resume_point.damaged} damaged bytes after them are dropped" if resume_point.damaged else ""
        options.log(f"{options.drawings_out}: {resume_point.count} records are there already{damage}")
    return resume_point


def _check_errors(options: RunOptions, summary: Summary) -> None:
    if options.max_errors is not None:
        options.max_errors.check(summary)
