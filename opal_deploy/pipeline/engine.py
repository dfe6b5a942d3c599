"""Batches through sessions while the next pictures decode: the loop that `infer` and `Model.explain` share.

Pictures are prepared by a pool of threads (Pillow releases the interpreter's lock), gathered into batches in input
order, and answered by one worker a session. Every queue is bounded, so memory does not grow with the number of images,
and one image's error never touches its batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import OpalError
from opal_deploy.explain.records import Record, build_record, error_record
from opal_deploy.pipeline.prepare import Pixels, Prepared, Request, prepare
from opal_deploy.pipeline.stages import NO_CLOCK, StageClock, Station
from opal_deploy.preprocess.decode import MAX_PIXELS
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.session import ImageBatch, Session, StagedSession

T = TypeVar("T")


@dataclass(frozen=True)
class EngineOptions:
    """How the loop works.

    Attributes:
        batch: pictures a forward pass.
        workers: threads that decode.
        max_pixels: of one picture.
        top: classes listed in a record.
        min_margin: answers below it are marked `abstained`.
        keep_pictures: hand small pictures on, for overlays.
        time_transfers: ask a session that can tell for its copies to and from the device, which makes it wait for each.
    """

    batch: int = 16
    workers: int = 2
    max_pixels: int = MAX_PIXELS
    top: int = 5
    min_margin: float | None = None
    keep_pictures: bool = False
    time_transfers: bool = False


@dataclass(frozen=True)
class Result:
    """One image's record with what an overlay needs."""

    record: Record
    prepared: Prepared


def explain_all(
    requests: Iterable[Request], sessions: Sequence[Session], options: EngineOptions, clock: StageClock = NO_CLOCK
) -> Iterator[Result]:
    """Results in the order of the requests.

    Args:
        requests: may be endless; it is read a bounded distance ahead.
        sessions: of one model; batches go to them in turn.
        clock: is told what every stage takes.

    Raises:
        StoppedEarly: a device was lost; everything before its batch was yielded.
        OpalError: `requests` raised it; everything before it was yielded.
    """
    input_size = sessions[0].metadata.input_size
    ended: list[OpalError] = []
    with ExitStack() as stack:
        decoders = stack.enter_context(thread_pool(options.workers, "decode", clock, "decoders"))
        # one thread a session: a session answers one batch at a time
        runners = [
            stack.enter_context(thread_pool(1, f"session-{index}", clock, "session")) for index in range(len(sessions))
        ]

        def prepared(request: Request) -> Prepared:
            return prepare(request, input_size, options.max_pixels, keep_picture=options.keep_pictures, clock=clock)

        # each session has a batch in work and the next one ready
        decoding = ahead(
            (decoders.submit(prepared, request) for request in _until_error(requests, ended)),
            options.batch * (len(sessions) + 1),
            lambda: clock.waiting("pictures"),
        )
        turn = itertools.cycle(zip(sessions, runners, strict=True))
        running = ahead(
            (
                pool.submit(_answer, session, batch, options, clock)
                for batch, (session, pool) in zip(_batches(decoding, options.batch), turn, strict=False)
            ),
            len(sessions),
            lambda: clock.waiting("session"),
        )
        for results in running:
            yield from results
    if ended:
        raise ended[0]


@contextmanager
def thread_pool(workers: int, name: str, clock: StageClock, station: Station) -> Iterator[ThreadPoolExecutor]:
    """A pool that drops what waits when its block is left, so that an interrupted run ends at once.

    The clock counts its threads to `station`.
    """
    pool = ThreadPoolExecutor(workers, name, initializer=clock.join, initargs=(station,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def ahead(
    futures: Iterator[Future[T]], distance: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[T]:
    """Results in order, with at most `distance` futures begun beyond the one that is awaited.

    Where `futures` itself raises an OpalError, the results of those before come first. `waiting` makes what is entered
    while a result is awaited.
    """

    def first() -> T:
        with waiting():
            return pending.popleft().result()

    pending: deque[Future[T]] = deque()
    ended: list[OpalError] = []
    try:
        for future in _until_error(futures, ended):
            pending.append(future)
            if len(pending) > distance:
                yield first()
        while pending:
            yield first()
        if ended:
            raise ended[0]
    finally:
        for future in pending:
            future.cancel()


def _until_error(items: Iterable[T], ended: list[OpalError]) -> Iterator[T]:
    """`items` up to the OpalError that ends them, which is put into `ended`: read-ahead must not outrun its results."""
    try:
        yield from items
    except OpalError as error:
        ended.append(error)


def _batches(prepared: Iterator[Prepared], size: int) -> Iterator[list[Prepared]]:
    while batch := list(itertools.islice(prepared, size)):
        yield batch


def _answer(session: Session, batch: list[Prepared], options: EngineOptions, clock: StageClock) -> list[Result]:
    """Records of one batch; pictures with an error take no part in the forward pass."""
    good = [entry for entry in batch if entry.pixels is not None]
    outputs = None
    if good:
        with clock.stage("batch"):
            images = np.stack([cast(Pixels, entry.pixels) for entry in good])
        with clock.stage("compute"):
            outputs = _run(session, images, options, clock)
    with clock.stage("evidence"):
        return _records(session, batch, good, outputs, options)


def _run(session: Session, images: ImageBatch, options: EngineOptions, clock: StageClock) -> Outputs:
    if not (options.time_transfers and isinstance(session, StagedSession)):
        return session.run(images)
    outputs, stages = session.run_staged(images)
    copies = [part for part in (stages.host_to_device, stages.device_to_host) if part is not None]
    if copies:
        clock.attribute("transfer", sum(copies))
    return outputs


def _records(
    session: Session, batch: list[Prepared], good: list[Prepared], outputs: Outputs | None, options: EngineOptions
) -> list[Result]:
    """One record an entry of `batch`; the rows of `outputs` are those of `good`."""
    rows = {id(entry): row for row, entry in enumerate(good)}
    results = []
    for entry in batch:
        record = entry.error
        if record is None and not np.isfinite(cast(Outputs, outputs).logits[rows[id(entry)]]).all():
            # half precision overflows for some pictures; NaN is no answer, and no JSON
            record = error_record(entry.request.name, "not_finite", "the model's answer for it is not a finite number")
        if record is None:
            record = build_record(
                entry.request.name,
                cast(Geometry, entry.geometry),
                cast(Outputs, outputs),
                rows[id(entry)],
                session.metadata,
                top=options.top,
                min_margin=options.min_margin,
            )
        results.append(Result(record, entry))
    return results
