"""Frames of videos as images: names of frames, and decoding them one after the other in a separate process.

A frame is called `clip.mp4#frame=000120`, after its video and the number of frames before it: names sort in the order
of the frames, and `explain` and `verify` find a frame by its name.

One process decodes one video at a time, from beginning to end. A request names the first acceptable frame, so that
after a crash a new process can decode up to it again; a second crash at the same place is the video's fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import MAX_PIXELS, no_claim
from opal_deploy.preprocess.video import ALL_FRAMES, Progress, Sampling, VideoFrame, VideoReader, require_pyav
from opal_deploy.sources.image import FrameInfo, InputImage
from opal_deploy.sources.items import FRAME_NAME, is_video_name
from opal_deploy.storage.urls import is_url
from opal_deploy.timing import NO_OP_TIMER, StageTimer
from opal_deploy.workers.pool import ProcessPool
from opal_deploy.workers.process import WorkerCrashed, WorkerTimeout
from opal_deploy.workers.worker import Data, Response

# a distant frame takes several requests, so that the time limit applies to lack of progress
_PATIENCE_SECONDS = 1.0


class FrameRequest(NamedTuple):
    """The next of the chosen frames of a video with at least this index."""

    path: str
    sampling: Sampling
    first: int


@dataclass
class FrameTask:
    """The task of the process that decodes videos; `in_use`: a video is open, which a new process would restart."""

    max_pixels: int
    in_use: bool = False
    _reader: VideoReader | None = field(default=None, repr=False)
    _key: tuple[str, Sampling] | None = None

    def __call__(self, request: FrameRequest, timer: StageTimer, claim: Callable[[int], None]) -> Response:
        """Return the frame's header and pixels; `pending` if it is not reached yet, `end` after the last one."""
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
    """Reads frames of videos, for one thread at a time; a context manager, which ends its process."""

    def __init__(self, max_pixels: int = MAX_PIXELS, *, isolate: bool = False, timeout: float | None = None) -> None:
        """Start nothing yet.

        Args:
            max_pixels: width times height above which a video is refused.
            isolate, timeout: decode in a process, with a limit of seconds without progress; None: no limit.
        """
        self._task, self._timeout = FrameTask(max_pixels), timeout
        self._pool = ProcessPool(1, self._task, timeout) if isolate else None

    def read(self, path: Path, sampling: Sampling, first: int = 0) -> DecodedFrame | None:
        """Return the next of the chosen frames from the index `first` on; None after the last one.

        Frames that are read in order are decoded once.

        Raises:
            ImageError: the video is damaged; after all frames that can be read.
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

    def __exit__(self, *details: object) -> None:
        self.close()

    def _ask(self, request: FrameRequest) -> tuple[dict[str, Any], NDArray[np.uint8] | None]:
        if self._pool is not None:
            return self._pool.call(request, _read_response)
        return _read_response(*self._task(request, NO_OP_TIMER, no_claim))


def _read_response(header: dict[str, Any], parts: Sequence[Data]) -> tuple[dict[str, Any], NDArray[np.uint8] | None]:
    return header, np.frombuffer(parts[0], np.uint8).reshape(*header["size"], 3) if parts else None


_HOW = "choose its frames by `infer --every 1s`, or --every 30 for every 30th, or name one: {}#frame=0"


@dataclass(frozen=True)
class VideoOptions:
    """The frames that are taken (None: only those that are named), and the arguments of `FrameReader`."""

    sampling: Sampling | None = None
    max_pixels: int = MAX_PIXELS
    isolate: bool = False
    timeout: float | None = None

    def open_reader(self) -> FrameReader:
        """Return a reader of the frames."""
        return FrameReader(self.max_pixels, isolate=self.isolate, timeout=self.timeout)


_BEHIND_THE_END = 10**15
# for a call that takes only named frames
NO_VIDEOS = VideoOptions()


@dataclass(frozen=True)
class FrameName:
    """A frame's name: its video, and the number of frames before it."""

    video: str
    index: int


def parse_frame_name(name: str) -> FrameName | None:
    """Return the frame in a path such as `clip.mp4#frame=000120`; None for other paths, and if a file has the name."""
    match = FRAME_NAME.fullmatch(name)
    if match is None or not is_video_name(match[1]) or is_url(name) or os.path.lexists(name):
        return None
    return FrameName(match[1], int(match[2]))


def check_video_input(text: str, sampling: Sampling | None) -> None:
    """Raise UsageError for a video on a server, or without a choice of frames, and MissingExtra without PyAV."""
    frame = parse_frame_name(text)
    if frame is not None:
        require_pyav()
    elif is_video_name(text) and is_url(text):
        raise UsageError(f"{text}: videos are read from disks only; download it first")
    elif is_video_name(text) and os.path.isfile(text):
        if sampling is None:
            raise UsageError(f"{text}: it is a video; {_HOW.format(text)}")
        require_pyav()


def expand_videos(items: Iterable[InputImage], options: VideoOptions) -> Iterator[InputImage]:
    """Yield the images, with the chosen frames in place of each video, after them an error if it is damaged."""
    with options.open_reader() as reader:
        for item in items:
            if item.error is not None or not isinstance(item.source, Path):
                yield item
            elif (name := parse_frame_name(str(item.source))) is not None:
                yield _read_frame(reader, name, item)
            elif is_video_name(item.source.name):
                yield from _frames(reader, item, item.source, options.sampling)
            else:
                yield item


def undivided_error(video: Path) -> ImageError:
    """Return the error of a video that is listed where no frames of videos are chosen."""
    return ImageError("not_an_image", f"it is a video; {_HOW.format(video)}")


def find_frame(reader: FrameReader, path: Path, item: InputImage, *, at_end: bool = False) -> InputImage:
    """Return a recorded image with the pixels of its frame; an image that is not a frame stays as it is.

    Args:
        reader: reads the frame.
        path: where the image is now.
        item: the image.
        at_end: read all of a video that has an error record, to find its error.
    """
    name = parse_frame_name(str(path))
    if name is None and at_end and is_video_name(path.name) and os.path.isfile(path):
        name = FrameName(str(path), _BEHIND_THE_END)
    return item if name is None else _read_frame(reader, name, item)


def _read_frame(reader: FrameReader, name: FrameName, item: InputImage) -> InputImage:
    """Return the image with the pixels of the frame, or with its error."""
    try:
        found = reader.read(Path(name.video), ALL_FRAMES, name.index)
    except ImageError as error:
        return replace(item, error=error)
    if found is None:
        return replace(item, error=ImageError("not_found", f"{name.video} has no frame {name.index}"))
    return _with_frame(item, Path(name.video), found)


def _frames(reader: FrameReader, item: InputImage, video: Path, sampling: Sampling | None) -> Iterator[InputImage]:
    if sampling is None:
        yield replace(item, error=undivided_error(video))
        return
    first = 0
    while True:
        try:
            found = reader.read(video, sampling, first)
        except ImageError as error:
            yield replace(item, error=error)
            return
        if found is None:
            return
        first = found.frame.index + 1
        mark = f"#frame={found.frame.index:06d}"
        yield _with_frame(InputImage.at(Path(f"{video}{mark}"), f"{item.relative}{mark}"), video, found)
        # a frame may take tens of megabytes, and the next one is decoded meanwhile
        del found


def _with_frame(item: InputImage, video: Path, found: DecodedFrame) -> InputImage:
    frame = found.frame
    info = FrameInfo(video, frame.index, frame.seconds, found.image_sha256)
    return replace(item, source=item.source if frame.pixels is None else frame.pixels, error=frame.error, frame=info)
