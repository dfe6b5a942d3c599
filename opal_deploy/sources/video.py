"""Frames of videos as images, decoded by PyAV from beginning to end: RGB, 8 bits, turned as a player shows them.

A frame is called `clip.mp4#frame=000120`, after its video and the number of frames that the decoder returned before it.
There is no seeking, since only decoding all frames gives the same ones each time. Codes of errors, besides `decode`'s:

    not_a_video        no demuxer recognises it
    no_frames          only audio, or no frame that can be decoded
    unsupported_video  no decoder for its codec, HDR, or no time stamps to choose frames by
    truncated_video    it ends before its header says; the frames before that are good
    corrupt_video      parts of it cannot be decoded; the frames before and after are good
    corrupt_frame      this frame, or one that it is predicted from, is damaged

FFmpeg's swscale converts YUV with the matrix and range that the video declares, as `ffmpeg -i clip.mp4 frame.png` does.
HDR (PQ, HLG) is refused: without tone mapping its frames would look washed out.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import ImageError, UsageError, first_line, require
from opal_deploy.preprocess.decode import MAX_PIXELS, open_file
from opal_deploy.preprocess.decode_errors import is_box_cut
from opal_deploy.remote import is_url
from opal_deploy.sources.image import FrameInfo, InputImage
from opal_deploy.sources.items import FRAME_NAME, is_video_name
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool, WorkerTimeout

# others may refer to further files, or to the network
_CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,mxf"
# AVColorTransferCharacteristic
_HDR = {16: "PQ", 18: "HLG"}
# a distant frame takes several calls, so that the time limit applies to lack of progress
_CALL_SECONDS = 1.0
_AFTER_THE_END = 10**15
_HOW = "choose its frames by `infer --every 1s`, or --every 30 for every 30th, or name one: {}#frame=0"


@dataclass(frozen=True)
class Sampling:
    """The frames that are taken of a video: every `frames`-th one, beginning with the first, or by time.

    By time: the first frame at or after 0, `seconds`, 2 · `seconds`, ... after the first one.
    """

    frames: int | None = None
    seconds: Fraction | None = None

    @staticmethod
    def parse(text: str) -> Sampling:
        """Return the frames that `10` (every tenth) or `0.5s` (two per second) stands for; else raise UsageError."""
        match = re.fullmatch(r"(\d+)|(\d+(?:\.\d*)?|\.\d+)\s?s", text.strip())
        value = Fraction(match[1] or match[2]) if match else Fraction()
        if match is None or value == 0:
            raise UsageError(f"--every {text!r}: expected frames, such as 10 (every tenth), or seconds, such as 0.5s")
        return Sampling(frames=int(value)) if match[1] else Sampling(seconds=value)

    def __str__(self) -> str:
        return f"{self.frames}" if self.seconds is None else f"{float(self.seconds):g}s"


ALL_FRAMES = Sampling(frames=1)


class Frame(NamedTuple):
    """A frame's place, and its pixels, uint8 [H, W, 3] RGB, or its error (`corrupt_frame`)."""

    info: FrameInfo
    content: NDArray[np.uint8] | ImageError


def require_pyav() -> None:
    """Raise MissingExtra unless PyAV is installed."""
    require("av", "video", "reading videos", pip_name="PyAV (av)")


# a chosen frame's place, PyAV's frame, and whether it is damaged; None at short intervals between them
_Step = tuple[FrameInfo, Any, bool] | None


def _decode_video(path: Path, sampling: Sampling, max_pixels: int) -> Iterator[_Step]:
    """Yield the chosen frames; raise ImageError after the last one if the video is damaged."""
    with open_file(path) as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            yield None
        with _open_container(file) as container:
            stream = _find_stream(container, max_pixels)
            rate = stream.average_rate or stream.guessed_rate
            seconds = following = offset = next_time = Fraction()
            for index, (frame, damaged) in enumerate(_decode_frames(container, stream)):
                if frame.color_trc in _HDR:
                    what = f"it is HDR ({_HDR[frame.color_trc]}), which is not read; convert it to SDR"
                    raise ImageError("unsupported_video", what)
                base = frame.time_base or stream.time_base
                is_timed = frame.pts is not None and base is not None
                stamp = frame.pts * Fraction(base) if is_timed else following + offset
                # time stamps of joined recordings begin again
                if not index or stamp - offset < seconds:
                    offset = stamp - following
                seconds = stamp - offset
                following = seconds + (1 / Fraction(rate) if rate else 0)
                is_timed = is_timed or bool(rate)
                if sampling.seconds is None:
                    chosen = index % (sampling.frames or 1) == 0
                elif not is_timed:
                    raise ImageError("unsupported_video", "it has no time stamps; give --every a number of frames")
                elif chosen := seconds >= next_time:
                    next_time = (seconds // sampling.seconds + 1) * sampling.seconds
                if chosen:
                    shown = round(float(seconds), 6) if is_timed else None
                    yield FrameInfo(path, index, shown, digest.hexdigest()), frame, damaged
                yield None


def _open_container(file: BinaryIO) -> Any:
    import av

    size = file.tell()
    if not size:
        raise ImageError("empty_file", "the file has zero bytes")
    file.seek(0)
    try:
        return av.open(file, "r", options={"format_whitelist": _CONTAINERS})
    except Exception:  # whatever FFmpeg finds
        file.seek(0)
        if file.read(8)[4:] == b"ftyp" and is_box_cut(file, size):
            raise ImageError("truncated_video", "it ends before its index; copy or record it again") from None
        raise ImageError("not_a_video", "no demuxer recognises it as a video") from None


def _find_stream(container: Any, max_pixels: int) -> Any:
    from av.stream import Disposition

    # album covers are video streams, too
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise ImageError("no_frames", "it has no video, perhaps only sound")
    stream = streams[0]
    if stream.codec_context is None:
        raise ImageError("unsupported_video", "this FFmpeg has no decoder for its codec; convert it to H.264")
    if stream.width * stream.height > max_pixels:
        limit = f"over the limit of {max_pixels:,} (--max-pixels)"
        raise ImageError("too_many_pixels", f"{stream.width}x{stream.height} is {limit}")
    # frames of another size than the header's come before anything else could refuse them
    options = {"max_pixels": str(max_pixels)}
    if stream.codec_context.name == "mjpeg":
        # without it, what cannot be decoded of a damaged frame keeps pixels of any earlier frame, and nothing says so
        options["err_detect"] = "explode"
    stream.codec_context.options = options
    # with several threads, the last frame of a cut video was marked as damaged in 14 of 15 readings
    stream.codec_context.thread_count = 1
    return stream


def _decode_frames(container: Any, stream: Any) -> Iterator[tuple[Any, bool]]:
    """Yield each frame, and whether it or one before it is damaged; then raise ImageError if frames are missing."""
    import av

    frames = packets = errors = 0
    damaged = is_cut = False
    # of all streams: sound may be longer than the video
    end, problem = Fraction(), ""
    try:
        for packet in container.demux():
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            if packet.stream is not stream:
                continue
            if packet.size:
                packets, is_cut = packets + 1, packet.is_corrupt
            try:
                decoded, is_wrong = _decode_packet(stream, packet)
            except av.FFmpegError:
                errors, damaged = errors + 1, True
                continue
            for frame in decoded:
                frames += 1
                damaged = is_wrong or frame.is_corrupt or (damaged and not frame.key_frame)
                yield frame, damaged
    except av.FFmpegError as error:
        problem = first_line(error)
    # FFmpeg counts in microseconds; headers round, and count the last frame's duration or not
    duration, start = (Fraction(value or 0, 1_000_000) for value in (container.duration, container.start_time))
    is_short = duration - (end - start) > min(Fraction(1), duration / 20)
    if is_cut or (packets < 0.99 * stream.frames - 1 if stream.frames else is_short):
        whole = f" of {stream.frames}" if stream.frames else f", {float(end - start):.1f} s of {float(duration):.1f} s"
        raise ImageError("truncated_video", f"it ends after {frames} frames{whole}; copy or record it again")
    if errors or problem:
        reason = problem or f"{errors} of its {packets} packets cannot be decoded"
        raise ImageError("corrupt_video", f"it is damaged: {reason}; what can be read of it was answered")
    if not frames:
        raise ImageError("no_frames", "it has no frame")


def _decode_packet(stream: Any, packet: Any) -> tuple[list[Any], bool]:
    """Return the packet's frames, and whether one of its checksums is wrong."""
    from av import logging

    if stream.codec_context.name != "ffv1":
        return stream.decode(packet), False
    # FFmpeg fills the slices in question from the previous frame, and only its log says so
    level = logging.get_level()
    logging.set_level(logging.ERROR)
    try:
        with logging.Capture() as errors:
            return stream.decode(packet), bool(errors)
    finally:
        logging.set_level(level)


def _to_pixels(frame: Any, matrix: list[int]) -> NDArray[np.uint8]:
    """Return a frame's pixels, uint8 [H, W, 3] RGB, turned by a display matrix; raise ImageError."""
    try:
        pixels = frame.to_ndarray(format="rgb24")
    except Exception:  # whatever swscale says
        why = f"its pixels ({frame.format.name}) are not converted to RGB"
        raise ImageError("unsupported_video", why) from None
    if matrix:
        # (x, y) becomes (a x + c y, b x + d y): libavutil/display.h; rounded to quarter turns and reflections
        a, b, _, c, d, *_ = matrix
        if abs(b) + abs(c) > abs(a) + abs(d):
            pixels, (a, d) = pixels.transpose(1, 0, 2), (c, b)
        pixels = pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
    return np.ascontiguousarray(pixels, np.uint8)


class _OpenVideo:
    """The video that is being decoded, from beginning to end; for one thread."""

    def __init__(self) -> None:
        self._key: tuple[str, Sampling, int] | None = None
        self._steps: Iterator[_Step] = iter(())
        self._next_index = 0
        self._matrix: list[int] | None = None

    def read(self, path: str, sampling: Sampling, first: int, max_pixels: int) -> Frame | bool:
        """Return the next of the chosen frames from `first` on; True: not reached yet, False: after the last one."""
        key, until = (path, sampling, max_pixels), time.monotonic() + _CALL_SECONDS
        if self._key != key or self._next_index > first:
            self._key, self._next_index, self._matrix = key, 0, None
            self._steps = _decode_video(Path(path), sampling, max_pixels)
        try:
            for step in self._steps:
                if step is not None and step[0].index >= first:
                    return self._finish(*step)
                if time.monotonic() > until:
                    return True
        except ImageError:
            self._key = None
            raise
        self._key = None
        return False

    def _finish(self, info: FrameInfo, frame: Any, damaged: bool) -> Frame:
        self._next_index = info.index + 1
        if damaged:
            why = "its data, or that of a frame that it is predicted from, is damaged"
            return Frame(info, ImageError("corrupt_frame", why))
        if self._matrix is None:
            # once, since only the garbage collector frees a frame whose side data was read
            data = [data for data in frame.side_data if data.type.name == "DISPLAYMATRIX"]
            self._matrix = np.frombuffer(data[0], np.int32).tolist() if data else []
        return Frame(info, _to_pixels(frame, self._matrix))


# of a worker process
_open_video = _OpenVideo()


def _read_in_worker(path: str, sampling: Sampling, first: int, max_pixels: int) -> Frame | bool:
    return _open_video.read(path, sampling, first, max_pixels)


class FrameReader:
    """Reads frames of videos, for one thread at a time; a context manager, which ends its process."""

    def __init__(self, max_pixels: int = MAX_PIXELS, *, isolate: bool = False, timeout: float | None = None) -> None:
        """Start nothing yet; `isolate`: decode in a process, with a `timeout` in seconds without progress."""
        self._max_pixels, self._timeout, self._open_video = max_pixels, timeout, _OpenVideo()
        self._pool = WorkerPool(1, timeout) if isolate else None

    def read(self, path: Path, sampling: Sampling, first: int = 0) -> Frame | None:
        """Return the next of the chosen frames from the index `first` on; None after the last one.

        Frames that are read in order are decoded once.

        Raises:
            ImageError: the video is damaged; after all frames that can be read.
            StoppedEarly: no process can be started. MissingExtra: PyAV is not installed.
        """
        require_pyav()
        arguments, crashes = (str(path), sampling, first, self._max_pixels), 0
        while True:
            try:
                if self._pool is None:
                    frame = self._open_video.read(*arguments)
                else:
                    frame = self._pool.call(_read_in_worker, *arguments)
            except WorkerCrashed as crash:
                # the first crash may be a lack of memory; a new process decodes up to the frame again
                crashes += 1
                if crashes < 2:
                    continue
                raise ImageError("decoder_crashed", f"its decoder {crash}, each of 2 times") from None
            except WorkerTimeout:
                why = f"its decoder stood still for {self._timeout or 0:g} s; raise --decode-timeout"
                raise ImageError("decode_timeout", why) from None
            if not isinstance(frame, bool):
                return frame
            if not frame:
                return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        if self._pool is not None:
            self._pool.close()


@dataclass(frozen=True)
class VideoOptions:
    """The frames that are taken (None: only those that are named), and the arguments of `FrameReader`."""

    sampling: Sampling | None = None
    max_pixels: int = MAX_PIXELS
    isolate: bool = False
    timeout: float | None = None


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
    if parse_frame_name(text) is not None:
        require_pyav()
    elif is_video_name(text) and is_url(text):
        raise UsageError(f"{text}: videos are read from disks only; download it first")
    elif is_video_name(text) and os.path.isfile(text):
        if sampling is None:
            raise UsageError(f"{text}: it is a video; {_HOW.format(text)}")
        require_pyav()


def expand_videos(items: Iterable[InputImage], options: VideoOptions) -> Iterator[InputImage]:
    """Yield the images, with the chosen frames in place of each video, after them an error if it is damaged."""
    with FrameReader(options.max_pixels, isolate=options.isolate, timeout=options.timeout) as reader:
        for item in items:
            if item.error is not None or not isinstance(item.source, Path):
                yield item
            elif (name := parse_frame_name(str(item.source))) is not None:
                yield _read_frame(reader, name, item)
            elif is_video_name(item.source.name):
                yield from _sample_frames(reader, item, item.source, options.sampling)
            else:
                yield item


def undivided_error(video: Path) -> ImageError:
    """Return the error of a video that is listed where no frames of videos are chosen."""
    return ImageError("not_an_image", f"it is a video; {_HOW.format(video)}")


def find_frame(reader: FrameReader, path: Path, item: InputImage, *, at_end: bool = False) -> InputImage:
    """Return the recorded image at `path` with the pixels of its frame; an image that is not a frame stays as it is.

    `at_end`: read all of a video that has an error record, to find its error.
    """
    name = parse_frame_name(str(path))
    if name is None and at_end and is_video_name(path.name) and os.path.isfile(path):
        name = FrameName(str(path), _AFTER_THE_END)
    return item if name is None else _read_frame(reader, name, item)


def _read_frame(reader: FrameReader, name: FrameName, item: InputImage) -> InputImage:
    """Return the image with the pixels of the frame, or with its error."""
    try:
        frame = reader.read(Path(name.video), ALL_FRAMES, name.index)
    except ImageError as error:
        return replace(item, error=error)
    if frame is None:
        return replace(item, error=ImageError("not_found", f"{name.video} has no frame {name.index}"))
    return _with_frame(item, frame)


def _sample_frames(
    reader: FrameReader, item: InputImage, video: Path, sampling: Sampling | None
) -> Iterator[InputImage]:
    if sampling is None:
        yield replace(item, error=undivided_error(video))
        return
    try:
        first = 0
        while (frame := reader.read(video, sampling, first)) is not None:
            first = frame.info.index + 1
            mark = f"#frame={frame.info.index:06d}"
            yield _with_frame(InputImage.at(Path(f"{video}{mark}"), f"{item.relative}{mark}"), frame)
            # a frame may take tens of megabytes, and the next one is decoded meanwhile
            del frame
    except ImageError as error:
        yield replace(item, error=error)


def _with_frame(item: InputImage, frame: Frame) -> InputImage:
    if isinstance(frame.content, ImageError):
        return replace(item, error=frame.content, frame=frame.info)
    return replace(item, source=frame.content, frame=frame.info)
