"""One run of `opal-deploy infer`: images in, a folder of records, drawings, tables and a report out.

`report.html` of a complete run, made from its records and the overlays on the disk.

So a run that was interrupted and taken up again has the same report as one that ran through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.inference.decoding.prepare import Request, timed_open
from opal_deploy.inference.executor import InferenceOptions, Result, predict_stream, prefetch, thread_pool
from opal_deploy.inference.run.image_files import (
    OVERLAYS,
    SHEETS,
    overlay_name,
    remove_drawings,
    sheet_name,
    write_drawing,
)
from opal_deploy.inference.run.interrupt import Interrupt
from opal_deploy.inference.run.results import (
    REPORT,
    RESULTS,
    RecordWriter,
    ResumePoint,
    load_resume_point,
    read_records,
)
from opal_deploy.inference.run.summary import Accuracy, ErrorLimit, Summary
from opal_deploy.inference.sheets import SheetOptions
from opal_deploy.inference.sources.annotations import Boxes, Labels
from opal_deploy.inference.sources.items import Item
from opal_deploy.inference.timing import StageTimer
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import Record
from opal_deploy.records.tables import Format, write_table
from opal_deploy.runtime.session import Session
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
from opal_deploy.visualization.slot_names import SlotNames, add_slot_names

# kept in memory for the report, a few megabytes; those after them are made from the overlays on the disk
_THUMBNAILS = 500


@dataclass(frozen=True)
class RunOptions:
    """What to do.

    Attributes:
        out: an existing folder.
        explain: draw overlays and write the report.
        boxes: crops, by image; None: whole pictures.
        engine: how the loop works; it has to keep pictures for overlays, and pictures and outputs for sheets.
        facts: for the report's head: (name, value) pairs.
        report_limit: images shown in the report; all are counted.
        labels: what images really show; None: nobody said.
        max_errors: failed images from which on the run is ended; None: never.
        formats: tables to make of the records at the end.
        resume: go on after the records that are in `out`; else they are replaced.
        say: tells a person what happens.
        report_pictures: in the page, or the overlays beside it; None: in the page where they are few.
        sheets: draw an evidence sheet an image; None: draw none.
        names: of slots, for the records.
    """

    out: Path
    explain: bool = False
    boxes: Boxes | None = None
    engine: InferenceOptions = field(default_factory=InferenceOptions)
    facts: tuple[tuple[str, str], ...] = ()
    report_limit: int = REPORT_LIMIT
    labels: Labels | None = None
    max_errors: ErrorLimit | None = None
    formats: tuple[Format, ...] = ()
    resume: bool = False
    say: Callable[[str], None] = lambda _: None
    report_pictures: ImageMode | None = None
    sheets: SheetOptions | None = None
    names: SlotNames | None = None


def run(
    items: Iterable[Item],
    sessions: Sequence[Session],
    job: RunOptions,
    report_progress: Callable[[Summary], None] = lambda _: None,
    clock: StageTimer | None = None,
    summary: Summary | None = None,
    interrupt: Interrupt | None = None,
) -> Summary:
    """Explain every item; exactly one record each, in their order.

    Report and tables are made once every item has its record, and not before.

    Args:
        clock: is told what every stage takes; one of its own if there is none.
        summary: is counted up as records are written, and returned; one of its own if there is none. It is as true
            after an exception as at the end.
        interrupt: ends the run in good order when it is asked to.

    Raises:
        StoppedEarly: the disk is full, a device was lost, or too many images failed; records so far are whole.
        UsageError: not one image was found (raised by the iteration over `items`), `job.out` cannot be written to, or
            the images are others than those of the run that is to be resumed.
    """
    summary = Summary() if summary is None else summary
    clock = StageTimer() if clock is None else clock
    interrupt = Interrupt() if interrupt is None else interrupt
    if job.labels is not None:
        summary.accuracy = Accuracy(frozenset(sessions[0].metadata.class_names))
    asked = requests(items, job.boxes)
    kept = ResumePoint()
    if job.resume:
        kept = _take_up(asked, job, summary)
    if job.max_errors is not None:
        job.max_errors.check(summary)
    thumbnails: dict[int, Thumbnail] = {}
    started = time.perf_counter()
    try:
        with ExitStack() as stack:
            stack.enter_context(interrupt.running())
            writer = stack.enter_context(RecordWriter(job.out / RESULTS, kept.size, kept.count))
            records = _records(predict_stream(interrupt.until(asked), sessions, job.engine, clock, job.say), job)
            if job.explain or job.sheets is not None:
                _make_place(job, kept.count)
                drawers = stack.enter_context(thread_pool(job.engine.workers, "draw", clock, "drawers"))
                drawn = _with_drawings(records, job, drawers, clock, kept.count, thumbnails)
            else:
                drawn = (record for record, _ in records)
            for record in drawn:
                with clock.waiting("disk"), clock.stage("write"):
                    writer.write(record)
                summary.count(record)
                if summary.to_first is None:
                    summary.to_first = time.perf_counter() - started
                report_progress(summary)
                if job.max_errors is not None:
                    job.max_errors.check(summary)
        if not interrupt.stopped:
            _finish(job, thumbnails)
    finally:
        summary.seconds = time.perf_counter() - started
        summary.times = clock.read()
    return summary


def requests(items: Iterable[Item], boxes: Boxes | None) -> Iterator[Request]:
    """What the engine is asked for: each item with its name and its box."""
    for item in items:
        box: Box | ImageError | None = item.problem
        if box is None and boxes is not None:
            try:
                box = boxes.find(item)
            except ImageError as error:
                box = error
        yield Request(item.name, item.source, box)


def _take_up(asked: Iterator[Request], job: RunOptions, summary: Summary) -> ResumePoint:
    kept = load_resume_point(job.out, asked, summary.count)
    summary.kept = kept.count
    if kept.count or kept.dropped:
        lost = f"; {kept.dropped} damaged bytes after them are dropped" if kept.dropped else ""
        job.say(f"{job.out}: {kept.count} records are there already{lost}")
    return kept


def _records(results: Iterable[Result], job: RunOptions) -> Iterator[tuple[Record, Result]]:
    """Records, with what their images really show and what their slots are called where somebody said so."""
    for result in results:
        record = result.record
        if job.names is not None:
            record = add_slot_names(record, job.names)
        if job.labels is not None and record["image"] is not None:
            truth = job.labels.find(Path(unescape_name(record["image"])).as_posix())
            if truth is not None:
                record = {**record, "truth": truth}
        yield record, result


def _make_place(job: RunOptions, first: int) -> None:
    """The folders of the drawings, without any that no record names."""
    try:
        if job.explain:
            (job.out / OVERLAYS).mkdir(exist_ok=True)
            remove_drawings(job.out, OVERLAYS, first)
        if job.sheets is not None:
            (job.out / SHEETS).mkdir(exist_ok=True)
            remove_drawings(job.out, SHEETS, first)
    except OSError as error:
        raise UsageError(f"{job.out}: cannot be written ({error.strerror or error}); choose another --out") from None


def _with_drawings(
    records: Iterable[tuple[Record, Result]],
    job: RunOptions,
    drawers: ThreadPoolExecutor,
    clock: StageTimer,
    first: int,
    thumbnails: dict[int, Thumbnail],
) -> Iterator[Record]:
    """Records whose overlays and sheets are drawn and written, in order; a bounded number is in work.

    Thumbnails for the report are made where the overlay is at hand, which is a quarter of the work later.
    """
    most = {"embed": _THUMBNAILS, "files": 0, None: EMBED_LIMIT}[job.report_pictures]
    wanted = min(job.report_limit, most)

    def draw(index: int, record: Record, result: Result) -> Record:
        return _draw(index, record, result, job, clock, thumbnails if index < wanted else None)

    def submitted() -> Iterator[Future[Record]]:
        for index, (record, result) in enumerate(records, first):
            yield drawers.submit(draw, index, record, result)

    return prefetch(submitted(), 2 * job.engine.workers, lambda: clock.waiting("drawing"))


def _draw(
    index: int,
    record: Record,
    result: Result,
    job: RunOptions,
    clock: StageTimer,
    thumbnails: dict[int, Thumbnail] | None,
) -> Record:
    if record["status"] == "error":
        return record
    try:
        picture = result.prepared.picture or _again(result.prepared.request, job.engine.max_pixels, clock)
        if picture.size != (record["width"], record["height"]):
            return record
    except ImageError:
        # it was answered as it was, and is gone or another by now: the answer stands, without a picture
        return record
    if job.explain:
        record = _with_overlay(index, record, picture, job, clock, thumbnails)
    return record if job.sheets is None else _with_sheet(index, record, result, picture, job.sheets, job.out, clock)


def _with_overlay(
    index: int,
    record: Record,
    picture: Image.Image,
    job: RunOptions,
    clock: StageTimer,
    thumbnails: dict[int, Thumbnail] | None,
) -> Record:
    with clock.stage("draw"):
        overlay = draw_overlay(picture, record)
        encoded = encode_jpeg(overlay)
        if thumbnails is not None:
            thumbnails[index] = make_thumbnail(overlay, record)
    name = overlay_name(index, record["image"])
    with clock.stage("write"):
        write_drawing(job.out, name, encoded)
    return {**record, "overlay": name}


def _with_sheet(
    index: int, record: Record, result: Result, picture: Image.Image, sheets: SheetOptions, out: Path, clock: StageTimer
) -> Record:
    try:
        with clock.stage("draw"):
            encoded = sheets.encode(result, picture)
    except ImageError:
        # its file is gone by now, as above
        return record
    name = sheet_name(index, record["image"])
    with clock.stage("write"):
        write_drawing(out, name, encoded)
    return {**record, "sheet": name}


def _again(request: Request, max_pixels: int, clock: StageTimer) -> Image.Image:
    """A picture too large to be kept while its batch was answered."""
    with clock.stage("decode"):
        return decode(request.source, max_pixels=max_pixels, open_file=timed_open(clock))


def _finish(job: RunOptions, thumbnails: dict[int, Thumbnail]) -> None:
    if job.explain:
        write_report(job.out, job.facts, job.report_limit, thumbnails, job.report_pictures)
    for kind in job.formats:
        write_table(read_records(job.out / RESULTS), job.out, kind)


NO_THUMBNAILS: Mapping[int, Thumbnail] = {}


def write_report(
    out: Path,
    facts: Sequence[Fact],
    limit: int,
    thumbnails: Mapping[int, Thumbnail] = NO_THUMBNAILS,
    pictures: ImageMode | None = None,
) -> None:
    """Write the report of the run in `out`.

    Args:
        out: the run's folder.
        facts: for the report's head.
        limit: images shown.
        thumbnails: those that are at hand, by the image's number; the others are made from overlays.
        pictures: in the page, or the overlays beside it; None: in the page where they are few.

    Raises:
        StoppedEarly: the disk is full; everything else is there.
    """
    try:
        if pictures is None:
            pictures = choose_image_mode(min(limit, _count(out / RESULTS)))
        title = "OPAL explanations"
        with ReportWriter(out / REPORT, title=title, facts=facts, limit=limit, pictures=pictures) as report:
            for index, record in enumerate(read_records(out / RESULTS)):
                name = record.get("overlay")
                overlay: bytes | None = thumbnails.get(index)
                if overlay is None and name is not None and report.wants_pictures:
                    overlay = _overlay(out / name)
                report.add(record, overlay)
    except OSError as error:
        raise StoppedEarly(
            f"the report cannot be written ({error.strerror or error}); make room and run again"
        ) from None


def _count(path: Path) -> int:
    """Lines of a file."""
    with path.open("rb") as stream:
        return sum(part.count(b"\n") for part in iter(lambda: stream.read(1 << 20), b""))


def _overlay(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        # somebody took it away; the card says that there is no picture
        return None
