"""Run batches through sessions while the next images are decoded: the loop that `infer` and `Model.explain` share.

Images are decoded by a decoder pool, gathered into batches in input order, and predicted by one thread a session. Every
queue is bounded, so memory does not grow with the number of images: while nobody takes results, no batch is predicted,
no image decoded, and no request taken, beyond a fixed number of each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeVar

from opal_deploy.errors import OpalError
from opal_deploy.inference.decoding.pool import CpuDecoderPool
from opal_deploy.inference.prediction import BatchPredictor
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer, ThreadRole
from opal_deploy.inference.types import InferenceOptions, Prepared, Request, Result
from opal_deploy.runtime.session import Session

T = TypeVar("T")


def predict_stream(
    requests: Iterable[Request],
    sessions: Sequence[Session],
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    print_message: Callable[[str], None] = lambda _: None,
) -> Generator[Result, None, None]:
    """Yield one result a request, in the order of the requests.

    Args:
        requests: may be endless; it is read a bounded distance ahead. Everything that was taken from it is predicted,
            so that ending it stops the loop without losing anything.
        sessions: of one model; batches go to them in turn.
        options: how images are decoded, batched and predicted.
        timer: gets the times of every stage.
        print_message: is called, from any thread, when memory was short and the batch is smaller from then on.

    Raises:
        StoppedEarly: a device was lost; everything before its batch was yielded.
        OpalError: `requests` raised it; everything before it was yielded.
    """
    input_size = sessions[0].metadata.input_size
    errors: list[OpalError] = []
    with ExitStack() as stack:
        decoders = stack.enter_context(CpuDecoderPool(options, input_size, timer))
        # one thread a session: a session runs one batch at a time
        predictors = [
            (
                BatchPredictor(session, options, timer, print_message),
                stack.enter_context(thread_pool(1, f"session-{index}", timer, "session")),
            )
            for index, session in enumerate(sessions)
        ]
        # each session has a batch in work and the next one ready
        prepared = prefetch(
            (decoders.submit(request) for request in _until_error(requests, errors)),
            options.batch * (len(sessions) + 1),
            lambda: timer.waiting("pictures"),
        )
        batches = prefetch(
            (
                threads.submit(predictor.predict, batch)
                for batch, (predictor, threads) in zip(
                    _batches(prepared, options.batch), itertools.cycle(predictors), strict=False
                )
            ),
            len(sessions),
            lambda: timer.waiting("session"),
        )
        for results in batches:
            yield from results
    if errors:
        raise errors[0]


@contextmanager
def thread_pool(workers: int, name: str, timer: StageTimer, role: ThreadRole) -> Iterator[ThreadPoolExecutor]:
    """Open a pool that drops what waits when its block is left, so that an interrupted run ends at once.

    Args:
        workers: number of threads.
        name: prefix of their names.
        timer: counts their stages under `role`.
        role: of these threads.
    """
    pool = ThreadPoolExecutor(workers, name, initializer=timer.register_thread, initargs=(role,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def prefetch(
    futures: Iterator[Future[T]], distance: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[T]:
    """Yield the results of futures in order, with at most `distance` begun beyond the one that is awaited.

    Args:
        futures: begun one by one, as they are taken.
        distance: number of futures.
        waiting: makes the context in which a result is awaited.

    Raises:
        OpalError: `futures` raised it; the results of those before were yielded.
    """

    def first_result() -> T:
        with waiting():
            return pending.popleft().result()

    pending: deque[Future[T]] = deque()
    errors: list[OpalError] = []
    try:
        for future in _until_error(futures, errors):
            pending.append(future)
            if len(pending) > distance:
                yield first_result()
        while pending:
            yield first_result()
        if errors:
            raise errors[0]
    finally:
        for future in pending:
            future.cancel()


def _until_error(items: Iterable[T], errors: list[OpalError]) -> Iterator[T]:
    """Yield items up to an OpalError, which is put into `errors`: results of earlier items come before it is raised."""
    try:
        yield from items
    except OpalError as error:
        errors.append(error)


def _batches(prepared: Iterator[Prepared], size: int) -> Iterator[list[Prepared]]:
    while batch := list(itertools.islice(prepared, size)):
        yield batch
