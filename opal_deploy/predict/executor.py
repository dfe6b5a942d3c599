"""Run batches through sessions while the next images are decoded: the middle of `infer` and `Model.predict`.

A decoder pool prepares batches, a thread per session predicts them, and the thread that takes results builds these, all
in input order. Every queue is bounded, so memory does not grow with the number of images: until a result is taken, only
a fixed number of images is read, decoded and predicted.

A record does not depend on the other images. An image with an error keeps its place in the batch as a blank image, so
that the others are computed exactly as next to a good one. Where a runtime's last bits depend on the batch size, every
forward pass can be filled up to one size (`InferenceOptions.fixed_batch`).
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any, Protocol, Self, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ImageError, OpalError, OutOfMemory
from opal_deploy.predict.decoder_pool import DecoderPool, PreparedBatch, group_size
from opal_deploy.predict.prepare import InferenceOptions, Pixels, Prepared, Result
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo, build_records, error_record
from opal_deploy.records.record import Answered
from opal_deploy.runtime.session import PaddingSession, PipelinedSession, Session, pinned
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER, StageTimer

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_PADDING = InputImage(None, b"", error=ImageError("padding", "keeps another image at its place in its batch"))


def predict_stream(
    images: Iterable[InputImage], sessions: Sequence[Session], options: InferenceOptions
) -> Generator[Result, None, None]:
    """Yield one result per image, in the order of the images; see `predict_batches`."""
    with (
        open_decoders(sessions, options) as decoders,
        closing(predict_batches(images, sessions, options, decoders)) as batches,
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
        return DecoderPool(options, sessions[0].metadata.form, timer, slots=slots, rows=rows)
    except MemoryError as error:
        raise OutOfMemory(f"batches of {options.batch} images: {error}; use a smaller --batch") from None


def predict_batches(
    images: Iterable[InputImage],
    sessions: Sequence[Session],
    options: InferenceOptions,
    decoders: DecoderPool,
    timer: StageTimer = NO_OP_TIMER,
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
        first: number of the first image in its run. Each image gets the place in its batch that it has in a run from
            number 0: at another place a runtime may compute another last bit of a logit.

    Raises:
        StoppedEarly: a device was lost, or its memory is full; all results before its batch were yielded.
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
        predictors = [BatchPredictor(session, options, timer) for session in sessions]
        runners = [stack.enter_context(SessionRunner(predictor, timer)) for predictor in predictors]
        batches = (decoders.submit(batch) for batch in _split(images, size))
        prepared = prefetch(batches, ahead, lambda: timer.waiting("images"))
        jobs = (runner.submit(batch) for runner, batch in zip(itertools.cycle(runners), prepared, strict=False))
        for batch, predictor, outputs in prefetch(jobs, in_flight, lambda: timer.waiting("session")):
            results = predictor.build_results(batch.images, outputs)[padding:]
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
    return -(-groups // options.batch) + len(sessions) - 1, sum(map(_count_in_flight, sessions))


def _split(images: Iterator[InputImage], size: int) -> Iterator[Iterator[InputImage]]:
    """Yield iterators over batches, none empty; each must be read to its end before the next one is taken."""
    for first in images:
        yield itertools.chain([first], itertools.islice(images, size - 1))


class BatchPredictor:
    """A session that predicts batches; `build_results` needs no session, so that another thread can build records.

    Attributes:
        depth: maximum batches in flight between `submit` and the call of what it returned.
    """

    def __init__(self, session: Session, options: InferenceOptions, timer: StageTimer = NO_OP_TIMER) -> None:
        """Load and run nothing yet; `timer` receives the times of the stages `compute` and `evidence`."""
        self._session, self._options, self._timer = session, options, timer
        self._pipelined = session if isinstance(session, PipelinedSession) else None
        self.depth = _count_in_flight(session)
        # only a session whose outputs depend on the batch size, as ONNX Runtime's on a GPU, needs full batches
        self._fixed_batch = options.fixed_batch and not getattr(session, "batch_invariant", False)
        self._in_flight = 0
        with _LOCKS_LOCK:
            self._lock = _LOCKS.setdefault(session, threading.Lock())
        if self._fixed_batch and isinstance(session, PaddingSession):
            with self._lock:
                session.add_batch_size(options.batch)

    def submit(self, images: Sequence[Prepared], pixels: Pixels) -> Callable[[], Outputs | None]:
        """Begin a batch, and return a function that waits for its outputs: one row per image, None if all have errors.

        The functions are called in order, on the same thread. Until then no other predictor uses the session.

        Args:
            images: at most `options.batch`.
            pixels: uint8 [rows, H0, W0, 3], the images' rows first; later rows may be overwritten. They must not change
                until the outputs are there.

        Raises:
            OutOfMemory: the batch does not fit. StoppedEarly: the device was lost. The function raises both, too.
        """
        if all(image.error is not None for image in images):
            return lambda: None
        batch = self._fill(pixels, len(images))
        if self._pipelined is None:
            with self._timer.stage("compute"), self._lock, self._named_batch(len(batch)):
                outputs = self._session.run(batch).rows(0, len(images))
            return lambda: outputs
        session = self._pipelined
        if not self._in_flight:
            self._lock.acquire()
        self._in_flight += 1
        try:
            with self._named_batch(len(batch)):
                handle = session.submit(batch)
        except BaseException:
            self._count_collected()
            raise

        def collect() -> Outputs:
            try:
                with self._timer.stage("compute"), self._named_batch(len(batch)):
                    return session.collect(handle).rows(0, len(images))
            finally:
                self._count_collected()

        return collect

    def _count_collected(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._lock.release()

    @contextmanager
    def _named_batch(self, size: int) -> Iterator[None]:
        """Raise OutOfMemory with what helps if memory is short."""
        try:
            yield
        except (OutOfMemory, MemoryError) as error:
            reason = str(error).partition(";")[0] or type(error).__name__
            raise OutOfMemory(
                f"{self._session.description}: out of memory with a batch of {size} ({reason}); give a smaller --batch"
            ) from None

    def _fill(self, pixels: Pixels, count: int) -> Pixels:
        """Return `count` rows of a batch, filled up with blank images if the session needs one size."""
        if not self._fixed_batch:
            return pixels[:count]
        size = self._options.batch
        rows = pixels[:size]
        if len(rows) < size:
            rows = np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])
        rows[count:] = 0
        return rows

    def build_results(self, part: Sequence[Prepared], outputs: Outputs | None) -> list[Result]:
        """Return the result of each image from its row of `outputs`, see `submit`."""
        options, results = self._options, []
        with self._timer.stage("evidence"):
            # half precision overflows for some images, and JSON has no NaN
            finite = [True] * len(part) if outputs is None else outputs.rows(0, len(part)).is_finite().tolist()
            not_finite = ImageError("not_finite", "the model's logits for it are NaN or infinite")
            errors = [image.error or (None if fits else not_finite) for image, fits in zip(part, finite, strict=True)]
            infos = [
                ImageInfo(prepared.input.name, cast(Geometry, prepared.geometry), self._list_fields(prepared))
                for prepared in part
            ]
            answered = [row for row, error in enumerate(errors) if error is None]
            records: list[Answered] = []
            if outputs is not None and answered:
                records = build_records(
                    [infos[row] for row in answered], outputs.take(answered), self._session.metadata, top=options.top,
                    decision=options.decision, slot_names=options.slot_names,
                )  # fmt: skip
            built = dict(zip(answered, records, strict=True))
            for row, (prepared, info, error) in enumerate(zip(part, infos, errors, strict=True)):
                if error is not None:
                    failed = error_record(info.name, error.code, str(error), **info.fields)
                    results.append(Result(failed, prepared))
                    continue
                assert outputs is not None
                # a drawing shows shares
                is_kept = options.keep_outputs or (options.keep_images and outputs.shares is not None)
                results.append(Result(built[row], prepared, outputs.rows(row, row + 1) if is_kept else None))
        return results

    def _list_fields(self, prepared: Prepared) -> dict[str, Any]:
        """Return the fields of an image's record that neither its name nor the model says."""
        image, frame = prepared.input, prepared.input.frame
        return {
            "image_index": image.index, "label": image.label, "detection": image.detection,
            "image_sha256": prepared.image_sha256, "model_sha256": self._options.model_sha256,
            **({} if frame is None else {"frame": frame.index, "time": frame.seconds}),
        }  # fmt: skip


def _count_in_flight(session: Session) -> int:
    """Return how many batches a session may hold at a time."""
    return session.depth if isinstance(session, PipelinedSession) else 1


# only one predictor at a time uses a session
_LOCKS: WeakKeyDictionary[Session, threading.Lock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()

Predicted: TypeAlias = tuple[PreparedBatch, BatchPredictor, Outputs | None]
Job: TypeAlias = tuple[PreparedBatch, Future[Predicted]]


class SessionRunner:
    """The thread of one session, which keeps up to `depth` batches in flight if the session allows it."""

    def __init__(
        self, predictor: BatchPredictor, timer: StageTimer, take: Callable[[bool], Job | None] | None = None
    ) -> None:
        """Start nothing yet; leaving the context drops the jobs that have not begun.

        Args:
            predictor, timer: of the session; receives the times of the stage `compute`.
            take: returns the next job, or None to end the thread; with False it must not wait, and raises `queue.Empty`
                if there is no job. None: the jobs come from `submit`.
        """
        self._predictor, self._timer = predictor, timer
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._take = take or self._jobs.get
        self._in_flight: deque[tuple[Callable[[], Outputs | None], PreparedBatch, Future[Predicted]]] = deque()
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
            if len(self._in_flight) >= self._predictor.depth:
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
            self._in_flight.append((self._predictor.submit(batch.images, batch.pixels), batch, future))
        except BaseException as error:  # somebody waits for the future
            future.set_exception(error)

    def _collect(self) -> None:
        collect, batch, future = self._in_flight.popleft()
        try:
            outputs = collect()
        except BaseException as error:  # somebody waits for the future
            future.set_exception(error)
        else:
            future.set_result((batch, self._predictor, outputs))


class Pending(Protocol[T_co]):
    """A result that is being made, such as a Future: `result` waits for it, `cancel` drops work that has not begun."""

    def result(self) -> T_co: ...

    def cancel(self) -> object: ...


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
