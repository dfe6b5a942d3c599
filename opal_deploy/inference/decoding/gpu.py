"""A pool that decodes plain JPEG files on GPUs, in batches, and prepares everything else on the CPU.

Threads of their own read and hash the files and read their headers; one thread a GPU takes files from a queue, decodes
and resizes them. An image that no GPU is given, or that the GPU refuses, is prepared as without one, so that its errors
are the same on every path. An image on which a GPU fails is decoded on the CPU; a GPU that decodes nothing any more
costs its speed and no image.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from opal_deploy.inference.decoding.pool import CpuDecoderPool, DecoderPool
from opal_deploy.inference.decoding.prepare import read_small_file, timed_open
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.gpu import GpuDecoder, is_out_of_memory
from opal_deploy.preprocess.jpeg_header import Jpeg, read_header
from opal_deploy.preprocess.resize import display_size

if TYPE_CHECKING:
    import torch

# of one call of the codec: files, and pixels of all files together (150 MB once decoded)
_MAX_FILES, _MAX_PIXELS = 64, 50_000_000
# of all files that wait or are being decoded; a single larger file is always taken
_MAX_QUEUE_BYTES = 256 << 20


def open_decoder_pool(
    options: InferenceOptions,
    input_size: tuple[int, int],
    timer: StageTimer = NO_OP_TIMER,
    print_message: Callable[[str], None] = lambda _: None,
) -> DecoderPool:
    """Return a pool with GPUs if the options name any, else one on the CPU alone.

    Args:
        options: how images are decoded.
        input_size: (H0, W0) of the model.
        timer: gets the times of the stages, under the role `decoders`.
        print_message: is called, from any thread, when a GPU failed.
    """
    if options.gpus:
        return GpuDecoderPool(options, input_size, timer, print_message)
    return CpuDecoderPool(options, input_size, timer)


class GpuDecoderPool(DecoderPool):
    """A pool that prepares images on GPUs and the CPU."""

    def __init__(
        self,
        options: InferenceOptions,
        input_size: tuple[int, int],
        timer: StageTimer = NO_OP_TIMER,
        print_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start a thread for each of `options.gpus`.

        `options.workers` files are read at a time. Neither `isolate` nor `decode_timeout` holds for what a GPU decodes.
        The other arguments are those of `open_decoder_pool`.
        """
        self._options, self._input_size = options, input_size
        self._timer, self._print_message = timer, print_message
        self._cpu = CpuDecoderPool(options, input_size, timer)
        self._readers = ThreadPoolExecutor(
            options.workers, "read", initializer=timer.register_thread, initargs=("decoders",)
        )
        self._queue = DecodeQueue()
        self._usable_gpus, self._lock = len(options.gpus), threading.Lock()
        self._threads = [
            threading.Thread(target=self._run_gpu, args=(GpuWorker(gpu),), name=f"gpu-decode-{index}", daemon=True)
            for index, gpu in enumerate(options.gpus)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> Future[Prepared]:
        """See `DecoderPool.submit`."""
        future: Future[Prepared] = Future()
        reading = self._readers.submit(self._read, request, future)
        # dropped before it began: nothing else would ever end the future
        reading.add_done_callback(lambda done: future.cancel() if done.cancelled() else None)
        return future

    def close(self) -> None:
        """See `DecoderPool.close`."""
        self._queue.close()
        self._readers.shutdown(wait=True, cancel_futures=True)
        for thread in self._threads:
            thread.join()
        self._cpu.close()

    def _read(self, request: Request, future: Future[Prepared]) -> None:
        if future.cancelled():
            return
        try:
            task = self._build_task(request, future)
        except BaseException as error:  # a bug, and a caller waits for the future
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            raise
        if task is not None:
            self._queue.put(task)
        elif future.set_running_or_notify_cancel():
            self._prepare_on_cpu(request, future)

    def _build_task(self, request: Request, future: Future[Prepared]) -> DecodeTask | None:
        """Return the task of a file that a GPU can decode; None for every other image."""
        source = request.source
        if isinstance(source, Image.Image | np.ndarray) or request.error is not None:
            return None
        with self._timer.stage("read"):
            data, digest = read_small_file(source, timed_open(self._timer))
        if not isinstance(data, bytes):
            return None
        with self._timer.stage("decode"):
            file = read_header(data, request.box, self._options.max_pixels)
        if file is None or not file.can_resize_to(self._input_size):
            return None
        return DecodeTask(request, file, digest, future)

    def _prepare_all_on_cpu(self, tasks: Sequence[DecodeTask]) -> None:
        for task in tasks:
            self._prepare_on_cpu(task.request, task.future)

    def _prepare_on_cpu(self, request: Request, future: Future[Prepared]) -> None:
        try:
            self._cpu.submit(request).add_done_callback(lambda done: _copy_result(done, future))
        except RuntimeError as error:
            # it is being closed
            future.set_exception(error)

    def _run_gpu(self, worker: GpuWorker) -> None:
        self._timer.register_thread("decoders")
        while tasks := self._queue.take(_MAX_FILES, worker.max_pixels):
            failure = self._finish_all(worker, [task for task in tasks if task.future.set_running_or_notify_cancel()])
            self._queue.done(tasks)
            # or a quiet service would keep its last images
            del tasks
            if failure:
                self._retire_gpu(worker.gpu, failure)
                return

    def _finish_all(self, worker: GpuWorker, tasks: list[DecodeTask]) -> str:
        """Finish every task, here or on the CPU; return the reason why the GPU cannot be used again, or nothing."""
        try:
            refused = self._decode(worker.gpu, tasks)
            # the codec reports a device that is gone as it reports a bad image
            suspect = bool(tasks) and len(refused) == len(tasks)
        except Exception as error:  # the codec, CUDA, the driver
            refused, suspect = [task for task in tasks if not task.future.done()], True
            if is_out_of_memory(error):
                worker.max_pixels = max(1, sum(task.file.pixels for task in refused) // 2)
                worker.gpu.free_memory()
            if len(refused) > 1:
                # one image may be at fault, or all of them together take too much memory
                half = len(refused) // 2
                failure = self._finish_all(worker, refused[:half])
                if not failure:
                    return self._finish_all(worker, refused[half:])
                self._prepare_all_on_cpu(refused[half:])
                return failure
        self._prepare_all_on_cpu(refused)
        return worker.gpu.find_problem() if suspect else ""

    def _decode(self, gpu: GpuDecoder, tasks: list[DecodeTask]) -> list[DecodeTask]:
        """Finish the tasks that the codec decodes; return those that it refuses."""
        with self._timer.stage("decode"):
            images = gpu.decode([task.file for task in tasks])
        decoded = [(task, image) for task, image in zip(tasks, images, strict=True) if image is not None]
        if decoded:
            with self._timer.stage("resize"):
                geometries = [task.file.geometry for task, _ in decoded]
                inputs = gpu.resize_to_inputs([image for _, image in decoded], geometries, self._input_size)
            for (task, image), pixels in zip(decoded, inputs, strict=True):
                kept = self._keep_image(gpu, image) if self._options.keep_images else None
                # a copy: an image that is kept must not keep the batch
                prepared = Prepared(task.request, task.file.geometry, pixels.copy(), kept, file_sha256=task.sha256)
                task.future.set_result(prepared)
        return [task for task, image in zip(tasks, images, strict=True) if image is None]

    def _keep_image(self, gpu: GpuDecoder, image: torch.Tensor) -> Image.Image:
        height, width = image.shape[:2]
        reduced = display_size(width, height)
        if reduced == (width, height):
            return Image.fromarray(image.cpu().numpy())
        return Image.fromarray(gpu.resize_to_inputs([image], [Geometry.whole(width, height)], reduced[::-1])[0])

    def _retire_gpu(self, gpu: GpuDecoder, reason: str) -> None:
        with self._lock:
            self._usable_gpus -= 1
            is_last = not self._usable_gpus
        others = "images are decoded on the CPU from here on" if is_last else "the other GPUs go on"
        # a callback that fails costs no image
        with contextlib.suppress(Exception):
            self._print_message(f"decoding on {gpu.device} failed ({reason}); {others}")
        while is_last and (tasks := self._queue.take(1, 1)):
            if tasks[0].future.set_running_or_notify_cancel():
                self._prepare_on_cpu(tasks[0].request, tasks[0].future)
            self._queue.done(tasks)


def _copy_result(done: Future[Prepared], future: Future[Prepared]) -> None:
    try:
        error = done.exception()
    except CancelledError as cancelled:
        future.set_exception(cancelled)
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


@dataclass
class GpuWorker:
    """One GPU, and the number of pixels that its memory takes at a time."""

    gpu: GpuDecoder
    max_pixels: int = _MAX_PIXELS


@dataclass(frozen=True)
class DecodeTask:
    """A file to decode, and the future of its image."""

    request: Request
    file: Jpeg
    sha256: str | None
    future: Future[Prepared]


class DecodeQueue:
    """A queue between readers and GPUs, bounded by bytes; every method may be called from any thread."""

    def __init__(self, max_bytes: int = _MAX_QUEUE_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._tasks: deque[DecodeTask] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, task: DecodeTask) -> None:
        """Add a file once there is space for its bytes; drop it if the queue is closed."""
        size = len(task.file.data)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + size <= self._max_bytes)
            if self._closed:
                task.future.cancel()
                return
            self._bytes += size
            self._tasks.append(task)
            self._changed.notify_all()

    def take(self, max_files: int, max_pixels: int) -> list[DecodeTask]:
        """Wait for files and return some, within the limits but at least one; none once the queue is closed.

        The caller calls `done` for them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._tasks)
            if self._closed:
                return []
            tasks = [self._tasks.popleft()]
            pixels = tasks[0].file.pixels
            while self._tasks and len(tasks) < max_files and pixels + self._tasks[0].file.pixels <= max_pixels:
                pixels += self._tasks[0].file.pixels
                tasks.append(self._tasks.popleft())
            return tasks

    def done(self, tasks: list[DecodeTask]) -> None:
        """Free the space of files that were taken."""
        with self._changed:
            self._bytes -= sum(len(task.file.data) for task in tasks)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop the files that wait; every call that waits returns."""
        with self._changed:
            self._closed = True
            for task in self._tasks:
                task.future.cancel()
            self._tasks.clear()
            self._changed.notify_all()
