"""A service that classifies images as they come, one by one, from any thread: for servers to build on.

>>> with opal_deploy.load("model.onnx").serve(batch=8) as service:  # doctest: +SKIP
...     record = service.submit("bird.jpg").result()

In asyncio: `record = await asyncio.wrap_future(service.submit(data, wait=False))`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import OutOfMemory, StoppedEarly
from opal_deploy.inference.decoding.pool import DecoderPool
from opal_deploy.inference.decoding.slots import PreparedBatch
from opal_deploy.inference.explanation import to_explanation
from opal_deploy.inference.prediction import BatchPredictor
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Pixels, Prepared, Request, Result
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import source_name
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import Session, check_batch

T = TypeVar("T")
# stands for an image that came as pixels: there is nothing to decode, and no record is built of it
_PIXELS = Prepared(Request(None, b""))


def _nothing() -> None:
    """Release nothing: the pixels belong to the caller."""


@dataclass(frozen=True)
class _Job:
    """One image that is ready for a batch, and the future of its answer.

    Attributes:
        future: of what `convert` makes of the result; of the image's row of the outputs where `convert` is None.
        image: what is known of the image.
        pixels: uint8 [1, H0, W0, 3].
        release: gives the memory of the pixels back.
        convert: makes the future's value of the result; None: no record is wanted.
        since: when the image was ready, by `time.monotonic`.
    """

    future: Future[Any]
    image: Prepared
    pixels: Pixels
    release: Callable[[], None]
    convert: Callable[[Result], Any] | None
    since: float = field(default_factory=time.monotonic)


class ServiceObserver:
    """Is told what a service does; every method may be called from any thread. This one takes no notice."""

    def prepared(self, seconds: float) -> None:
        """An image was read, decoded and resized so many seconds after it was submitted."""

    def batch_began(self, waited: Sequence[float]) -> None:
        """A batch begins, whose images have waited so many seconds each since they were ready."""

    def device_lost(self, error: StoppedEarly) -> None:
        """A session can compute nothing more."""


class Service:
    """Threads that gather images into batches as they come, and turn each into its record.

    A batch holds the images that wait when a session becomes free, up to `options.batch`; an image that comes alone
    waits up to `max_wait` for others. Images that come as files and images that come as pixels share batches. Every
    method may be called from any thread; `close` ends the threads.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        options: InferenceOptions | None = None,
        *,
        max_wait: float = 0.005,
        capacity: int = 256,
        timer: StageTimer = NO_OP_TIMER,
        observer: ServiceObserver | None = None,
        print_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the threads; `Model.serve` calls this.

        Args:
            sessions: of one model; each runs on a thread of its own.
            options: how images are decoded, batched and predicted.
            max_wait: seconds that an image waits at most until its batch is full.
            capacity: images that may be in work, from `submit` to their record.
            timer: gets the times of every stage.
            observer: is told of every batch.
            print_message: is called, from any thread, when memory was short and batches are smaller from then on.
        """
        options = InferenceOptions() if options is None else options
        self.metadata = sessions[0].metadata
        self.capacity = capacity
        self._batch, self._max_wait = options.batch, max_wait
        self._observer = observer or ServiceObserver()
        self._state = threading.Condition()
        self._closed, self._decoding, self._in_flight = False, 0, 0
        # as long as `capacity` at most: an image holds its place until its answer is there
        self._ready: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._decoders = DecoderPool(options, self.metadata.input_size, timer, slots=capacity, rows=1)
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(BatchPredictor(session, options, timer, print_message),),
                name=f"service-{index}",
                daemon=True,
            )
            for index, session in enumerate(sessions)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def in_flight(self) -> int:
        """The number of images in work, `capacity` at most."""
        return self._in_flight

    def submit(self, image: Source, box: Box | None = None, *, wait: bool = True) -> Future[Record]:
        """Begin to classify one image.

        Args:
            image: a path, a file's bytes, a PIL image, or uint8 [H, W, 3] RGB. An array or a PIL image must not be
                changed until the future is done.
            box: (x0, y0, x1, y1) to crop to first, in pixels of the whole oriented image.
            wait: where `capacity` images are in work, wait until one is done; else raise.

        Returns:
            A future of its record; an image that cannot be classified has an error record. It raises StoppedEarly if
            the device was lost. It can be cancelled until its batch begins.

        Raises:
            queue.Full: `capacity` images are in work, and `wait` is False. RuntimeError: the service is closed.
        """
        request = Request(source_name(image), image, box)
        return self._submit([request], lambda result: to_explanation(result.record), wait=wait)[0]

    def submit_requests(self, requests: Sequence[Request], *, wait: bool = True) -> list[Future[Result]]:
        """Begin to classify images, all or none of them; return a future of each result. See `submit`.

        Raises:
            ValueError: more than `capacity` images. The errors of `submit`.
        """
        return self._submit(requests, lambda result: result, wait=wait)

    def submit_pixels(self, pixels: Pixels, *, wait: bool = True) -> list[Future[Outputs]]:
        """Begin to compute the outputs of images that are prepared already, all or none of them.

        Args:
            pixels: uint8 [N, H0, W0, 3], RGB, of the model's input size, which must not be changed until all is done.
            wait: as `submit`.

        Returns:
            A future of each image's row of the outputs, N = 1.

        Raises:
            ValueError: another shape or dtype, or more than `capacity` images. The errors of `submit`.
        """
        check_batch(pixels, self.metadata)
        self._acquire(len(pixels), wait=wait)
        futures: list[Future[Outputs]] = [Future() for _ in pixels]
        with self._state:
            if self._closed:
                self._give_back(len(pixels))
                raise RuntimeError("the service is closed")
            for row, future in enumerate(futures):
                self._ready.put(_Job(future, _PIXELS, pixels[row : row + 1], _nothing, None))
        return futures

    def close(self) -> None:
        """Refuse new images, finish those in work, and end the threads. May be called more than once."""
        with self._state:
            first, self._closed = not self._closed, True
            self._state.notify_all()
            self._state.wait_for(lambda: not self._decoding)
        if first:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()
        self._decoders.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, requests: Sequence[Request], convert: Callable[[Result], T], *, wait: bool) -> list[Future[T]]:
        self._acquire(len(requests), wait=wait)
        futures: list[Future[T]] = []
        begun: list[Future[PreparedBatch]] = []
        submitted = time.monotonic()
        try:
            with self._state:
                if self._closed:
                    raise RuntimeError("the service is closed")
                for request in requests:
                    future: Future[T] = Future()
                    # what is cancelled while it waits for a decoder is not decoded
                    begun.append(self._decoders.submit([request], future.cancelled))
                    futures.append(future)
                    self._decoding += 1
        except BaseException:
            self._give_back(len(requests) - len(begun))
            raise
        finally:
            for prepared, future in zip(begun, futures, strict=True):
                prepared.add_done_callback(
                    lambda done, future=future: self._decoded(done, future, convert, submitted)  # type: ignore[misc]
                )
        return futures

    def _acquire(self, images: int, *, wait: bool) -> None:
        """Take places for so many images."""
        if images > self.capacity:
            raise ValueError(f"{images} images found; expected at most {self.capacity}")
        with self._state:
            if not wait and self._in_flight + images > self.capacity:
                raise queue.Full(f"{self._in_flight} images are in flight")
            self._state.wait_for(lambda: self._closed or self._in_flight + images <= self.capacity)
            if self._closed:
                raise RuntimeError("the service is closed")
            self._in_flight += images

    def _give_back(self, images: int = 1) -> None:
        with self._state:
            self._in_flight -= images
            self._state.notify_all()

    def _decoded(
        self,
        done: Future[PreparedBatch],
        future: Future[Any],
        convert: Callable[[Result], Any],
        submitted: float,
    ) -> None:
        error = done.exception()
        if error is None:
            batch = done.result()
            self._observer.prepared(time.monotonic() - submitted)
            self._ready.put(_Job(future, batch.images[0], batch.pixels, batch.release, convert))
        else:
            # not the image's fault: its decoder could not be started, or it was cancelled
            self._give_back()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        with self._state:
            self._decoding -= 1
            self._state.notify_all()

    def _work(self, predictor: BatchPredictor) -> None:
        while jobs := self._gather_batch():
            self._predict(predictor, jobs)
            # or a quiet service would keep its last images
            del jobs

    def _gather_batch(self) -> list[_Job]:
        """Wait for the next batch and return it; empty once the service is closed and everything is done."""
        jobs: list[_Job] = []
        deadline = 0.0
        while len(jobs) < self._batch:
            try:
                # images that are there already are taken without waiting
                job = self._ready.get(timeout=max(0.0, deadline - time.monotonic()) if jobs else None)
            except queue.Empty:
                break
            if job is None:
                # for the other threads, and for this one's next round
                self._ready.put(None)
                break
            if not job.future.set_running_or_notify_cancel():
                job.release()
                self._give_back()
                continue
            if not jobs:
                deadline = time.monotonic() + self._max_wait
            jobs.append(job)
        return jobs

    def _predict(self, predictor: BatchPredictor, jobs: list[_Job]) -> None:
        now = time.monotonic()
        self._observer.batch_began([now - job.since for job in jobs])
        try:
            answers = self._compute(predictor, jobs)
        except Exception as error:  # a caller waits for each of these futures, and the next batch may succeed
            if isinstance(error, StoppedEarly) and not isinstance(error, OutOfMemory):
                self._observer.device_lost(error)
            self._give_back(len(jobs))
            for job in jobs:
                job.future.set_exception(error)
            return
        self._give_back(len(jobs))
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(answer)

    def _compute(self, predictor: BatchPredictor, jobs: list[_Job]) -> list[Any]:
        """Return what the future of each job gets."""
        images = [job.image for job in jobs]
        try:
            # images that came one by one become a batch here
            pixels = np.concatenate([job.pixels for job in jobs])
        finally:
            for job in jobs:
                job.release()
        outputs = predictor.run(images, pixels)
        answers: list[Any] = [
            outputs.rows(row, row + 1) if outputs is not None and job.convert is None else None
            for row, job in enumerate(jobs)
        ]
        rows = [row for row, job in enumerate(jobs) if job.convert is not None]
        if rows:
            taken = None if outputs is None else outputs.take(rows)
            part = pixels if len(rows) == len(jobs) else pixels[rows]
            results = predictor.build_results([images[row] for row in rows], part, taken)
            for row, result in zip(rows, results, strict=True):
                convert = jobs[row].convert
                assert convert is not None  # one of `rows`
                answers[row] = convert(result)
        return answers
