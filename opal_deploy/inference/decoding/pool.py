"""Workers that prepare pictures ahead of the loop, in threads or in processes of their own.

In processes, a decoder that crashes costs the image that it was given and no other, and an image may take only so long.
Each worker thread asks one process at a time; a process is started when it is first needed, and replaced when it ended,
was ended, or has kept too much memory. Processes end with this one, whatever ends it.
"""

from __future__ import annotations

import pickle
import queue
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from PIL import Image

from opal_deploy.inference.decoding.prepare import KEEP_PIXELS, Prepared, Request, failed, prepare
from opal_deploy.inference.decoding.process import Crashed, DecodeProcess, TimedOut
from opal_deploy.inference.decoding.worker import WorkerConfig
from opal_deploy.inference.timing import NO_OP_TIMER, NoOpTimer, StageTimer
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.preprocess.geometry import Geometry

_SHA256 = re.compile("[0-9a-f]{64}")
# between two looks at who is over the limit, seconds
_LOOK = 0.1


class DecoderOptions(Protocol):
    """What `Decoders` reads of its options; `EngineOptions` has it all.

    Attributes:
        workers: pictures prepared at a time.
        max_pixels: of one picture.
        keep_pictures: hand small pictures on, for overlays.
        decode: the decode path.
        decode_timeout: seconds that one image may take, from its being read to its being resized; None: no limit. Only
            a process can be stopped: threads know no limit.
        isolate: prepare pictures in processes.
    """

    @property
    def workers(self) -> int: ...
    @property
    def max_pixels(self) -> int: ...
    @property
    def keep_pictures(self) -> bool: ...
    @property
    def decode(self) -> Decoding: ...
    @property
    def decode_timeout(self) -> float | None: ...
    @property
    def isolate(self) -> bool: ...


class DecoderPool(Protocol):
    """What prepares pictures ahead of a loop: `Decoders`, `GpuDecoders`. A context manager, which ends its workers."""

    def submit(self, request: Request) -> Future[Prepared]: ...
    def close(self) -> None: ...
    def __enter__(self) -> DecoderPool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Decoders:
    """A pool that prepares pictures; a context manager, which ends its workers."""

    def __init__(
        self,
        options: DecoderOptions,
        input_size: tuple[int, int],
        clock: StageTimer = NO_OP_TIMER,
        *,
        before: str | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            options: see `DecoderOptions`.
            input_size: (H0, W0).
            clock: is told what the stages take, under the station `decoders`. What travels between processes is in
                none of them.
            before: for tests of what a crash costs: `module:function`, called in the process with each source before
                it is decoded.
        """
        self._options, self._input_size, self._clock = options, input_size, clock
        self._threads = ThreadPoolExecutor(options.workers, "decode", initializer=clock.join, initargs=("decoders",))
        self._config = WorkerConfig(
            input_size, options.max_pixels, options.keep_pictures, options.decode,
            timed=not isinstance(clock, NoOpTimer), pillow_limit=Image.MAX_IMAGE_PIXELS, before=before,
        )  # fmt: skip
        # the last one used comes first, so that a short run starts no more processes than it needs; None: to be started
        self._idle: queue.LifoQueue[DecodeProcess | None] = queue.LifoQueue()
        for _ in range(options.workers):
            self._idle.put(None)
        self._children: set[DecodeProcess] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None

    def __enter__(self) -> Decoders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, request: Request) -> Future[Prepared]:
        """Begin to prepare a picture.

        The future raises nothing that an image can cause; it raises StoppedEarly where no process can be started.
        """
        return self._threads.submit(self._prepare, request)

    def close(self) -> None:
        """Drop what waits, finish what is in work, and end the workers."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._closed.set()
        if self._watch is not None:
            self._watch.join()
        with self._lock:
            children = list(self._children)
        # all are asked before any is waited for
        for child in children:
            child.hang_up()
        for child in children:
            self._end(child)

    def _prepare(self, request: Request) -> Prepared:
        options = self._options
        in_memory = isinstance(request.source, Image.Image | np.ndarray)
        if not options.isolate or in_memory or isinstance(request.box, Exception):
            # an error needs no process, and what was decoded before has no decoder left that could crash
            return prepare(
                request, self._input_size, options.max_pixels,
                keep_picture=options.keep_pictures, clock=self._clock, decoding=options.decode,
            )  # fmt: skip
        message = pickle.dumps((request.source, request.box))
        child = self._idle.get()
        try:
            # one that ended while it had nothing to do is nobody's fault
            if child is None or not child.alive():
                self._end(child)
                child = self._started()
            prepared, again = self._ask(child, request, message)
        except (Crashed, TimedOut) as failure:
            prepared, again = self._unanswered(request, failure), False
        except BaseException:
            self._end(child)
            self._idle.put(None)
            raise
        if not again:
            self._end(child)
        self._idle.put(child if again else None)
        return prepared

    def _unanswered(self, request: Request, failure: Crashed | TimedOut) -> Prepared:
        if isinstance(failure, Crashed):
            return failed(request, "decoder_crashed", f"its decoder {failure}")
        limit = f"{self._options.decode_timeout:g} s"
        return failed(request, "decode_timeout", f"it was not decoded within {limit}; raise --decode-timeout")

    def _ask(self, child: DecodeProcess, request: Request, message: bytes) -> tuple[Prepared, bool]:
        """The child's answer, and whether it can be asked again."""
        about = child.ask(message, self._options.decode_timeout)
        if "bug" in about:
            raise RuntimeError(f"in a decode worker: {about['bug']}")
        try:
            prepared = self._prepared(child, request, about)
            for stage, wall, cpu, calls in about["times"]:
                self._clock.add(stage, wall, cpu, calls)
            return prepared, child.answered() and not about["retire"]
        except (KeyError, TypeError, ValueError):
            raise Crashed("sent an answer that makes no sense") from None

    def _prepared(self, child: DecodeProcess, request: Request, about: dict[str, Any]) -> Prepared:
        if "error" in about:
            code, text = about["error"]
            return failed(request, str(code), str(text), _digest(about))
        pixels = np.empty((*self._input_size, 3), np.uint8)
        child.read_into(pixels.reshape(-1).data)
        x0, y0, x1, y1 = map(int, about["crop"])
        geometry = Geometry(int(about["width"]), int(about["height"]), (x0, y0, x1, y1))
        picture = None
        if about["picture"]:
            size = (geometry.width, geometry.height)
            if size[0] * size[1] > KEEP_PIXELS:
                raise ValueError("larger than any that is kept")
            whole = np.empty(3 * size[0] * size[1], np.uint8)
            child.read_into(whole.data)
            picture = Image.frombuffer("RGB", size, whole, "raw", "RGB", 0, 1)
        return Prepared(request, geometry, pixels, picture, file_sha256=_digest(about))

    def _started(self) -> DecodeProcess:
        child = DecodeProcess()
        with self._lock:
            self._children.add(child)
            if self._watch is None:
                self._watch = threading.Thread(target=self._stop_the_overdue, name="decode-limit", daemon=True)
                self._watch.start()
        try:
            child.prepare(self._config)
        except BaseException:
            self._end(child)
            raise
        return child

    def _end(self, child: DecodeProcess | None) -> None:
        if child is not None:
            child.end()
            with self._lock:
                self._children.discard(child)

    def _stop_the_overdue(self) -> None:
        while not self._closed.wait(_LOOK):
            with self._lock:
                children = list(self._children)
            for child in children:
                child.stop_if_overdue(time.monotonic())


def _digest(about: dict[str, Any]) -> str | None:
    """The file's sha256 as a child gives it, which may have been taken over by the file."""
    digest = about["sha256"]
    if digest is not None and not _SHA256.fullmatch(digest):
        raise ValueError("no sha256")
    return digest if digest is None else str(digest)
