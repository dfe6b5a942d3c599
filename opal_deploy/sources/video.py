"""Frames of videos as images, decoded by PyAV from beginning to end: RGB, 8 bits, turned as a player shows them.

A frame is called `clip.mp4#frame=000120`, after its video and the number of frames that the decoder returned before it.
There is no seeking, since only decoding all frames gives the same ones each time. Codes of errors, besides `decode`'s:

    not_a_video        no demuxer recognises it
    no_frames          only audio, or no frame that can be decoded
    unsupported_video  no decoder for its codec, FFV1, HDR, or no time stamps to choose frames by
    truncated_video    it ends before its header says; the frames before that are good
    corrupt_video      parts of it cannot be decoded; the frames before and after are good
    corrupt_frame      this frame, or one that it is predicted from, is damaged

FFmpeg's swscale converts YUV with the matrix and range that the video declares, as `ffmpeg -i clip.mp4 frame.png` does.
HDR (PQ, HLG) is refused: without tone mapping its frames would look washed out.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import MAX_PIXELS, open_file
from opal_deploy.remote import is_url
from opal_deploy.sources.image import FrameInfo, InputImage, is_video_name
from opal_deploy.worker_pool import WorkerCrashed, WorkerPool, WorkerTimeout

_DAMAGED = ImageError("corrupt_frame", "its data, or that of a frame that it is predicted from, is damaged")
VIDEO_CODES = ("not_a_video", "no_frames", "unsupported_video", "truncated_video", "corrupt_video", "corrupt_frame")

# others may refer to further files, or to the network
_CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,mxf"
# AVColorTransferCharacteristic
_HDR = {16: "PQ", 18: "HLG"}
# a chosen frame may lie thousands of frames after the one before
_TIME_LIMITS = 10


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


class Frame(NamedTuple):
    """A frame's place, and its pixels, uint8 [H, W, 3] RGB, or its error (`corrupt_frame`)."""

    info: FrameInfo
    content: NDArray[np.uint8] | ImageError


def _decode_video(path: Path, sampling: Sampling, max_pixels: int) -> Iterator[Frame]:
    """Yield the chosen frames; raise ImageError after the last one if the video is damaged."""
    with open_file(path) as file:
        digest = hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()
        with _open_container(file) as container:
            stream = _find_stream(container, max_pixels)
            rate = stream.average_rate or stream.guessed_rate
            start: Fraction | None = None
            next_time = Fraction()
            for index, (frame, damaged) in enumerate(_decode_frames(container, stream)):
                base, seconds = frame.time_base or stream.time_base, None
                if frame.pts is not None and base is not None:
                    stamp = frame.pts * Fraction(base)
                    start = stamp if start is None else start
                    seconds = stamp - start
                elif rate:
                    seconds = index / Fraction(rate)
                if sampling.seconds is None:
                    chosen = index % (sampling.frames or 1) == 0
                elif seconds is None:
                    raise ImageError("unsupported_video", "it has no time stamps; give --every a number of frames")
                elif chosen := seconds >= next_time:
                    next_time = (seconds // sampling.seconds + 1) * sampling.seconds
                if chosen:
                    shown = None if seconds is None else round(float(seconds), 6)
                    yield Frame(FrameInfo(path, index, shown, digest), _DAMAGED if damaged else _to_pixels(frame))


def _open_container(file: BinaryIO) -> Any:
    import av

    if not file.tell():
        raise ImageError("empty_file", "the file has zero bytes")
    file.seek(0)
    try:
        return av.open(file, "r", options={"format_whitelist": _CONTAINERS})
    except Exception:  # whatever FFmpeg finds
        raise ImageError("not_a_video", "no demuxer recognises it, or it ends before its index") from None


def _find_stream(container: Any, max_pixels: int) -> Any:
    from av.stream import Disposition

    # album covers are video streams, too
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise ImageError("no_frames", "it has no video, perhaps only sound")
    stream = streams[0]
    # FFV1's decoder fills what is damaged of a frame from the one before, and marks nothing
    if stream.codec_context is None or stream.codec_context.name == "ffv1":
        raise ImageError("unsupported_video", "its codec is not read; convert it to H.264")
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

    frames = errors = 0
    damaged = is_cut = False
    # of all streams: sound may be longer than the video
    end = Fraction()
    try:
        for packet in container.demux():
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            if packet.stream is not stream:
                continue
            # the last packet is empty
            is_cut = packet.is_corrupt if packet.size else is_cut
            try:
                decoded = stream.decode(packet)
            except av.FFmpegError:
                errors, damaged = errors + 1, True
                continue
            for frame in decoded:
                if frame.color_trc in _HDR:
                    raise ImageError("unsupported_video", f"it is HDR ({_HDR[frame.color_trc]}); convert it to SDR")
                frames += 1
                damaged = frame.is_corrupt or (damaged and not frame.key_frame)
                yield frame, damaged
    except av.FFmpegError:
        errors += 1
    # FFmpeg counts in microseconds; headers round, and count the last frame's duration or not
    duration, start = (Fraction(value or 0, 1_000_000) for value in (container.duration, container.start_time))
    if is_cut or duration - (end - start) > min(Fraction(1), duration / 20):
        raise ImageError("truncated_video", f"it ends early, after {frames} frames; copy or record it again")
    if errors:
        raise ImageError("corrupt_video", f"{errors} of its packets cannot be decoded; what can be read was answered")
    if not frames:
        raise ImageError("no_frames", "it has no frame")


def _to_pixels(frame: Any) -> NDArray[np.uint8]:
    """Return a frame's pixels, uint8 [H, W, 3] RGB, turned as the video says, by quarter turns; raise ImageError."""
    try:
        pixels = frame.to_ndarray(format="rgb24")
    except Exception:  # whatever swscale says
        raise ImageError("unsupported_video", f"its pixels ({frame.format.name}) are not converted to RGB") from None
    return np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)), np.uint8)


# of a worker process: the frames of the video that it is decoding
_frames: Iterator[Frame] | None = None


def _start_in_worker(path: Path, sampling: Sampling, max_pixels: int) -> None:
    global _frames
    _frames = _decode_video(path, sampling, max_pixels)


def _next_in_worker() -> Frame | None:
    """Return the next frame; None after the last one."""
    if _frames is None:
        raise ImageError("decoder_crashed", "its decoder was killed")
    return next(_frames, None)


def _decode_isolated(pool: WorkerPool, path: Path, sampling: Sampling, options: VideoOptions) -> Iterator[Frame]:
    """Yield as `_decode_video`, from a process; if that crashes or makes no progress, raise ImageError."""
    try:
        pool.call(_start_in_worker, path, sampling, options.max_pixels)
        while frame := pool.call(_next_in_worker):
            yield frame
    except WorkerCrashed as crash:
        raise ImageError("decoder_crashed", f"its decoder {crash}") from None
    except WorkerTimeout as timeout:
        raise ImageError("decode_timeout", f"decoding its next frame {timeout}; raise --decode-timeout") from None


@dataclass(frozen=True)
class VideoOptions:
    """How videos are read.

    Attributes:
        sampling: the frames that are taken; None: a video is refused.
        max_pixels: width times height above which a video is refused.
        isolate: decode in a process.
        timeout: a tenth of the seconds that the next frame may take, with `isolate`; None: no limit.
    """

    sampling: Sampling | None = None
    max_pixels: int = MAX_PIXELS
    isolate: bool = False
    timeout: float | None = None


# for a call that takes no videos
NO_VIDEOS = VideoOptions()


def check_video_input(text: str, sampling: Sampling | None) -> None:
    """Raise UsageError for a video on a server, or without a choice of frames."""
    if is_video_name(text) and is_url(text):
        raise UsageError(f"{text}: videos are read from disks only; download it first")
    if sampling is None and is_video_name(text) and os.path.isfile(text):
        raise UsageError(f"{text}: {undivided_error()}")


def undivided_error() -> ImageError:
    """Return the error of a video that is listed where no frames of videos are chosen."""
    return ImageError("not_an_image", "it is a video; choose its frames by `infer --every 1s`, or --every 30 (frames)")


def expand_videos(items: Iterable[InputImage], options: VideoOptions) -> Iterator[InputImage]:
    """Yield the images, with the chosen frames in place of each video, after them an error if it is damaged."""
    timeout = None if options.timeout is None else _TIME_LIMITS * options.timeout
    with WorkerPool(1, timeout) if options.isolate else nullcontext() as pool:
        for item in items:
            if item.error is not None or not isinstance(item.source, Path) or not is_video_name(item.source.name):
                yield item
            elif options.sampling is None:
                yield replace(item, error=undivided_error())
            else:
                yield from _expand_video(item, item.source, options.sampling, options, pool)


def _expand_video(
    item: InputImage, video: Path, sampling: Sampling, options: VideoOptions, pool: WorkerPool | None
) -> Iterator[InputImage]:
    if pool is None:
        frames = _decode_video(video, sampling, options.max_pixels)
    else:
        frames = _decode_isolated(pool, video, sampling, options)
    try:
        for info, content in frames:
            mark = f"#frame={info.index:06d}"
            error, pixels = (content, None) if isinstance(content, ImageError) else (None, content)
            named = InputImage.at(Path(f"{video}{mark}"), f"{item.relative}{mark}", error, pixels)
            yield replace(named, frame=info)
    except ImageError as error:
        yield replace(item, error=error)
