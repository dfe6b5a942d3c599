"""Run batches through sessions while the next images are decoded: the loop that `infer` and `Model.explain` share.

Batches are decoded by a decoder pool, predicted by threads of each session, and turned into results by the thread that
takes them, all in input order. Every queue is bounded, so memory does not grow with the number of images: while nobody
takes results, no batch is predicted, no image decoded, and no request taken, beyond a fixed number of each.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Self, TypeAlias, TypeVar

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OpalError, OutOfMemory
from opal_deploy.inference.decoding.pool import DecoderPool, Decoders, group_size
from opal_deploy.inference.decoding.slots import PreparedBatch
from opal_deploy.inference.prediction import BatchPredictor
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer, ThreadRole
from opal_deploy.inference.types import InferenceOptions, InputImage, Result
from opal_deploy.runtime.session import Session, pinned

T = TypeVar("T")
_PADDING = InputImage(None, b"", error=ImageError("padding", "keeps another image at its place in its batch"))


def predict_stream(
    requests: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    print_message: Callable[[str], None] = lambda _: None,
) -> Generator[Result, None, None]:
    """Yield one result a request, in the order of the requests; see `predict_batches`."""
    batches = predict_batches(requests, sessions, options, timer, print_message)
    try:
        yield from release_each(batches)
    finally:
        batches.close()


def release_each(batches: Iterable[list[Result]]) -> Iterator[Result]:
    """Yield the results of every batch, and keep none that was yielded: an image to draw takes megabytes."""
    for results in batches:
        results.reverse()
        while results:
            yield results.pop()


def predict_batches(
    requests: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    print_message: Callable[[str], None] = lambda _: None,
    open_decoders: Callable[..., Decoders] = DecoderPool,
    *,
    first: int = 0,
) -> Generator[list[Result], None, None]:
    """Yield the results of one batch of requests after the other, in the order of the requests.

    Args:
        requests: may be endless; it is read a bounded distance ahead. Everything that was taken from it is predicted,
            so that ending it stops the loop without losing anything.
        sessions: of one model; batches go to them in turn.
        options: how images are decoded, batched and predicted.
        timer: gets the times of every stage.
        print_message: is called, from any thread, when memory was short and the batch is smaller from then on.
        open_decoders: makes what decodes the images, of the arguments of `DecoderPool`.
        first: number of the first image in its run. Each image gets the place in its batch that it has in a run that
            begins with number 0: there a runtime may compute another last bit of a logit.

    Raises:
        StoppedEarly: a device was lost; everything before its batch was yielded.
        OpalError: `requests` raised it; everything before it was yielded.
    """
    errors: list[OpalError] = []
    padding = first % options.batch
    requests = itertools.chain(itertools.repeat(_PADDING, padding), until_error(requests, errors))
    predictors = [BatchPredictor(session, options, timer, print_message) for session in sessions]
    in_flight = sum(predictor.depth for predictor in predictors)
    # every worker has a group in work, and every session its next batch
    ahead = -(-options.workers * group_size(options.batch, options.workers) // options.batch) + len(sessions) - 1
    if options.keep_images:
        # they take megabytes each, and drawing them takes far longer than predicting: one batch is drawn while the next
        # is decoded, and no other waits
        in_flight, ahead = 0, -(-options.workers // options.batch)
    # those being decoded, those of the sessions, and the one whose results are being built
    slots = ahead + 1 + in_flight + 1 + 1
    with ExitStack() as stack:
        try:
            decoders = open_decoders(options, sessions[0].metadata.input_size, timer, slots=slots, rows=options.batch)
        except MemoryError as error:
            raise OutOfMemory(f"batches of {options.batch} images: {error}; use a smaller --batch") from None
        stack.enter_context(decoders)
        for session in sessions:
            stack.enter_context(pinned(session, decoders.pixels))
        runners = [stack.enter_context(SessionRunner(predictor, timer)) for predictor in predictors]
        prepared = prefetch(
            (decoders.submit(batch) for batch in _batches(requests, options.batch)),
            ahead,
            lambda: timer.waiting("pictures"),
        )
        predicted = prefetch(
            # a loop's variable, and the tuples of zip, would hold the last batch's images
            map(SessionRunner.submit, itertools.cycle(runners), prepared),
            in_flight,
            lambda: timer.waiting("session"),
        )
        for batch, predictor, outputs in predicted:
            results = predictor.build_results(batch.images, batch.pixels, outputs)[padding:]
            padding = 0
            batch.release()
            # nothing but the results holds the images while they are drawn
            del batch
            if results:
                yield results
    if errors:
        raise errors[0]


Predicted: TypeAlias = tuple[PreparedBatch, BatchPredictor, Outputs | None]
Job: TypeAlias = tuple[PreparedBatch, Future[Predicted]]


class SessionRunner:
    """The thread of one session, which keeps up to `depth` batches in flight where the session allows it."""

    def __init__(
        self, predictor: BatchPredictor, timer: StageTimer, take: Callable[[bool], Job | None] | None = None
    ) -> None:
        """Start nothing yet; a context manager, which drops the jobs that have not begun.

        Args:
            predictor: of the session.
            timer: gets the times of the stage `compute`.
            take: returns the next job, or None to end the thread; with False it must not wait, and raises `queue.Empty`
                for no job. None: the jobs come from `submit`.
        """
        self._predictor, self._timer = predictor, timer
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._take = take or self._jobs.get
        self._in_flight: deque[tuple[object, PreparedBatch, Future[Predicted]]] = deque()
        self._left = False
        self._thread = threading.Thread(target=self._work, name="session-runner", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._left = True
        self._jobs.put(None)
        self._thread.join()

    def submit(self, batch: PreparedBatch) -> Future[Predicted]:
        """Return the future of the batch's outputs."""
        future: Future[Predicted] = Future()
        self._jobs.put((batch, future))
        return future

    def _work(self) -> None:
        self._timer.register_thread("session")
        while True:
            has_room = len(self._in_flight) < self._predictor.depth and not self._predictor.is_awaited
            try:
                job = self._take(not self._in_flight) if has_room or not self._in_flight else ()
            except queue.Empty:
                job = ()
            if job is None:
                break
            if not job:
                self._collect()
            elif not self._left and job[1].set_running_or_notify_cancel():
                self._begin(*job)
            # its images may be drawn, and go, before the next one comes
            job = ()
        while self._in_flight:
            self._collect()

    def _begin(self, batch: PreparedBatch, future: Future[Predicted]) -> None:
        try:
            handle = self._predictor.submit(batch.images, batch.pixels)
        except BaseException as error:  # somebody waits for the future
            future.set_exception(error)
            return
        self._in_flight.append((handle, batch, future))
        while handle is None and self._in_flight:
            # it runs alone, after those before it
            self._collect()

    def _collect(self) -> None:
        handle, batch, future = self._in_flight.popleft()
        try:
            outputs = None if handle is None else self._predictor.collect(handle, batch.images)
            if outputs is None:
                while any(other is not None for other, *_ in self._in_flight):
                    self._collect()
                outputs = self._predictor.run(batch.images, batch.pixels)
        except BaseException as error:  # somebody waits for the future
            future.set_exception(error)
        else:
            future.set_result((batch, self._predictor, outputs))


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
        for future in until_error(futures, errors):
            pending.append(future)
            # its result may be large, and is nobody's once it was yielded
            del future
            if len(pending) > distance:
                yield first_result()
        while pending:
            yield first_result()
        if errors:
            raise errors[0]
    finally:
        for future in pending:
            future.cancel()


def until_error(items: Iterable[T], errors: list[OpalError]) -> Iterator[T]:
    """Yield items up to an OpalError, which is put into `errors`: results of earlier items come before it is raised."""
    try:
        yield from items
    except OpalError as error:
        errors.append(error)


def _batches(requests: Iterator[InputImage], size: int) -> Iterator[Iterator[InputImage]]:
    """Yield iterators over batches, each to be read to its end before the next one is taken; none is empty."""
    for first in requests:
        batch = itertools.chain([first], itertools.islice(requests, size - 1))
        # a frame of a video is large
        del first
        yield batch
