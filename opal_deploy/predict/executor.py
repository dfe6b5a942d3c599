"""Run batches through sessions while the next images are decoded: the loop of `infer` and `Model.predict`.

A decoder pool decodes batches, a thread per session predicts them, and the thread that takes results builds these, all
in input order. Every queue is bounded, so memory does not grow with the number of images: until a result is taken, only
a fixed number of images is read, decoded and predicted.
"""

from __future__ import annotations

import gc
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
from opal_deploy.predict.decoder_pool import DecoderPool, group_size
from opal_deploy.predict.pixel_slots import PreparedBatch
from opal_deploy.predict.prediction import BatchPredictor
from opal_deploy.predict.types import InferenceOptions, Result
from opal_deploy.runtime.session import Session, pinned
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer, ThreadRole

T = TypeVar("T")
_PADDING = InputImage(None, b"", error=ImageError("padding", "keeps another image at its place in its batch"))


def predict_stream(
    requests: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    print_message: Callable[[str], None] = lambda _: None,
) -> Generator[Result, None, None]:
    """Yield one result per image, in the order of the images; see `predict_batches`."""
    batches = predict_batches(requests, sessions, options, timer, print_message)
    try:
        yield from release_each(batches)
    finally:
        batches.close()


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let the garbage collector look through the records less often: they are freed without it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def release_each(batches: Iterable[list[Result]]) -> Iterator[Result]:
    """Yield the results of every batch without keeping any: an image to draw takes megabytes."""
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
    open_decoders: Callable[..., AbstractContextManager[DecoderPool]] = DecoderPool,
    *,
    first: int = 0,
) -> Generator[list[Result], None, None]:
    """Yield the results of one batch of images after the other, in the order of the images.

    Args:
        requests: the images, perhaps without end; read a bounded distance ahead. Every image that was read is
            predicted, so the loop can be stopped by ending `requests`.
        sessions: of one model; batches go to them in turn.
        options: how images are decoded, batched and predicted.
        timer: receives the times of every stage.
        print_message: receives a line, from any thread, when memory was short and batches become smaller.
        open_decoders: opens the decoder pool, with the arguments of `DecoderPool`.
        first: number of the first image in its run. Each image gets the place in its batch that it has in a run from
            number 0: at another place a runtime may compute another last bit of a logit.

    Raises:
        StoppedEarly: a device was lost; all results before its batch were yielded.
        OpalError: `requests` raised it; all results before were yielded.
    """
    errors: list[OpalError] = []
    padding = first % options.batch
    requests = itertools.chain(itertools.repeat(_PADDING, padding), until_error(requests, errors))
    predictors = [BatchPredictor(session, options, timer, print_message) for session in sessions]
    in_flight = sum(predictor.depth for predictor in predictors)
    # every worker has a group in flight, and every session its next batch
    ahead = -(-options.workers * group_size(options.batch, options.workers) // options.batch) + len(sessions) - 1
    if options.keep_images:
        # they take megabytes each, and drawing takes far longer than predicting: one batch is drawn while the next
        # is decoded, and no other waits
        in_flight, ahead = 0, -(-options.workers // options.batch)
    # batches being decoded, the sessions' batches, and the one whose results are being built
    slots = ahead + 1 + in_flight + 1 + 1
    with ExitStack() as stack:
        try:
            opened = open_decoders(options, sessions[0].metadata.input_size, timer, slots=slots, rows=options.batch)
        except MemoryError as error:
            raise OutOfMemory(f"batches of {options.batch} images: {error}; use a smaller --batch") from None
        decoders = stack.enter_context(opened)
        for session in sessions:
            stack.enter_context(pinned(session, decoders.pixels))
        runners = [stack.enter_context(SessionRunner(predictor, timer)) for predictor in predictors]
        prepared = prefetch(
            (decoders.submit(batch) for batch in _batches(requests, options.batch)),
            ahead,
            lambda: timer.waiting("images"),
        )
        predicted = prefetch(
            # a loop variable or the tuples of zip would hold the last batch's images
            map(SessionRunner.submit, itertools.cycle(runners), prepared),
            in_flight,
            lambda: timer.waiting("session"),
        )
        for batch, predictor, outputs in predicted:
            results = predictor.build_results(batch.images, batch.pixels, outputs)[padding:]
            padding = 0
            batch.release()
            # only the results hold the images while they are drawn
            del batch
            if results:
                yield results
    if errors:
        raise errors[0]


Predicted: TypeAlias = tuple[PreparedBatch, BatchPredictor, Outputs | None]
Job: TypeAlias = tuple[PreparedBatch, Future[Predicted]]


class SessionRunner:
    """The thread of one session, which keeps up to `depth` batches in flight if the session allows it."""

    def __init__(
        self, predictor: BatchPredictor, timer: StageTimer, take: Callable[[bool], Job | None] | None = None
    ) -> None:
        """Start nothing yet; leaving the context drops the jobs that have not begun.

        Args:
            predictor: of the session.
            timer: receives the times of the stage `compute`.
            take: returns the next job, or None to end the thread; with False it must not wait, and raises `queue.Empty`
                if there is no job. None: the jobs come from `submit`.
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
            # its images may be drawn and freed before the next job arrives
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
            # it runs by itself, after those before it
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
    """Open a pool whose stages count under `role`; leaving drops queued work, so an interrupted run ends at once."""
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
        futures: each begins when it is taken.
        distance: number of futures.
        waiting: returns the context in which a result is awaited.

    Raises:
        OpalError: `futures` raised it; the results before were yielded.
    """

    def first_result() -> T:
        with waiting():
            return pending.popleft().result()

    pending: deque[Future[T]] = deque()
    errors: list[OpalError] = []
    try:
        for future in until_error(futures, errors):
            pending.append(future)
            # its result may be large, and must be freed after it was yielded
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
    """Yield items up to an OpalError, which is appended to `errors`, so that it can be raised after earlier results."""
    try:
        yield from items
    except OpalError as error:
        errors.append(error)


def _batches(requests: Iterator[InputImage], size: int) -> Iterator[Iterator[InputImage]]:
    """Yield iterators over batches, none empty; each must be read to its end before the next one is taken."""
    for first in requests:
        batch = itertools.chain([first], itertools.islice(requests, size - 1))
        # a frame of a video is large
        del first
        yield batch
