"""One run of `opal-deploy infer`: requests in, a run directory with records, drawings, tables and a report out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from opal_deploy.inference.run.backend import Backend, RunOptions
from opal_deploy.inference.run.drawing import Thumbnails, prepare_folders
from opal_deploy.inference.run.interrupt import Interrupt
from opal_deploy.inference.run.report import write_report
from opal_deploy.inference.run.results import RecordWriter, ResumePoint, load_resume_point, read_records
from opal_deploy.inference.run.summary import Summary
from opal_deploy.inference.run_files import RESULTS
from opal_deploy.inference.timing import StageTimer
from opal_deploy.inference.types import Request
from opal_deploy.records.tables import write_table


def run(
    requests: Iterator[Request],
    backend: Backend,
    options: RunOptions,
    *,
    summary: Summary | None = None,
    interrupt: Interrupt | None = None,
    timer: StageTimer | None = None,
    report: Callable[[Summary], None] = lambda _: None,
) -> Summary:
    """Classify every image, and write exactly one record for each, in their order.

    Report and tables are written once every image has its record, and not before.

    Args:
        requests: the images.
        backend: turns requests into records.
        options: the outputs, and when the run ends.
        summary: is counted up as records are written, and returned; also after an exception it is true. None: a new
            one.
        interrupt: ends the run in good order when that is requested.
        timer: gets the times of every stage; None: a new one.
        report: is called after each write of records.

    Raises:
        StoppedEarly: the disk is full, a device was lost, or too many images failed; the records so far are whole.
        UsageError: `options.out` cannot be written to, the images are not those of the run to be resumed, or
            `requests` raised it.
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
                # nothing is written behind the error that is one too many
                chunks = ([record] for chunk in chunks for record in chunk)
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
                report(summary)
                _check_errors(options, summary)
        if not interrupt.stopped:
            if options.report is not None:
                write_report(options.out, options.report, thumbnails, options.drawings_out)
            for kind in options.formats:
                write_table(read_records(options.out / RESULTS), options.out, kind)
    finally:
        summary.seconds = time.perf_counter() - started
        summary.times = timer.read()
    return summary


def _resume(requests: Iterator[Request], options: RunOptions, summary: Summary) -> ResumePoint:
    # in a bucket, drawings are there before the records that name them
    resume_point = load_resume_point(options.out, requests, summary.count, check_drawings=options.remote is None)
    summary.resumed = resume_point.count
    if resume_point.count or resume_point.damaged:
        damage = f"; {resume_point.damaged} damaged bytes after them are dropped" if resume_point.damaged else ""
        options.log(f"{options.drawings_out}: {resume_point.count} records are there already{damage}")
    return resume_point


def _check_errors(options: RunOptions, summary: Summary) -> None:
    if options.max_errors is not None:
        options.max_errors.check(summary)
