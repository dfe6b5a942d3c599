"""One run of `opal-deploy infer`: images in, a folder of records, overlays and a report out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.explain.overlay import as_jpeg, draw_overlay
from opal_deploy.explain.records import Record
from opal_deploy.explain.report import ReportWriter
from opal_deploy.pipeline.boxes import Boxes
from opal_deploy.pipeline.discover import Item
from opal_deploy.pipeline.engine import EngineOptions, Result, ahead, explain_all, thread_pool
from opal_deploy.pipeline.names import escape_name
from opal_deploy.pipeline.output import OVERLAYS, REPORT, RESULTS, RecordWriter, overlay_name
from opal_deploy.pipeline.prepare import Request
from opal_deploy.pipeline.reading import opener
from opal_deploy.pipeline.stages import StageClock, StageTimes
from opal_deploy.preprocess.decode import decode
from opal_deploy.preprocess.resize import Box
from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class Job:
    """What to do.

    Attributes:
        out: an existing folder.
        explain: draw overlays and write the report.
        boxes: crops, by image; None: whole pictures.
        engine: how the loop works.
        facts: for the report's head: (name, value) pairs.
        report_limit: images shown in the report; all are counted.
    """

    out: Path
    explain: bool = False
    boxes: Boxes | None = None
    engine: EngineOptions = field(default_factory=EngineOptions)
    facts: tuple[tuple[str, str], ...] = ()
    report_limit: int = 200


@dataclass
class Summary:
    """What happened.

    Attributes:
        statuses: records by status. errors: error records by code.
        seconds: from the first image to the last record. to_first: until the first record was written.
        times: where the time went; empty until the end.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    to_first: float | None = None
    times: StageTimes = field(default_factory=StageTimes)

    @property
    def total(self) -> int:
        """Records written."""
        return self.statuses.total()

    def count(self, record: Record) -> None:
        """Add one record."""
        self.statuses[record["status"]] += 1
        if record["status"] == "error":
            self.errors[record["error"]["code"]] += 1


def run(
    items: Iterable[Item],
    sessions: Sequence[Session],
    job: Job,
    report_progress: Callable[[Summary], None] = lambda _: None,
    clock: StageClock | None = None,
) -> Summary:
    """Explain every item; exactly one record each, in their order.

    `clock` is told what every stage takes, one of its own if there is none; `Summary.times` is what it read at the end.

    Raises:
        StoppedEarly: the disk is full or a device was lost; records so far are whole.
        UsageError: not one image was found (raised by the iteration over `items`), or `job.out` cannot be written to.
    """
    summary = Summary()
    clock = StageClock() if clock is None else clock
    started = time.perf_counter()
    results = explain_all(requests(items, job.boxes), sessions, job.engine, clock)
    with ExitStack() as stack:
        writer = stack.enter_context(RecordWriter(job.out / RESULTS))
        report = None
        if job.explain:
            report = stack.enter_context(_report(job))
            drawers = stack.enter_context(thread_pool(job.engine.workers, "overlay", clock, "drawers"))
            drawn = _with_overlays(results, job, drawers, clock)
        else:
            drawn = ((result.record, None) for result in results)
        for record, overlay in drawn:
            with clock.waiting("disk"), clock.stage("write"):
                writer.write(record)
            if report is not None:
                # a thumbnail's making, for a line or two of text
                with clock.stage("draw"):
                    _add(report, record, overlay)
            summary.count(record)
            if summary.to_first is None:
                summary.to_first = time.perf_counter() - started
            report_progress(summary)
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
        yield Request(escape_name(str(item.path)), item.path, box)


@contextmanager
def _report(job: Job) -> Iterator[ReportWriter]:
    """The report, and the folder of the overlays; not being able to write them is the disk's fault, not ours."""
    try:
        (job.out / OVERLAYS).mkdir(exist_ok=True)
        report = ReportWriter(job.out / REPORT, title="OPAL explanations", facts=job.facts, limit=job.report_limit)
    except OSError as error:
        raise UsageError(f"{job.out}: cannot be written ({error.strerror or error}); choose another --out") from None
    try:
        yield report
    except BaseException:
        report.discard()
        raise
    try:
        report.close()
    except OSError as error:
        raise _report_failed(error) from None


def _with_overlays(
    results: Iterable[Result], job: Job, drawers: ThreadPoolExecutor, clock: StageClock
) -> Iterator[tuple[Record, Image.Image | None]]:
    """Records with their overlays drawn and written, in order; a bounded number is in work."""

    def submitted() -> Iterator[Future[tuple[Record, Image.Image | None]]]:
        for index, result in enumerate(results):
            yield drawers.submit(_draw, index, result, job, clock)

    return ahead(submitted(), 2 * job.engine.workers, lambda: clock.waiting("drawing"))


def _draw(index: int, result: Result, job: Job, clock: StageClock) -> tuple[Record, Image.Image | None]:
    record = result.record
    if record["status"] == "error":
        return record, None
    try:
        picture = result.prepared.picture or _again(result.prepared.request, job.engine.max_pixels, clock)
        if picture.size != (record["width"], record["height"]):
            return record, None
    except ImageError:
        # it was answered as it was, and is gone or another by now: the answer stands, without a picture
        return record, None
    with clock.stage("draw"):
        overlay = draw_overlay(picture, record)
        encoded = as_jpeg(overlay)
    name = overlay_name(index, record["image"])
    try:
        with clock.stage("write"):
            (job.out / name).write_bytes(encoded)
    except OSError as error:
        raise StoppedEarly(
            f"{job.out / name}: cannot be written ({error.strerror or error}); make room and run again"
        ) from None
    return {**record, "overlay": name}, overlay if index < job.report_limit else None


def _again(request: Request, max_pixels: int, clock: StageClock) -> Image.Image:
    """A picture too large to be kept while its batch was answered."""
    with clock.stage("decode"):
        return decode(request.source, max_pixels=max_pixels, open_file=opener(clock))


def _add(report: ReportWriter, record: Record, overlay: Image.Image | None) -> None:
    try:
        report.add(record, overlay)
    except OSError as error:
        raise _report_failed(error) from None


def _report_failed(error: OSError) -> StoppedEarly:
    return StoppedEarly(f"the report cannot be written ({error.strerror or error}); make room and run again")
