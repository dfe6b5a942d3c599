"""Frames of videos, decoded one after the other in a process of their own.

One process decodes one video at a time, from beginning to end. A request names the frame from which on the next chosen
one is wanted, so that a process that crashed is replaced by one that decodes up to there again, and a second crash at
the same place is the video's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from opal_deploy.errors import ImageError
from opal_deploy.inference.isolation.pool import ProcessPool
from opal_deploy.inference.isolation.process import WorkerCrashed, WorkerProcess, WorkerTimeout
from opal_deploy.inference.isolation.worker import Response
from opal_deploy.inference.timing import NO_OP_TIMER, StageTimer
from opal_deploy.preprocess.decode import MAX_PIXELS, no_claim
from opal_deploy.preprocess.video import Progress, Sampling, VideoFrame, VideoReader, require_pyav

# a frame that is far away takes several requests, so that the time limit is one of standing still
_PATIENCE_SECONDS = 1.0


class FrameRequest(NamedTuple):
    """The next of the chosen frames of a video with at least this index."""

    path: str
    sampling: Sampling
    first: int


@dataclass
class FrameTask:
    """The task of the process that decodes videos.

    Attributes:
        max_pixels: see `VideoReader`.
        in_use: a video is open, which a new process would have to decode from its beginning.
    """

    max_pixels: int
    in_use: bool = False
    _reader: VideoReader | None = field(default=None, repr=False)
    _key: tuple[str, Sampling] | None = None

    def __call__(self, request: FrameRequest, timer: StageTimer, claim: Callable[[int], None]) -> Response:
        """Return the frame's header and pixels; `pending` where it is not reached yet, `end` behind the last one."""
        try:
            reader = self._find_reader(request)
            frame = reader.read(request.first, _PATIENCE_SECONDS)
        except ImageError as error:
            self._close()
            return {"end": True, "error": [error.code, str(error)]}, []
        if frame is Progress.unfinished:
            return {"pending": True}, []
        if not isinstance(frame, VideoFrame):
            self._close()
            return {"end": True}, []
        header: dict[str, Any] = {"index": frame.index, "seconds": frame.seconds, "sha256": reader.sha256}
        if frame.pixels is None:
            return {**header, "error": [frame.error.code, str(frame.error)] if frame.error else None}, []
        return {**header, "size": frame.pixels.shape[:2]}, [frame.pixels.tobytes()]

    def _find_reader(self, request: FrameRequest) -> VideoReader:
        key = (request.path, request.sampling)
        if self._reader is None or self._key != key or self._reader.next_index > request.first:
            self._close()
            self._reader = VideoReader(Path(request.path), request.sampling, self.max_pixels)
            self._key, self.in_use = key, True
        return self._reader

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self.in_use = None, False


class DecodedFrame(NamedTuple):
    """A frame, and the digest of its video's file."""

    frame: VideoFrame
    image_sha256: str


class FrameReader:
    """Reads frames of videos; a context manager, which ends its process. For one thread at a time."""

    def __init__(self, max_pixels: int = MAX_PIXELS, *, isolate: bool = False, timeout: float | None = None) -> None:
        """Start nothing yet.

        Args:
            max_pixels: width times height above which a video is refused.
            isolate: decode in a process, so that a decoder that crashes or hangs costs one video.
            timeout: seconds that decoding may stand still; None: no limit. Only with `isolate`.
        """
        self._task, self._timeout = FrameTask(max_pixels), timeout
        self._pool = ProcessPool(1, self._task, timeout) if isolate else None

    def read(self, path: Path, sampling: Sampling, first: int = 0) -> DecodedFrame | None:
        """Return the next of the chosen frames with at least the index `first`; None behind the last one.

        Frames that are asked for in their order are decoded once.

        Raises:
            ImageError: what is wrong with the video, once everything that can be read of it was returned.
            StoppedEarly: no process can be started. MissingExtra: PyAV is not installed.
        """
        require_pyav()
        request = FrameRequest(str(path), sampling, first)
        while True:
            try:
                header, pixels = self._ask(request)
            except WorkerCrashed as crash:
                raise ImageError("decoder_crashed", f"its decoder {crash}") from None
            except WorkerTimeout:
                limit = f"for {self._timeout:g} s" if self._timeout else ""
                raise ImageError("decode_timeout", f"its decoder stood still {limit}; raise --decode-timeout") from None
            if "pending" in header:
                continue
            error = ImageError(*map(str, header["error"])) if header.get("error") else None
            if "end" in header:
                if error is not None:
                    raise error
                return None
            seconds = None if header["seconds"] is None else float(header["seconds"])
            return DecodedFrame(VideoFrame(int(header["index"]), seconds, pixels, error), str(header["sha256"]))

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, request: FrameRequest) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.uint8]] | None]:
        if self._pool is not None:
            return self._pool.call(request, _read_response)
        header, parts = self._task(request, NO_OP_TIMER, no_claim)
        return header, np.frombuffer(parts[0], np.uint8).reshape(*header["size"], 3) if parts else None


def _read_response(
    process: WorkerProcess, header: dict[str, Any], position: int
) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.uint8]] | None]:
    if "size" not in header:
        return header, None
    height, width = map(int, header["size"])
    pixels = np.empty((height, width, 3), np.uint8)
    process.read_into(pixels.data.cast("B"))
    return header, pixels
