"""Decoders that give plain JPEG files to a GPU, in batches, and everything else to decoders on the CPU.

Files are read, hashed and looked at by threads of their own; one thread a GPU takes what waits, decodes and resizes it.
What the GPU is not given, or refuses, is prepared as without one, so that an image's errors are the same on every path.
A picture on which a GPU fails is decoded on the CPU; a GPU that decodes nothing any more costs its speed and no image.

Files that wait for a GPU: handed out in batches, with a limit on what their bytes take."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

from opal_deploy.inference.decoding.pool import DecoderOptions, DecoderPool, Decoders
from opal_deploy.inference.decoding.prepare import KEEP_PIXELS, Prepared, Request, read_whole, timed_open
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.preprocess.gpu import GpuDecoder, Jpeg, is_out_of_memory, read_header

if TYPE_CHECKING:
    import torch


# one call of the codec: as many files, and as many of their pixels (150 MB once decoded), at most
_MOST_FILES, _MOST_PIXELS = 64, 50_000_000


class GpuOptions(DecoderOptions, Protocol):
    """What `open_decoders` reads of its options.

    Attributes:
        gpus: decode plain JPEG files; none: the CPU decodes everything.
    """

    @property
    def gpus(self) -> Sequence[GpuDecoder]: ...


@dataclass
class GpuWorker:
    """One GPU, and how many pixels its memory takes at a time."""

    gpu: GpuDecoder
    most_pixels: int = _MOST_PIXELS


class GpuDecoders:
    """What `Decoders` is, with a GPU or several; a context manager."""

    def __init__(
        self,
        gpus: Sequence[GpuDecoder],
        options: DecoderOptions,
        input_size: tuple[int, int],
        clock: StageTimer = NO_OP_TIMER,
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
        self._waiting = DecodeQueue()
        self._usable, self._lock = len(gpus), threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, args=(GpuWorker(gpu),), name=f"gpu-decode-{index}", daemon=True)
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
        """Drop what waits, finish what is in work, and end the threads and the decoders on the CPU."""
        self._waiting.close()
        self._readers.shutdown(wait=True, cancel_futures=True)
        for thread in self._threads:
            thread.join()
        self._cpu.close()

    def _read(self, request: Request, future: Future[Prepared]) -> None:
        if future.cancelled():
            return
        try:
            job = self._job(request, future)
        except BaseException as error:  # a bug, and somebody waits
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            raise
        if job is not None:
            self._waiting.put(job)
        elif future.set_running_or_notify_cancel():
            self._on_the_cpu(request, future)

    def _job(self, request: Request, future: Future[Prepared]) -> Job | None:
        source, box = request.source, request.box
        if isinstance(source, Image.Image | np.ndarray) or isinstance(box, Exception):
            return None
        with self._clock.stage("read"):
            data, digest = read_whole(source, timed_open(self._clock))
        if not isinstance(data, bytes):
            return None
        with self._clock.stage("decode"):
            file = read_header(data, box, self._options.max_pixels)
        if file is None or not file.can_resize_to(self._input_size):
            return None
        return Job(request, file, digest, future)

    def _all_on_the_cpu(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._on_the_cpu(job.request, job.future)

    def _on_the_cpu(self, request: Request, future: Future[Prepared]) -> None:
        try:
            self._cpu.submit(request).add_done_callback(lambda done: _hand_on(done, future))
        except RuntimeError as error:
            # it is being closed
            future.set_exception(error)

    def _work(self, lane: GpuWorker) -> None:
        self._clock.join("decoders")
        while jobs := self._waiting.take(_MOST_FILES, lane.most_pixels):
            why = self._answer(lane, [job for job in jobs if job.future.set_running_or_notify_cancel()])
            self._waiting.done(jobs)
            # or a quiet service would keep its last pictures
            del jobs
            if why:
                self._give_up(lane.gpu, why)
                return

    def _answer(self, lane: GpuWorker, jobs: list[Job]) -> str:
        """Answer every one of them; why the GPU is of no more use, empty if it is."""
        try:
            refused = self._decoded(lane.gpu, jobs)
            # of a device that is gone the codec tells as of a bad picture
            doubtful = bool(jobs) and len(refused) == len(jobs)
        except Exception as error:  # the codec, CUDA, the driver
            refused, doubtful = [job for job in jobs if not job.future.done()], True
            if is_out_of_memory(error):
                lane.most_pixels = max(1, sum(job.file.pixels for job in refused) // 2)
                lane.gpu.free_memory()
            if len(refused) > 1:
                # one picture may be at fault, or all of them together take too much memory
                half = len(refused) // 2
                why = self._answer(lane, refused[:half])
                if not why:
                    return self._answer(lane, refused[half:])
                self._all_on_the_cpu(refused[half:])
                return why
        self._all_on_the_cpu(refused)
        return lane.gpu.find_problem() if doubtful else ""

    def _decoded(self, gpu: GpuDecoder, jobs: list[Job]) -> list[Job]:
        """Answer what the codec decodes; those that it refuses."""
        with self._clock.stage("decode"):
            found = gpu.decode([job.file for job in jobs])
        answered = [(job, picture) for job, picture in zip(jobs, found, strict=True) if picture is not None]
        if answered:
            with self._clock.stage("resize"):
                geometries = [job.file.geometry for job, _ in answered]
                inputs = gpu.resize_to_inputs([picture for _, picture in answered], geometries, self._input_size)
            for (job, picture), pixels in zip(answered, inputs, strict=True):
                kept = self._kept(job, picture)
                # of its own: one that is kept must not keep the batch
                mine = Prepared(job.request, job.file.geometry, pixels.copy(), kept, file_sha256=job.sha256)
                job.future.set_result(mine)
        return [job for job, picture in zip(jobs, found, strict=True) if picture is None]

    def _kept(self, job: Job, picture: torch.Tensor) -> Image.Image | None:
        """The whole picture, where an overlay will be drawn of it."""
        if not self._options.keep_pictures or job.file.pixels > KEEP_PIXELS:
            return None
        return Image.fromarray(picture.cpu().numpy())

    def _give_up(self, gpu: GpuDecoder, why: str) -> None:
        with self._lock:
            self._usable -= 1
            last = not self._usable
        others = "the other GPUs go on" if not last else "pictures are decoded on the CPU from here on"
        # a listener that fails costs nobody a picture
        with contextlib.suppress(Exception):
            self._say(f"decoding on {gpu.device} failed ({why}); {others}")
        while last and (jobs := self._waiting.take(1, 1)):
            if jobs[0].future.set_running_or_notify_cancel():
                self._on_the_cpu(jobs[0].request, jobs[0].future)
            self._waiting.done(jobs)


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
    clock: StageTimer = NO_OP_TIMER,
    say: Callable[[str], None] = lambda _: None,
) -> DecoderPool:
    """With GPUs if the options name any, else on the CPU alone. A context manager, which ends its workers."""
    if options.gpus:
        return GpuDecoders(options.gpus, options, input_size, clock, say)
    return Decoders(options, input_size, clock)


# of all files that wait or are being decoded; one larger file alone is always taken
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Job:
    """A file, and who waits for its picture."""

    request: Request
    file: Jpeg
    sha256: str | None
    future: Future[Prepared]


class DecodeQueue:
    """A queue between readers and GPUs; every method may be called from any thread."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        """Add a file; waits while others take up the room. Once it is closed the file is dropped."""
        size = len(job.file.data)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + size <= self._most_bytes)
            if self._closed:
                job.future.cancel()
                return
            self._bytes += size
            self._jobs.append(job)
            self._changed.notify_all()

    def take(self, most_files: int, most_pixels: int) -> list[Job]:
        """What waits, up to the limits but at least one; waits for it; empty once it is closed.

        Whoever takes files calls `done` for them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._jobs)
            if self._closed:
                return []
            jobs = [self._jobs.popleft()]
            pixels = jobs[0].file.pixels
            while self._jobs and len(jobs) < most_files and pixels + self._jobs[0].file.pixels <= most_pixels:
                pixels += self._jobs[0].file.pixels
                jobs.append(self._jobs.popleft())
            return jobs

    def done(self, jobs: list[Job]) -> None:
        """The files' bytes are needed no longer."""
        with self._changed:
            self._bytes -= sum(len(job.file.data) for job in jobs)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what waits; whoever waits for room or files goes on."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.future.cancel()
            self._jobs.clear()
            self._changed.notify_all()
