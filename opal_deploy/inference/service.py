"""Answers for pictures that come one by one, from any thread: what a server is built on.

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

from opal_deploy.inference.decoding.gpu import open_decoders
from opal_deploy.inference.decoding.prepare import Prepared, Request
from opal_deploy.inference.executor import InferenceOptions
from opal_deploy.inference.explanation import explained
from opal_deploy.inference.prediction import BatchPredictor
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import source_name
from opal_deploy.records.record import Record
from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class _Job:
    prepared: Prepared
    future: Future[Record]


class Service:
    """Gathers pictures into batches as they come, and answers each with its record.

    A batch is as large as what waits when a session becomes free, up to `options.batch`; a picture that comes alone
    waits `max_wait` for company. Every method may be called from any thread; `close` ends its threads.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        options: InferenceOptions | None = None,
        *,
        max_wait: float = 0.005,
        capacity: int = 256,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start; `Model.serve` does.

        Args:
            sessions: of one model; each answers on a thread of its own.
            options: how pictures are prepared and answered.
            max_wait: seconds that a picture waits at most until its batch is full.
            capacity: pictures that were taken and are not answered yet.
            say: is told, from any thread, that memory was short and batches are smaller now.
        """
        options = InferenceOptions() if options is None else options
        self._batch, self._max_wait, self._capacity = options.batch, max_wait, capacity
        self._slots = threading.BoundedSemaphore(capacity)
        self._state = threading.Condition()
        self._closed, self._decoding = False, 0
        # as long as `capacity` at most: a picture holds its slot until it is answered
        self._ready: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._decoders = open_decoders(options, sessions[0].metadata.input_size, say=say)
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(BatchPredictor(session, options, say=say),),
                name=f"service-{index}",
                daemon=True,
            )
            for index, session in enumerate(sessions)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, image: Source, box: Box | None = None, *, wait: bool = True) -> Future[Record]:
        """Take one picture.

        Args:
            image: as `Model.explain` takes it. An array or a PIL image must not be changed until it is answered.
            box: to crop to first.
            wait: where `capacity` pictures are in work, wait until one is answered; else raise.

        Returns:
            A future of its record; that of an image that cannot be used is an error record. It raises StoppedEarly if
            the device was lost. It can be cancelled until its batch begins.

        Raises:
            queue.Full: `capacity` pictures are in work, and `wait` is False. RuntimeError: the service is closed.
        """
        if not self._slots.acquire(blocking=wait):
            raise queue.Full(f"{self._capacity} pictures are in work; try again later")
        try:
            with self._state:
                if self._closed:
                    raise RuntimeError("the service is closed")
                prepared = self._decoders.submit(Request(source_name(image), image, box))
                self._decoding += 1
        except BaseException:
            self._slots.release()
            raise
        future: Future[Record] = Future()
        prepared.add_done_callback(lambda done: self._decoded(done, future))
        return future

    def close(self) -> None:
        """Take no more pictures, answer those that were taken, end the threads. May be called more than once."""
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

    def _decoded(self, done: Future[Prepared], future: Future[Record]) -> None:
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

    def _work(self, answerer: BatchPredictor) -> None:
        while jobs := self._gathered():
            self._answer(answerer, jobs)
            # or a quiet service would keep its last pictures
            del jobs

    def _gathered(self) -> list[_Job]:
        """The next batch, waited for; empty once the service is closed and everything is answered."""
        jobs: list[_Job] = []
        until = 0.0
        while len(jobs) < self._batch:
            try:
                # what is there already is taken without waiting
                job = self._ready.get(timeout=max(0.0, until - time.monotonic()) if jobs else None)
            except queue.Empty:
                break
            if job is None:
                # for the other threads, and for this one's next round
                self._ready.put(None)
                break
            if not job.future.set_running_or_notify_cancel():
                self._slots.release()
                continue
            if not jobs:
                until = time.monotonic() + self._max_wait
            jobs.append(job)
        return jobs

    def _answer(self, answerer: BatchPredictor, jobs: list[_Job]) -> None:
        try:
            results = answerer.answer([job.prepared for job in jobs])
        except Exception as error:  # whatever it is, somebody waits for each of these, and the next may do better
            for job in jobs:
                self._slots.release()
                job.future.set_exception(error)
            return
        for job, result in zip(jobs, results, strict=True):
            self._slots.release()
            job.future.set_result(explained(result.record))
