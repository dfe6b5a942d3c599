"""Run batches through sessions while the next images are decoded: the middle of `infer` and `Model.predict`.

A decoder pool prepares batches, a thread per session predicts them, and the thread that takes results builds these, all
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
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Protocol, Self, TypeAlias, TypeVar

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OpalError, OutOfMemory
from opal_deploy.predict.decoder_pool import DecoderPool, PreparedBatch, group_size
from opal_deploy.predict.prediction import BatchPredictor, count_in_flight
from opal_deploy.predict.types import InferenceOptions, Result
from opal_deploy.runtime.session import Session, pinned
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_PADDING = InputImage(None, b"", error=ImageError("padding", "keeps another image at its place in its batch"))


def predict_stream(
    images: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    timer: StageTimer = NO_OP_TIMER,
    print_message: Callable[[str], None] = lambda _: None,
) -> Generator[Result, None, None]:
    """Yield one result per image, in the order of the images; see `predict_batches`."""
    with (
        open_decoders(sessions, options, timer) as decoders,
        closing(predict_batches(images, sessions, options, decoders, timer, print_message)) as batches,
    ):
        for results in batches:
            yield from results


def open_decoders(
    sessions: Sequence[Session], options: InferenceOptions, timer: StageTimer = NO_OP_TIMER
) -> DecoderPool:
    """Return a decoder pool for `predict_batches` with the same arguments; raise OutOfMemory if it does not fit."""
    ahead, in_flight = _count_batches(sessions, options)
    # batches that are decoded, wait, or are predicted, and the one whose results are built
    slots, rows = ahead + 1 + in_flight + 1 + 1, 1 if options.one_at_a_time else options.batch
    try:
        return DecoderPool(options, sessions[0].metadata.input_size, timer, slots=slots, rows=rows)
    except MemoryError as error:
        raise OutOfMemory(f"batches of {options.batch} images: {error}; use a smaller --batch") from None


def predict_batches(
    images: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    decoders: DecoderPool,
    timer: StageTimer = NO_OP_TIMER,
    print_message: Callable[[str], None] = lambda _: None,
    *,
    first: int = 0,
) -> Generator[list[Result], None, None]:
    """Yield the results of one batch of images after the other, in the order of the images.

    Args:
        images: perhaps without end; read a bounded distance ahead. Every image that was read is predicted, so the loop
            can be stopped by ending `images`.
        sessions: of one model; batches go to them in turn.
        options: how images are decoded, batched and predicted.
        decoders: see `open_decoders`.
        timer: receives the times of every stage.
        print_message: receives a line, from any thread, when memory was short and batches become smaller.
        first: number of the first image in its run. Each image gets the place in its batch that it has in a run from
            number 0: at another place a runtime may compute another last bit of a logit.

    Raises:
        StoppedEarly: a device was lost; all results before its batch were yielded.
        OpalError: `images` raised it; all results before were yielded.
    """
    ahead, in_flight = _count_batches(sessions, options)
    size = 1 if options.one_at_a_time else options.batch
    errors: list[OpalError] = []
    padding = first % size
    images = itertools.chain(itertools.repeat(_PADDING, padding), until_error(images, errors))
    with ExitStack() as stack:
        for session in sessions:
            stack.enter_context(pinned(session, decoders.pixels))
        predictors = [BatchPredictor(session, options, timer, print_message) for session in sessions]
        runners = [stack.enter_context(SessionRunner(predictor, timer)) for predictor in predictors]
        batches = (decoders.submit(batch) for batch in _split(images, size))
        prepared = prefetch(batches, ahead, lambda: timer.waiting("images"))
        jobs = (runner.submit(batch) for runner, batch in zip(itertools.cycle(runners), prepared, strict=False))
        for batch, predictor, outputs in prefetch(jobs, in_flight, lambda: timer.waiting("session")):
            results = predictor.build_results(batch.images, batch.pixels, outputs)[padding:]
            padding = 0
            batch.release()
            if results:
                yield results
    if errors:
        raise errors[0]


def _count_batches(sessions: Sequence[Session], options: InferenceOptions) -> tuple[int, int]:
    """Return how many batches are decoded ahead of the one that is awaited, and how many the sessions hold."""
    if options.one_at_a_time:
        return 0, 0
    if options.keep_images:
        # they take megabytes each, and drawing takes far longer than predicting: one batch is drawn while the next
        # is decoded, and no other waits
        return -(-options.workers // options.batch), 0
    # every worker has a group in flight, and every session its next batch
    groups = options.workers * group_size(options.batch, options.workers)
    return -(-groups // options.batch) + len(sessions) - 1, sum(map(count_in_flight, sessions))


def _split(images: Iterator[InputImage], size: int) -> Iterator[Iterator[InputImage]]:
    """Yield iterators over batches, none empty; each must be read to its end before the next one is taken."""
    for first in images:
        yield itertools.chain([first], itertools.islice(images, size - 1))


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
            if self._in_flight and (len(self._in_flight) >= self._predictor.depth or self._predictor.is_awaited):
                self._collect()
                continue
            try:
                job = self._take(not self._in_flight)
            except queue.Empty:
                self._collect()
                continue
            if job is None:
                break
            batch, future = job
            if not self._left and future.set_running_or_notify_cancel():
                self._begin(batch, future)
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


class Pending(Protocol[T_co]):
    """A result that is being made, such as a Future."""

    def result(self) -> T_co:
        """Wait for the result, and return it or raise its exception."""
        ...

    def cancel(self) -> object:
        """Drop the work if it has not begun."""
        ...


def prefetch(
    pending: Iterator[Pending[T]], distance: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[T]:
    """Yield results in order, with at most `distance` begun beyond the one that is awaited.

    Args:
        pending: each begins when it is taken.
        distance: number of results.
        waiting: returns the context in which a result is awaited.

    Raises:
        OpalError: `pending` raised it; the results before were yielded.
    """

    def first_result() -> T:
        with waiting():
            return begun.popleft().result()

    begun: deque[Pending[T]] = deque()
    errors: list[OpalError] = []
    try:
        for item in until_error(pending, errors):
            begun.append(item)
            if len(begun) > distance:
                yield first_result()
        while begun:
            yield first_result()
        if errors:
            raise errors[0]
    finally:
        for item in begun:
            item.cancel()


def until_error(items: Iterable[T], errors: list[OpalError]) -> Iterator[T]:
    """Yield items up to an OpalError, which is appended to `errors`, so that it can be raised after earlier results."""
    try:
        yield from items
    except OpalError as error:
        errors.append(error)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let the garbage collector look through the records less often: they are freed without it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(20_000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
