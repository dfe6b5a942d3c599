"""Batches through sessions while the next pictures decode: the loop that `infer` and `Model.explain` share.

Pictures are prepared by a pool of threads (Pillow releases the interpreter's lock), gathered into batches in input
order, and answered by one worker a session. Every queue is bounded, so memory does not grow with the number of images,
and one image's error never touches its batch.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.explain.records import Record, build_record
from opal_deploy.pipeline.prepare import Pixels, Prepared, Request, prepare
from opal_deploy.preprocess.decode import MAX_PIXELS
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.session import Session

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
    """

    batch: int = 16
    workers: int = 2
    max_pixels: int = MAX_PIXELS
    top: int = 5
    min_margin: float | None = None
    keep_pictures: bool = False


@dataclass(frozen=True)
class Result:
    """One image's record with what an overlay needs."""

    record: Record
    prepared: Prepared


def explain_all(requests: Iterable[Request], sessions: Sequence[Session], options: EngineOptions) -> Iterator[Result]:
    """Results in the order of the requests.

    Args:
        requests: may be endless; it is read a bounded distance ahead.
        sessions: of one model; batches go to them in turn.

    Raises:
        StoppedEarly: a device was lost; everything before its batch was yielded.
    """
    input_size = sessions[0].metadata.input_size
    with (
        ThreadPoolExecutor(options.workers, "decode") as decoders,
        _Pools(len(sessions)) as runners,
    ):

        def prepared(request: Request) -> Prepared:
            return prepare(request, input_size, options.max_pixels, keep_picture=options.keep_pictures)

        # each session has a batch in work and the next one ready
        decoding = ahead(
            (decoders.submit(prepared, request) for request in requests), options.batch * (len(sessions) + 1)
        )
        turn = itertools.cycle(zip(sessions, runners.pools, strict=True))
        running = ahead(
            (
                pool.submit(_answer, session, batch, options)
                for batch, (session, pool) in zip(_batches(decoding, options.batch), turn, strict=False)
            ),
            len(sessions),
        )
        for results in running:
            yield from results


def ahead(futures: Iterator[Future[T]], distance: int) -> Iterator[T]:
    """Results in order, with at most `distance` futures begun beyond the one that is awaited."""
    pending: deque[Future[T]] = deque()
    try:
        for future in futures:
            pending.append(future)
            if len(pending) > distance:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _batches(prepared: Iterator[Prepared], size: int) -> Iterator[list[Prepared]]:
    while batch := list(itertools.islice(prepared, size)):
        yield batch


def _answer(session: Session, batch: list[Prepared], options: EngineOptions) -> list[Result]:
    """Records of one batch; pictures with an error take no part in the forward pass."""
    good = [entry for entry in batch if entry.pixels is not None]
    rows = {id(entry): row for row, entry in enumerate(good)}
    outputs = session.run(np.stack([cast(Pixels, entry.pixels) for entry in good])) if good else None
    results = []
    for entry in batch:
        record = entry.error
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


class _Pools:
    """One thread a session: a session answers one batch at a time."""

    def __init__(self, count: int) -> None:
        self.pools = [ThreadPoolExecutor(1, f"session-{index}") for index in range(count)]

    def __enter__(self) -> _Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools:
            pool.shutdown(wait=True, cancel_futures=True)
