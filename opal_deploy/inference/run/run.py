"""One run of `opal-deploy infer`: requests in, a run directory with records, drawings, tables and a report out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from opal_deploy.inference.decoding.pool import DecoderPool, Decoders
from opal_deploy.inference.executor import predict_batches
from opal_deploy.inference.run.drawing import ReportOptions, Thumbnails, draw_records, write_report
from opal_deploy.inference.run.interrupt import Interrupt
from opal_deploy.inference.run.results import RecordWriter, ResumePoint, load_resume_point, read_records
from opal_deploy.inference.run.summary import ErrorLimit, Summary
from opal_deploy.inference.run_files import RESULTS
from opal_deploy.inference.sheets import SheetBuilder
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.records.tables import Format, write_table
from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class RunOptions:
    """The outputs of a run, and when it ends.

    Attributes:
        out: the run directory, which exists.
        inference: how images are classified; `run` sets `keep_images` and `keep_outputs` as the drawings need them.
        report: draw an overlay an image and write report.html; None: do neither.
        sheets: draw an evidence sheet an image; None: draw none.
        formats: tables to write at the end.
        max_errors: end the run when more images failed; None: never.
        resume: keep the records that are in `out`, and go on after them; else they are replaced.
        print_message: is called, from any thread, with what a person should know.
    """

    out: Path
    inference: InferenceOptions
    report: ReportOptions | None = None
    sheets: SheetBuilder | None = None
    formats: tuple[Format, ...] = ()
    max_errors: ErrorLimit | None = None
    resume: bool = False
    print_message: Callable[[str], None] = lambda _: None


def run(
    requests: Iterator[Request],
    sessions: Sequence[Session],
    options: RunOptions,
    *,
    summary: Summary | None = None,
    interrupt: Interrupt | None = None,
    timer: StageTimer | None = None,
    report_progress: Callable[[Summary], None] = lambda _: None,
    open_decoders: Callable[..., Decoders] = DecoderPool,
) -> Summary:
    """Classify every image, and write exactly one record for each, in their order.

    Report and tables are written once every image has its record, and not before.

    Args:
        requests: the images.
        sessions: of one model.
        options: the outputs, and when the run ends.
        summary: is counted up as records are written, and returned; also after an exception it is true. None: a new
            one.
        interrupt: ends the run in good order when that is requested.
        timer: gets the times of every stage; None: a new one.
        report_progress: is called after each write of records.
        open_decoders: see `predict_batches`.

    Raises:
        StoppedEarly: the disk is full, a device was lost, or too many images failed; the records so far are whole.
        UsageError: `options.out` cannot be written to, the images are not those of the run to be resumed, or
            `requests` raised it.
    """
    summary = Summary() if summary is None else summary
    interrupt = Interrupt() if interrupt is None else interrupt
    timer = StageTimer() if timer is None else timer
    draws = options.report is not None or options.sheets is not None
    inference = replace(options.inference, keep_images=draws, keep_outputs=options.sheets is not None)
    resume_point = _resume(requests, options, summary) if options.resume else ResumePoint()
    _check_errors(options, summary)
    thumbnails: Thumbnails = {}
    started = time.perf_counter()
    try:
        with ExitStack() as stack:
            stack.enter_context(interrupt.running())
            writer = stack.enter_context(RecordWriter(options.out / RESULTS, resume_point.size, resume_point.count))
            stream = predict_batches(
                interrupt.stop_when_requested(requests),
                sessions,
                inference,
                timer,
                options.print_message,
                open_decoders,
            )
            # or its threads would live as long as an exception's traceback
            batches = stack.enter_context(closing(stream))
            chunks = ([result.record for result in results] for results in batches)
            if draws:
                records = stack.enter_context(
                    draw_records(
                        itertools.chain.from_iterable(batches), options.out, options.report, options.sheets, inference,
                        first=resume_point.count, thumbnails=thumbnails, timer=timer,
                    )
                )  # fmt: skip
                chunks = ([record] for record in records)
            elif options.max_errors is not None:
                # nothing is written behind the error that is one too many
                chunks = ([record] for records in chunks for record in records)
            for chunk in chunks:
                count = writer.count
                try:
                    with timer.waiting("disk"), timer.stage("write"):
                        writer.write(*chunk)
                finally:
                    for record in chunk[: writer.count - count]:
                        summary.count(record)
                if summary.seconds_to_first_record is None:
                    summary.seconds_to_first_record = time.perf_counter() - started
                report_progress(summary)
                _check_errors(options, summary)
        if not interrupt.stopped:
            if options.report is not None:
                write_report(options.out, options.report, thumbnails)
            for kind in options.formats:
                write_table(read_records(options.out / RESULTS), options.out, kind)
    finally:
        summary.seconds = time.perf_counter() - started
        summary.times = timer.read()
    return summary


def _resume(requests: Iterator[Request], options: RunOptions, summary: Summary) -> ResumePoint:
    resume_point = load_resume_point(options.out, requests, summary.count)
    summary.resumed = resume_point.count
    if resume_point.count or resume_point.damaged:
        damage = f"; {resume_point.damaged} damaged bytes after them are dropped" if resume_point.damaged else ""
        options.print_message(f"{options.out}: {resume_point.count} records are there already{damage}")
    return resume_point


def _check_errors(options: RunOptions, summary: Summary) -> None:
    if options.max_errors is not None:
        options.max_errors.check(summary)
