"""A pool that prepares images ahead of the loop, in threads or in worker processes.

The pixels of large images that are decoded at a time are bounded, see `budget`. In processes (see `isolation`), a
decoder that crashes costs the image that it decoded and no other, and an image may take only so long.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError
from opal_deploy.inference.decoding.budget import PixelBudget
from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.decoding.task import PrepareTask
from opal_deploy.inference.isolation.pool import ProcessPool
from opal_deploy.inference.isolation.process import WorkerCrashed, WorkerProcess, WorkerTimeout
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.inference.types import InferenceOptions, Prepared, Request
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import display_size

# decoded at a time, on average over the workers: two photographs of an ordinary camera pass side by side, and what is
# larger waits until the others are done. A pixel takes four bytes, while it is converted eight
PIXELS_PER_WORKER = 25_000_000
_SHA256 = re.compile("[0-9a-f]{64}")


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
            timer: gets the times of the stages, under the role `decoders`.
        """
        self._options, self._input_size, self._timer = options, input_size, timer
        self._threads = ThreadPoolExecutor(
            options.workers, "decode", initializer=timer.register_thread, initargs=("decoders",)
        )
        self._budget = PixelBudget(PIXELS_PER_WORKER * options.workers)
        # names stay here: no worker needs them
        task = PrepareTask(input_size, replace(options, slot_names=None))
        self._processes = ProcessPool(options.workers, task, options.decode_timeout, timer)

    def submit(self, request: Request) -> Future[Prepared]:
        """See `DecoderPool.submit`."""
        return self._threads.submit(self._prepare, request)

    def close(self) -> None:
        """See `DecoderPool.close`."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._processes.close()

    def _prepare(self, request: Request) -> Prepared:
        in_memory = isinstance(request.source, Image.Image | np.ndarray)
        try:
            with self._budget.lease() as claim:
                if not self._options.isolate or in_memory or request.error is not None:
                    # an error needs no process, and pixels in memory have no decoder left that could crash
                    return prepare(request, self._input_size, self._options, self._timer, claim)
                read = partial(self._read_prepared, request)
                return self._processes.call((request.source, request.box), read, claim)
        except WorkerCrashed as crash:
            return Prepared(request, error=ImageError("decoder_crashed", f"its decoder {crash}"))
        except WorkerTimeout:
            reason = f"it was not decoded within {self._options.decode_timeout:g} s; raise --decode-timeout"
            return Prepared(request, error=ImageError("decode_timeout", reason))

    def _read_prepared(self, request: Request, process: WorkerProcess, header: dict[str, Any]) -> Prepared:
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
            size = display_size(geometry.width, geometry.height)
            whole = np.empty(3 * size[0] * size[1], np.uint8)
            process.read_into(whole.data)
            image = Image.frombuffer("RGB", size, whole, "raw", "RGB", 0, 1)
        return Prepared(request, geometry, pixels, image, file_sha256=digest)
