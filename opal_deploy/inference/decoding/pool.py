"""A pool that prepares images ahead of the loop, in threads or in worker processes.

In processes, a decoder that crashes costs the image that it decoded and no other, and an image may take only so long.
An image whose process ended is tried a second time, since processes are also killed from outside. Each thread of the
pool talks to one process at a time; a process is started when it is first needed, and replaced when it ended, was
killed, or has grown too large. Processes end with this one, whatever ends it.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError, StoppedEarly
from opal_deploy.inference.decoding.prepare import MAX_KEPT_PIXELS, prepare
from opal_deploy.inference.decoding.process import DecodeProcess, DecoderCrashed, DecodeTimeout
from opal_deploy.inference.decoding.worker import WorkerConfig
from opal_deploy.inference.timing import NO_OP_TIMER, NoOpTimer, StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.geometry import Geometry

_SHA256 = re.compile("[0-9a-f]{64}")
# between two checks of the processes' time limits
_WATCH_SECONDS = 0.1
# a system short of memory kills processes that did nothing wrong: the second crash is the image's fault, and the run
# ends only where one process after the other does not start
_MAX_ATTEMPTS, _MAX_STARTS = 2, 3


class DecoderPool(ABC):
    """A pool that prepares images; a context manager, which closes it."""

    @abstractmethod
    def submit(self, request: Request) -> Future[Prepared]:
        """Begin to prepare an image.

        The future raises nothing that an image can cause; it raises StoppedEarly where no process can be started.
        """

    @abstractmethod
    def close(self) -> None:
        """Drop what waits, finish what is in work, and end threads and processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CpuDecoderPool(DecoderPool):
    """A pool that prepares images on the CPU."""

    def __init__(self, options: InferenceOptions, input_size: tuple[int, int], timer: StageTimer = NO_OP_TIMER) -> None:
        """Start nothing yet.

        Args:
            options: `workers`, `isolate`, `decode_timeout`, and those that `prepare` reads.
            input_size: (H0, W0) of the model.
            timer: gets the times of the stages, under the role `decoders`; without the time that data takes between
                processes.
        """
        self._options, self._input_size, self._timer = options, input_size, timer
        self._threads = ThreadPoolExecutor(
            options.workers, "decode", initializer=timer.register_thread, initargs=("decoders",)
        )
        self._config = WorkerConfig(
            input_size,
            # devices and names stay here: no worker needs them
            replace(options, gpus=(), slot_names=None),
            timed=not isinstance(timer, NoOpTimer),
            pillow_limit=Image.MAX_IMAGE_PIXELS,
        )
        # the last one used comes first, so that a short run starts no more processes than it needs; None: to be started
        self._idle: queue.LifoQueue[DecodeProcess | None] = queue.LifoQueue()
        for _ in range(options.workers):
            self._idle.put(None)
        self._processes: set[DecodeProcess] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def submit(self, request: Request) -> Future[Prepared]:
        """See `DecoderPool.submit`."""
        return self._threads.submit(self._prepare, request)

    def close(self) -> None:
        """See `DecoderPool.close`."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            processes = list(self._processes)
        # all begin to end before any is waited for
        for process in processes:
            process.close_stdin()
        for process in processes:
            self._close_process(process)

    def _prepare(self, request: Request) -> Prepared:
        in_memory = isinstance(request.source, Image.Image | np.ndarray)
        if not self._options.isolate or in_memory or request.error is not None:
            # an error needs no process, and pixels in memory have no decoder left that could crash
            return prepare(request, self._input_size, self._options, self._timer)
        message = pickle.dumps((request.source, request.box))
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._prepare_isolated(request, message)
            except DecoderCrashed as crash:
                failure = f"{crash}"
            except DecodeTimeout:
                reason = f"not decoded within {self._options.decode_timeout:g} s; raise --decode-timeout"
                return Prepared(request, error=ImageError("decode_timeout", f"it was {reason}"))
        return Prepared(
            request, error=ImageError("decoder_crashed", f"its decoder {failure}, each of {_MAX_ATTEMPTS} times")
        )

    def _prepare_isolated(self, request: Request, message: bytes) -> Prepared:
        """Prepare an image in a process; raises DecoderCrashed, DecodeTimeout, or StoppedEarly where none can start."""
        process, reusable = self._idle.get(), False
        try:
            # a process that ended between two images is no image's fault
            if process is None or not process.is_running():
                self._close_process(process)
                process = self._start_process()
            prepared, reusable = self._prepare_in(process, request, message)
            return prepared
        finally:
            if not reusable:
                self._close_process(process)
            self._idle.put(process if reusable else None)

    def _prepare_in(self, process: DecodeProcess, request: Request, message: bytes) -> tuple[Prepared, bool]:
        """Return the image as the process prepared it, and whether the process can be used again."""
        header = process.request(message, self._options.decode_timeout)
        if "traceback" in header:
            raise RuntimeError(f"in a decode worker: {header['traceback']}")
        try:
            prepared = self._read_prepared(process, request, header)
            for stage, wall, cpu, calls in header["times"]:
                self._timer.add(stage, wall, cpu, calls)
            return prepared, process.finish_response() and not header["retire"]
        except (KeyError, TypeError, ValueError):
            # the process may have been taken over by the file that it decoded
            raise DecoderCrashed("sent an answer that makes no sense") from None

    def _read_prepared(self, process: DecodeProcess, request: Request, header: dict[str, Any]) -> Prepared:
        digest = header["sha256"]
        if digest is not None and not _SHA256.fullmatch(digest):
            raise ValueError("no sha256")
        if "error" in header:
            code, message = header["error"]
            return Prepared(request, error=ImageError(str(code), str(message)), file_sha256=digest)
        pixels = np.empty((*self._input_size, 3), np.uint8)
        process.read_into(pixels.reshape(-1).data)
        x0, y0, x1, y1 = map(int, header["crop"])
        geometry = Geometry(int(header["width"]), int(header["height"]), (x0, y0, x1, y1))
        image = None
        if header["image"]:
            size = (geometry.width, geometry.height)
            if size[0] * size[1] > MAX_KEPT_PIXELS:
                raise ValueError("larger than any image that is kept")
            whole = np.empty(3 * size[0] * size[1], np.uint8)
            process.read_into(whole.data)
            image = Image.frombuffer("RGB", size, whole, "raw", "RGB", 0, 1)
        return Prepared(request, geometry, pixels, image, file_sha256=digest)

    def _start_process(self) -> DecodeProcess:
        for _ in range(_MAX_STARTS - 1):
            with contextlib.suppress(StoppedEarly):
                return self._start_once()
        return self._start_once()

    def _start_once(self) -> DecodeProcess:
        process = DecodeProcess()
        with self._lock:
            self._processes.add(process)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._kill_overdue, name="decode-limit", daemon=True)
                self._watcher.start()
        try:
            process.wait_until_ready(self._config)
        except BaseException:
            self._close_process(process)
            raise
        return process

    def _close_process(self, process: DecodeProcess | None) -> None:
        if process is not None:
            process.close()
            with self._lock:
                self._processes.discard(process)

    def _kill_overdue(self) -> None:
        while not self._closed.wait(_WATCH_SECONDS):
            with self._lock:
                processes = list(self._processes)
            for process in processes:
                process.kill_if_overdue(time.monotonic())
