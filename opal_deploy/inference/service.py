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
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from opal_deploy.inference.decoding.pool import DecoderPool
from opal_deploy.inference.decoding.slots import PreparedBatch
from opal_deploy.inference.explanation import to_explanation
from opal_deploy.inference.prediction import BatchPredictor
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import source_name
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class _Job:
    """A prepared image, alone in its slot, and the future of its record."""

    prepared: PreparedBatch
    future: Future[Record]


class Service:
    """Threads that gather images into batches as they come, and turn each into its record.

    A batch holds the images that wait when a session becomes free, up to `options.batch`; an image that comes alone
    waits up to `max_wait` for others. Every method may be called from any thread; `close` ends the threads.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        options: InferenceOptions | None = None,
        *,
        max_wait: float = 0.005,
        capacity: int = 256,
        print_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the threads; `Model.serve` calls this.

        Args:
            sessions: of one model; each runs on a thread of its own.
            options: how images are decoded, batched and predicted.
            max_wait: seconds that an image waits at most until its batch is full.
            capacity: images that may be in work, from `submit` to their record.
            print_message: is called, from any thread, when memory was short and batches are smaller from then on.
        """
        options = InferenceOptions() if options is None else options
        self._batch, self._max_wait, self._capacity = options.batch, max_wait, capacity
        self._slots = threading.BoundedSemaphore(capacity)
        self._state = threading.Condition()
        self._closed, self._decoding = False, 0
        # as long as `capacity` at most: an image holds its slot until its record is there
        self._ready: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._decoders = DecoderPool(options, sessions[0].metadata.input_size, slots=capacity, rows=1)
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(BatchPredictor(session, options, print_message=print_message),),
                name=f"service-{index}",
                daemon=True,
            )
            for index, session in enumerate(sessions)
        ]
        for thread in self._threads:
            thread.start()

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
        if not self._slots.acquire(blocking=wait):
            raise queue.Full(f"{self._capacity} images are in work; try again later")
        try:
            with self._state:
                if self._closed:
                    raise RuntimeError("the service is closed")
                prepared = self._decoders.submit([Request(source_name(image), image, box)])
                self._decoding += 1
        except BaseException:
            self._slots.release()
            raise
        future: Future[Record] = Future()
        prepared.add_done_callback(lambda done: self._decoded(done, future))
        return future

    def close(self) -> None:
        """Refuse new images, finish those in work, and end the threads. May be called more than once."""
        with self._state:
            first, self._closed = not self._closed, True
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

    def _decoded(self, done: Future[PreparedBatch], future: Future[Record]) -> None:
        error = done.exception()
        if error is None:
            self._ready.put(_Job(done.result(), future))
        else:
            # not the image's fault: its decoder could not be started
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            self._slots.release()
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
                job.prepared.release()
                self._slots.release()
                continue
            if not jobs:
                deadline = time.monotonic() + self._max_wait
            jobs.append(job)
        return jobs

    def _predict(self, predictor: BatchPredictor, jobs: list[_Job]) -> None:
        try:
            # images decoded one by one become a batch here
            images = [image for job in jobs for image in job.prepared.images]
            try:
                pixels = np.concatenate([job.prepared.pixels for job in jobs])
            finally:
                for job in jobs:
                    job.prepared.release()
            results = predictor.build_results(images, pixels, predictor.run(images, pixels))
        except Exception as error:  # a caller waits for each of these futures, and the next batch may succeed
            for job in jobs:
                self._slots.release()
                job.future.set_exception(error)
            return
        for job, result in zip(jobs, results, strict=True):
            self._slots.release()
            job.future.set_result(to_explanation(result.record))
