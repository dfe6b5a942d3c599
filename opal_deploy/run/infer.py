"""The whole story of `opal-deploy infer`: images in, a run directory with records, drawings, tables and a report out.

`infer` tells it; the steps in their order, with the modules that do the work:

    find images        `setup`, which checks the whole call: folders, archives, lists, videos, with crops and labels
    open the model     `setup`
    acquire the folder `directory`: one process writes there, an interrupted run is resumed
    decode, predict    `predict.executor`: batches through the model, records in the order of the images
    draw, append       `drawing`, and `directory`, whose results.jsonl holds only whole lines at any moment
    finish             tables, report.html, summary.json

A run of several processes is the same story once per shard, each in a folder of its own, see `shards`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial

from opal_deploy.errors import ImageError, OpalError, StoppedEarly
from opal_deploy.logs import as_progress
from opal_deploy.options import StrPath
from opal_deploy.predict.executor import open_decoders, predict_batches
from opal_deploy.predict.prepare import Result
from opal_deploy.predict.setup import LoadedModel
from opal_deploy.records.record import Failed, Record
from opal_deploy.records.run_files import RESULTS
from opal_deploy.records.tables import open_table
from opal_deploy.run.directory import (
    InferenceRun,
    RecordWriter,
    RunDirectory,
    acquire_run_dir,
    load_resume_point,
    read_records,
)
from opal_deploy.run.drawing import Thumbnails, draw_results, open_report, prepare_overlays
from opal_deploy.run.options import InferOptions, Interrupt
from opal_deploy.run.setup import RunOptions, RunSetup, prepare_run
from opal_deploy.run.shards import Recovery, ShardedRun, join_shards, run_shards
from opal_deploy.run.summary import Accuracy, Summary
from opal_deploy.runtime.session import Session
from opal_deploy.sources.archives import CHANGED
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import StageTimer

NO_RECOVERY = Recovery()


def infer(
    images: Sequence[str], model: StrPath | LoadedModel | None, options: InferOptions, recovery: Recovery | None = None
) -> InferenceRun:
    """Classify images and write a run directory; see `opal_deploy.run_inference` for arguments and errors.

    `recovery` is given to a shard whose process is supervised.
    """
    setup, interrupt = prepare_run(images, model, options), options.interrupt or Interrupt()
    with acquire_run_dir(setup.run.out, setup.config, overwrite=options.overwrite) as directory:
        if directory.state == "finished":
            return setup.return_finished(directory)
        summary, timer, started = Summary(), StageTimer(), time.perf_counter()
        if setup.inputs.labels is not None:
            summary.accuracy = Accuracy(frozenset(setup.model.metadata.class_names))
        directory.write_config()
        try:
            with interrupt.running():
                _run(setup, directory, summary, timer, interrupt, recovery)
            document = setup.write_summary(directory, summary.end(timer, started))
            setup.upload(directory)
        except (KeyboardInterrupt, StoppedEarly) as error:
            # if the disk has space for it
            with suppress(OpalError):
                setup.write_summary(directory, summary.end(timer, started), str(error) or "interrupted")
                setup.upload(directory)
            if recovery is not None:
                raise
            hint = f"the same command{' without --overwrite' if options.overwrite else ''} resumes"
            if isinstance(error, StoppedEarly):
                raise StoppedEarly(f"{error}; {hint}") from None
            options.log(f"Interrupted: {summary.total} records are in {directory.root}; {hint}")
            raise
        setup.remove_shards()
        return setup.describe_run(directory, summary, document)


def _run(
    setup: RunSetup,
    directory: RunDirectory,
    summary: Summary,
    timer: StageTimer,
    interrupt: Interrupt,
    recovery: Recovery | None,
) -> None:
    """Write all records, here or by shards, and then tables and report; raise KeyboardInterrupt if it was stopped."""
    options = setup.run
    sign = None if setup.signer is None else partial(setup.signer.sign, run=directory.document["id"])
    progress = as_progress(setup.options.progress)
    # a supervised shard shows no progress
    total = setup.inputs.count() if setup.options.progress and recovery is None else None

    def report(records: int) -> None:
        failed = summary.statuses["error"]
        progress(records, total, f"{failed} failed" if failed else "")

    thumbnails: Thumbnails = {}
    if setup.devices is None:
        doing = "Explaining" if options.report is not None else "Classifying"
        options.log(f"{doing} with {setup.model.path} in {setup.runtime}, batches of {options.inference.batch}")
        thumbnails = write_records(
            setup.images, setup.model.sessions, options, summary=summary, interrupt=interrupt, timer=timer,
            report=report, sign=sign, recovery=recovery or NO_RECOVERY,
        )  # fmt: skip
    else:
        run = ShardedRun(setup, interrupt, report, setup.devices)
        setup.runtime = run_shards(run)
        summary.shards = len(run.devices)
        if not interrupt.stopped:
            join_shards(run, summary, sign)
    if interrupt.stopped:
        raise KeyboardInterrupt
    # a shard lacks images of other shards
    if summary.accuracy is not None and setup.inputs.labels is not None and setup.options.shard is None:
        summary.accuracy.unused_rows = setup.inputs.labels.unused()
    # a supervised shard leaves them to the run that it is part of
    if recovery is None:
        write_tables_and_report(options, summary, thumbnails)


def write_records(
    images: Iterator[InputImage],
    sessions: Sequence[Session],
    options: RunOptions,
    *,
    summary: Summary,
    interrupt: Interrupt,
    timer: StageTimer,
    report: Callable[[int], None] = lambda _: None,
    sign: Callable[[Record], Record] | None = None,
    recovery: Recovery = NO_RECOVERY,
) -> Thumbnails:
    """Classify every image, and append exactly one record for each, in order, to those in `options.out`.

    Args:
        images: all images of the run.
        sessions: of one model.
        options: what is written, and when the run ends.
        summary, timer: count all records, even if the run fails, and the times of every stage.
        interrupt: stops the run gracefully on request.
        report: receives the number of records after each write.
        sign: signs each record before it is written; None: no record is signed.
        recovery: see `Recovery`.

    Returns:
        Thumbnails of the report's first images.

    Raises:
        StoppedEarly: the disk is full, a device was lost, or too many images failed; the records so far are whole.
        UsageError: `options.out` cannot be written to, holds records of other images, or `images` raised it.
    """
    out, inference = options.out, replace(options.inference, one_at_a_time=recovery.note is not None)
    first, size = load_resume_point(out, images, summary.count)
    summary.resumed = first
    if first:
        options.log(f"{out}: {first} records are there already")
    summary.check_errors(options.max_errors)
    remaining = _recover(interrupt.stop_when_requested(images), first, recovery)
    thumbnails: Thumbnails = {}
    with ExitStack() as stack:
        writer = stack.enter_context(RecordWriter(out / RESULTS, size, first))
        if inference.keep_images:
            prepare_overlays(out, first)
        decoders = stack.enter_context(open_decoders(sessions, inference, timer))
        predicted = predict_batches(remaining, sessions, inference, decoders, timer, first=first)
        # otherwise its threads would live as long as an exception's traceback
        stack.enter_context(closing(predicted))
        batches = _count_black(predicted, summary)
        groups: Iterator[list[Record]] = ([result.record for result in results] for results in batches)
        if inference.keep_images:
            drawn = draw_results(
                itertools.chain.from_iterable(batches), out, inference, decoders.processes,
                first=first, thumbnails=thumbnails, timer=timer,
            )  # fmt: skip
            stack.enter_context(closing(drawn))
            groups = ([record] for record in drawn)
        elif options.max_errors is not None:
            # nothing is written after the error that exceeds the limit
            groups = ([record] for group in groups for record in group)
        for group in groups:
            _refuse_changed_archive(group)
            count = writer.count
            try:
                with timer.waiting("disk"), timer.stage("write"):
                    records = group if sign is None else [*map(sign, group)]
                    writer.write(*records)
            finally:
                for record in records[: writer.count - count]:
                    summary.count(record)
            report(summary.total)
            summary.check_errors(options.max_errors)
    return thumbnails


def _count_black(batches: Iterator[list[Result]], summary: Summary) -> Iterator[list[Result]]:
    for results in batches:
        summary.nearly_black += sum(result.prepared.nearly_black for result in results)
        yield results


def _refuse_changed_archive(records: Iterable[Record]) -> None:
    """Raise StoppedEarly, before anything is written, where an archive was changed while its members were read."""
    for record in records:
        if isinstance(record, Failed) and record.error.code == CHANGED:
            raise StoppedEarly(f"{record.image}: {record.error.message}; put back the archive that was there")


def _recover(images: Iterator[InputImage], first: int, recovery: Recovery) -> Iterator[InputImage]:
    """Yield the images from number `first` on, those that ended the process with an error."""
    for number, image in enumerate(images, first):
        if recovery.note is not None:
            recovery.note.write_text(str(number), encoding="ascii")
        if number in recovery.crashed:
            message = f"the process that predicted it {recovery.crashed[number]}, with no other image in flight"
            yield replace(image, error=ImageError("worker_died", message))
        else:
            yield image


def write_tables_and_report(options: RunOptions, summary: Summary, thumbnails: Thumbnails) -> None:
    """Write report and tables in one pass over the records; raise StoppedEarly if the disk is full."""
    out = options.out
    with ExitStack() as stack:
        outputs = [stack.enter_context(open_table(out, kind)) for kind in options.formats]
        if options.report is not None:
            page = open_report(out, options.report, summary.total, summary.folder or "", thumbnails)
            outputs.append(stack.enter_context(page))
        for record in read_records(out / RESULTS) if outputs else ():
            for add in outputs:
                add(record)
