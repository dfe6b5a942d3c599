"""Decoders that give plain JPEG files to a GPU, in batches, and everything else to decoders on the CPU.

Files are read, hashed and looked at by threads of their own; one thread a GPU takes what waits, decodes and resizes it.
What the GPU is not given, or refuses, is prepared as without one, so that an image's errors are the same on every path.
A GPU whose decoding fails, or is out of memory with a single picture, costs its speed and no image: the run goes on on
the CPU, and says so.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

from opal_deploy.pipeline.decoding.prepare import KEEP_PIXELS, Prepared, Request, read_whole
from opal_deploy.pipeline.decoding.reading import opener
from opal_deploy.pipeline.decoding.workers import DecoderOptions, DecoderPool, Decoders
from opal_deploy.pipeline.stages import NO_CLOCK, StageClock
from opal_deploy.preprocess.gpu import GpuDecoder, Jpeg, is_out_of_memory, read_header

if TYPE_CHECKING:
    import torch

# one call of the codec: as many files, and as many of their pixels (300 MB once decoded), at most
_MOST_FILES, _MOST_PIXELS = 64, 100_000_000


@dataclass(frozen=True)
class _Job:
    """A file that waits for a GPU."""

    request: Request
    file: Jpeg
    sha256: str | None
    future: Future[Prepared]


class GpuOptions(DecoderOptions, Protocol):
    """What `open_decoders` reads of its options.

    Attributes:
        gpus: decode plain JPEG files; none: the CPU decodes everything.
    """

    @property
    def gpus(self) -> Sequence[GpuDecoder]: ...


class GpuDecoders:
    """What `Decoders` is, with a GPU or several; a context manager."""

    def __init__(
        self,
        gpus: Sequence[GpuDecoder],
        options: DecoderOptions,
        input_size: tuple[int, int],
        clock: StageClock = NO_CLOCK,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start.

        Args:
            gpus: one or more; each is used by a thread of its own.
            options: of the decoders on the CPU, too; `workers` files are read at a time. Neither `isolate` nor
                `decode_timeout` holds for what a GPU decodes.
            input_size: (H0, W0).
            clock: is told what the stages take, under the station `decoders`.
            say: is told, from any thread, that a GPU failed or has too little memory.
        """
        self._options, self._input_size, self._clock, self._say = options, input_size, clock, say
        self._cpu = Decoders(options, input_size, clock)
        self._readers = ThreadPoolExecutor(options.workers, "read", initializer=clock.join, initargs=("decoders",))
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(gpu,), name=f"gpu-decode-{index}", daemon=True)
            for index, gpu in enumerate(gpus)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> GpuDecoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, request: Request) -> Future[Prepared]:
        """Begin to prepare a picture; the future is as that of `Decoders.submit`."""
        future: Future[Prepared] = Future()
        reading = self._readers.submit(self._read, request, future)
        # dropped before it began: nobody else will ever answer it
        reading.add_done_callback(lambda done: future.cancel() if done.cancelled() else None)
        return future

    def close(self) -> None:
        """Drop what waits to be read, finish what is in work, and end the threads and the decoders on the CPU."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._cpu.close()

    def _read(self, request: Request, future: Future[Prepared]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            job = self._job(request, future)
        except BaseException as error:  # a bug, and somebody waits
            future.set_exception(error)
            raise
        if job is None:
            self._on_the_cpu(request, future)
        else:
            self._waiting.put(job)

    def _job(self, request: Request, future: Future[Prepared]) -> _Job | None:
        source, box = request.source, request.box
        if isinstance(source, Image.Image | np.ndarray) or isinstance(box, Exception):
            return None
        with self._clock.stage("read"):
            data, digest = read_whole(source, opener(self._clock))
        if not isinstance(data, bytes):
            return None
        with self._clock.stage("decode"):
            file = read_header(data, box, self._options.max_pixels)
        return None if file is None else _Job(request, file, digest, future)

    def _on_the_cpu(self, request: Request, future: Future[Prepared]) -> None:
        try:
            self._cpu.submit(request).add_done_callback(lambda done: _hand_on(done, future))
        except RuntimeError as error:
            # it is being closed
            future.set_exception(error)

    def _work(self, gpu: GpuDecoder) -> None:
        self._clock.join("decoders")
        most, usable = _MOST_PIXELS, True
        while jobs := self._gathered(most if usable else 1):
            try:
                if usable:
                    self._answer(gpu, jobs)
                    continue
            except Exception as error:  # the codec, CUDA, the driver: none of it is an image's fault
                pixels = sum(job.file.pixels for job in jobs)
                if is_out_of_memory(error) and len(jobs) > 1:
                    most = max(1, pixels // 2)
                    self._say(f"{gpu.device}: out of memory decoding {len(jobs)} pictures at a time; fewer from here")
                else:
                    usable = False
                    why = (str(error).strip() or type(error).__name__).splitlines()[0]
                    self._say(f"decoding on {gpu.device} failed ({why}); pictures are decoded on the CPU from here on")
            for job in jobs:
                if not job.future.done():
                    self._on_the_cpu(job.request, job.future)

    def _gathered(self, most_pixels: int) -> list[_Job]:
        """What waits, up to the limits; waits for the first; empty once everything is done."""
        jobs: list[_Job] = []
        pixels = 0
        while len(jobs) < _MOST_FILES and pixels < most_pixels:
            try:
                job = self._waiting.get(block=not jobs)
            except queue.Empty:
                break
            if job is None:
                # for the other threads, and for this one's next round
                self._waiting.put(None)
                break
            jobs.append(job)
            pixels += job.file.pixels
        return jobs

    def _answer(self, gpu: GpuDecoder, jobs: list[_Job]) -> None:
        with self._clock.stage("decode"):
            found = gpu.decode([job.file for job in jobs])
        answered = [(job, picture) for job, picture in zip(jobs, found, strict=True) if picture is not None]
        if answered:
            with self._clock.stage("resize"):
                geometries = [job.file.geometry for job, _ in answered]
                inputs = gpu.to_inputs([picture for _, picture in answered], geometries, self._input_size)
            for (job, picture), pixels in zip(answered, inputs, strict=True):
                geometry, kept = job.file.geometry, self._kept(job.file, picture)
                job.future.set_result(Prepared(job.request, geometry, pixels, kept, file_sha256=job.sha256))
        for job in (job for job, picture in zip(jobs, found, strict=True) if picture is None):
            self._on_the_cpu(job.request, job.future)

    def _kept(self, file: Jpeg, picture: torch.Tensor) -> Image.Image | None:
        """The whole picture, where an overlay will be drawn of it."""
        if not self._options.keep_pictures or file.pixels > KEEP_PIXELS:
            return None
        return Image.fromarray(picture.cpu().numpy())


def _hand_on(done: Future[Prepared], future: Future[Prepared]) -> None:
    try:
        error = done.exception()
    except CancelledError as cancelled:
        future.set_exception(cancelled)
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def open_decoders(
    options: GpuOptions,
    input_size: tuple[int, int],
    clock: StageClock = NO_CLOCK,
    say: Callable[[str], None] = lambda _: None,
) -> DecoderPool:
    """With GPUs if the options name any, else on the CPU alone. A context manager, which ends its workers."""
    if options.gpus:
        return GpuDecoders(options.gpus, options, input_size, clock, say)
    return Decoders(options, input_size, clock)
