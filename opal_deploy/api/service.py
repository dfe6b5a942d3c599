"""A service that classifies images as they arrive, from any thread: for servers to build on.

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
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from opal_deploy.api.explanation import Explanation
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.predict.decoder_pool import DecoderPool, PendingBatch, PixelSlots, PreparedBatch
from opal_deploy.predict.executor import BatchPredictor, Job, Predicted, SessionRunner
from opal_deploy.predict.prepare import InferenceOptions, Pixels, Prepared, Result
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import source_name
from opal_deploy.runtime.session import Session, SplitSession, check_batch, pinned
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import NO_OP_TIMER

T = TypeVar("T")
# stands for an image that came as pixels and gets no record
_PIXELS = Prepared(InputImage(None, b""))


@dataclass(frozen=True)
class _Image:
    """One image that is ready for a batch since `since`, by `time.monotonic`.

    `future` gets what `convert` returns for the result, or without `convert` the image's row of the outputs.
    """

    future: Future[Any]
    convert: Callable[[Result], Any] | None
    prepared: Prepared
    pixels: Pixels  # uint8 [H0, W0, 3]
    release: Callable[[], None] = lambda: None
    since: float = field(default_factory=time.monotonic)


class Service(AbstractContextManager["Service"]):
    """Gathers images into batches as they arrive, and turns each into its record.

    A batch holds a session's share of the images in flight, up to `options.batch`; an image waits up to `max_wait` for
    others. On a GPU, full batches are added while others are in flight. On a CPU with at least one image per core, each
    core runs its own batch. Image files and pixels share batches. Every method may be called from any thread.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        options: InferenceOptions | None = None,
        *,
        max_wait: float = 0.005,
        capacity: int = 256,
        observe: Callable[[str, Sequence[float]], None] = lambda stage, seconds: None,
    ) -> None:
        """Start the threads; `Model.serve` calls this.

        Args:
            sessions: of one model; each has its own thread, and a `SplitSession` one per core.
            options: how images are decoded, batched and predicted.
            max_wait: maximum seconds that an image waits for others in flight to fill its batch.
            capacity: maximum images in flight, from `submit` to their record.
            observe: receives stages and seconds, from any thread: `prepare` per image, `queue` for the images of a
                batch, `compute` per batch.
        """
        options = InferenceOptions() if options is None else options
        self.metadata, self.capacity = sessions[0].metadata, capacity
        self._batch, self._max_wait, self._observe = options.batch, max_wait, observe
        self._state = threading.Condition()
        self._closed, self._in_flight = False, 0
        # None ends the sessions' threads. In Python 3.11, SimpleQueue's get with a timeout may wait for ever
        self._ready: queue.Queue[_Image | None] = queue.Queue()
        self._gathering = threading.Lock()
        predictors: list[BatchPredictor] = []
        for session in sessions:
            cores = session.split(lambda n: self._in_flight >= n) if isinstance(session, SplitSession) else [session]
            predictors += [BatchPredictor(core, options) for core in cores]
        self._runners = len(predictors)
        with ExitStack() as stack:
            # per session the batches in flight and the one being gathered
            count = sum(predictor.depth + 1 for predictor in predictors)
            self._slots = PixelSlots(count, options.batch, self.metadata.input_size, shared=False)
            for session in sessions:
                stack.enter_context(pinned(session, self._slots.pixels))
            self._decoders = stack.enter_context(DecoderPool(options, self.metadata.form, slots=capacity, rows=1))
            for predictor in predictors:
                stack.enter_context(SessionRunner(predictor, NO_OP_TIMER, self._take_batch))
            self._resources = stack.pop_all()

    @property
    def in_flight(self) -> int:
        """The number of images in flight, at most `capacity`."""
        return self._in_flight

    def submit(self, image: Source, box: Box | None = None, *, wait: bool = True) -> Future[Explanation]:
        """Begin to classify one image, and return a future of its record.

        An image that cannot be classified has an error record. The future raises StoppedEarly if the device was lost,
        and can be cancelled until the image's batch begins.

        Args:
            image: a path, a file's bytes, a PIL image, or uint8 [H, W, 3] RGB. An array or a PIL image must not change
                until the future is done.
            box: (x0, y0, x1, y1) to crop to first, in pixels of the whole oriented image.
            wait: if `capacity` images are in flight, wait for one to finish; else raise.

        Raises:
            queue.Full: `capacity` images are in flight, and `wait` is False. RuntimeError: the service is closed.
        """
        request = InputImage(source_name(image), image, box)
        return self.submit_requests([request], lambda result: Explanation(result.record), wait=wait)[0]

    def submit_requests(
        self, requests: Sequence[InputImage], convert: Callable[[Result], T], *, wait: bool = True
    ) -> list[Future[T]]:
        """Begin to classify images, all or none; return futures of converted results; raise as `submit_pixels`."""
        self._acquire(len(requests), wait=wait)
        futures: list[Future[T]] = [Future() for _ in requests]
        submitted = time.monotonic()
        for request, future in zip(requests, futures, strict=True):
            # an image that is cancelled while it waits for a decoder is not decoded
            prepared = self._decoders.submit([request], future.cancelled)
            prepared.add_done_callback(partial(self._add_ready, future, convert, submitted))
        return futures

    def submit_pixels(self, pixels: Pixels, *, wait: bool = True) -> list[Future[Outputs]]:
        """Begin to compute the outputs of prepared images, all or none; return a future of each row, N = 1.

        Args:
            pixels: uint8 [N, H0, W0, 3] RGB of the model's input size, which must not change until all are done.
            wait: as for `submit`.

        Raises:
            ValueError: another shape or dtype, or more than `capacity` images. The errors of `submit`.
        """
        check_batch(pixels, self.metadata)
        self._acquire(len(pixels), wait=wait)
        futures: list[Future[Outputs]] = [Future() for _ in pixels]
        for row, future in zip(pixels, futures, strict=True):
            self._ready.put(_Image(future, None, _PIXELS, row))
        return futures

    def close(self) -> None:
        """Refuse new images, finish those in flight, and end the threads. May be called more than once."""
        with self._state:
            self._closed = True
            self._state.notify_all()
            self._state.wait_for(lambda: not self._in_flight)
        self._ready.put(None)
        self._resources.close()

    def __exit__(self, *details: object) -> None:
        self.close()

    def _acquire(self, images: int, *, wait: bool) -> None:
        if images > self.capacity:
            raise ValueError(f"{images} images found; expected at most {self.capacity}")
        with self._state:
            if not wait and self._in_flight + images > self.capacity:
                raise queue.Full(f"{self._in_flight} images are in flight")
            self._state.wait_for(lambda: self._closed or self._in_flight + images <= self.capacity)
            if self._closed:
                raise RuntimeError("the service is closed")
            self._in_flight += images

    def _give_back(self, images: int) -> None:
        with self._state:
            self._in_flight -= images
            self._state.notify_all()

    def _add_ready(
        self, future: Future[Any], convert: Callable[[Result], Any], submitted: float, pending: PendingBatch
    ) -> None:
        try:
            batch = pending.result()
        except BaseException as error:
            # not the image's fault: its decoder could not be started, or the image was cancelled
            self._give_back(1)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        self._observe("prepare", [time.monotonic() - submitted])
        self._ready.put(_Image(future, convert, batch.images[0], batch.pixels[0], batch.release))

    def _take_batch(self, wait: bool) -> Job | None:
        """Return a session's next batch, None after the end; raise `queue.Empty` if none is full and not `wait`."""
        images = self._gather(wait)
        if not images:
            return None
        now = time.monotonic()
        self._observe("queue", [now - image.since for image in images])
        slot = self._slots.acquire()
        pixels = self._slots.pixels[slot]
        for row, image in enumerate(images):
            pixels[row] = image.pixels
            image.release()
        batch = PreparedBatch(tuple(image.prepared for image in images), pixels, partial(self._slots.release, slot))
        predicted: Future[Predicted] = Future()
        predicted.add_done_callback(partial(self._answer, images, batch, now))
        return batch, predicted

    def _gather(self, wait: bool) -> list[_Image]:
        """Return the images of the next batch, in the order in which they became ready; none after the end."""
        # a busy device lets the batch grow, and its answers do not wait for the lock of one that waits for images
        if (not wait and self._ready.qsize() < self._batch) or not self._gathering.acquire(blocking=wait):
            raise queue.Empty
        images: list[_Image] = []
        try:
            # no waiting for images that are not in flight, nor for those that the other threads will take
            while len(images) < self._batch and not (images and len(images) * self._runners >= self._in_flight):
                seconds = max(0.0, images[0].since + self._max_wait - time.monotonic()) if images else None
                image = self._ready.get(wait, seconds)
                if image is None:
                    # ends the other sessions' threads
                    self._ready.put(None)
                    break
                if image.future.set_running_or_notify_cancel():
                    images.append(image)
                else:
                    image.release()
                    self._give_back(1)
        except queue.Empty:
            if not images:
                raise
        finally:
            self._gathering.release()
        return images

    def _answer(self, images: list[_Image], batch: PreparedBatch, since: float, done: Future[Predicted]) -> None:
        """Set the futures of a batch's images."""
        self._observe("compute", [time.monotonic() - since])
        answers: list[Any]
        try:
            _, predictor, outputs = done.result()
            files = [row for row, image in enumerate(images) if image.convert is not None]
            taken = None if outputs is None else outputs.take(files)
            results = iter(predictor.build_results([batch.images[row] for row in files], taken))
            answers = [
                # pixels have no error, so there are outputs
                cast(Outputs, outputs).rows(row, row + 1) if image.convert is None else image.convert(next(results))
                for row, image in enumerate(images)
            ]
        except Exception as error:  # each future has a reader, and the next batch may succeed
            answers = [error] * len(images)
        batch.release()
        self._give_back(len(images))
        for image, answer in zip(images, answers, strict=True):
            if isinstance(answer, Exception):
                image.future.set_exception(answer)
            else:
                image.future.set_result(answer)
