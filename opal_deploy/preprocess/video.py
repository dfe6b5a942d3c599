"""From a video file to its frames: RGB, 8 bits, turned as a player shows them, decoded from beginning to end by PyAV.

A frame is known by its index, the number of frames that the decoder returned before it. There is no seeking: every
frame depends on those before it, and only decoding all of them gives the same frames each time, whatever the file's own
index says. Any fault of a video ends in an ImageError with one of these codes, or one of `decode`'s:

    not_a_video        no demuxer recognises it
    no_frames          only audio, or no frame that can be decoded
    unsupported_video  no decoder for its codec, HDR, or no time stamps to choose frames by
    truncated_video    it ends before its header says; the frames before that are good
    corrupt_video      parts of it cannot be decoded; the frames before and after are good
    corrupt_frame      the decoder filled in missing data of this frame, or of one that it is predicted from

Colour: YUV is converted by FFmpeg's swscale with the matrix (BT.601, BT.709, BT.2020) and the range that the video
declares, by default BT.601 and limited range, as `ffmpeg -i clip.mp4 frame.png` does. 10 and 12 bits become 8. HDR (PQ,
HLG) is refused: without tone mapping its frames would look washed out. Transparency is dropped; interlaced frames and
non-square pixels are not converted.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import ImageError, UsageError, first_line, require
from opal_deploy.preprocess.decode import MAX_PIXELS, open_file
from opal_deploy.preprocess.decode_errors import is_box_cut

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.stream import VideoStream

# others may refer to further files, or to the network
_CONTAINERS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,asf,ogg,mxf"
_CHUNK = 1 << 20
# AVColorTransferCharacteristic
_HDR = {16: "PQ", 18: "HLG"}
# headers round, and count the last frame's duration or not: a share of the duration, and a second at most
_ROUNDING, _ROUNDING_SECONDS = Fraction(1, 20), 1
# of FFmpeg's times of whole files
_MICROSECONDS = 1_000_000


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


@dataclass(frozen=True)
class VideoFrame:
    """A frame of a video.

    Attributes:
        index, seconds: number of frames before it, and time after the first one; None without time stamps.
        pixels: uint8 [H, W, 3] RGB, turned as a player shows it; None if there is an error.
        error: `corrupt_frame`; None for a good frame.
    """

    index: int
    seconds: float | None
    pixels: NDArray[np.uint8] | None = None
    error: ImageError | None = None


class Progress(Enum):
    """The reason why `VideoReader.read` returns no frame."""

    unfinished = "the time is over"
    ended = "there are no more frames"


def require_pyav() -> None:
    """Raise MissingExtra unless PyAV is installed."""
    require("av", "video", "reading videos", pip_name="PyAV (av)")


class VideoReader:
    """Reads the frames of a video in order; a context manager, which closes the file.

    Attributes:
        sha256: hex digest of the file; empty before the first frame.
        next_index: earlier frames cannot be read any more.
    """

    def __init__(self, path: Path, sampling: Sampling, max_pixels: int = MAX_PIXELS) -> None:
        """Open the file, and decode nothing yet; raise ImageError or MissingExtra if that is impossible."""
        require_pyav()
        self._sampling, self._max_pixels = sampling, max_pixels
        self._file = open_file(path)
        self._first = 0
        self._steps = self._run()
        self.sha256 = ""
        self.next_index = 0

    def read(self, first: int = 0, patience: float = float("inf")) -> VideoFrame | Progress:
        """Return the next of the chosen frames.

        Args:
            first: frames before this index are decoded and skipped.
            patience: seconds after which `Progress.unfinished` is returned; the next call continues.

        Raises:
            ImageError: the video is damaged; after all frames that can be read.
        """
        self._first = first
        until = time.monotonic() + patience
        for frame in self._steps:
            if frame is not None:
                self.next_index = frame.index + 1
                return frame
            if time.monotonic() > until:
                return Progress.unfinished
        return Progress.ended

    def close(self) -> None:
        """Close the file."""
        self._steps.close()
        self._file.close()

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _run(self) -> Generator[VideoFrame | None, None, None]:
        """Yield the chosen frames, and None at short intervals between them."""
        digest = hashlib.sha256()
        while chunk := self._file.read(_CHUNK):
            digest.update(chunk)
            yield None
        self.sha256 = digest.hexdigest()
        with _open(self._file) as container:
            stream = _find_stream(container, self._max_pixels)
            decoder, clock, converter = _Decoder(container, stream), _Clock(stream), _Converter()
            next_time = Fraction()
            for index, frame in enumerate(decoder.decode()):
                if frame.color_trc in _HDR:
                    raise ImageError(
                        "unsupported_video",
                        f"it is HDR ({_HDR[frame.color_trc]}), which is not read; convert it to SDR",
                    )
                seconds, chosen = clock.read(frame), False
                if self._sampling.seconds is None:
                    chosen = index % cast(int, self._sampling.frames) == 0
                elif seconds is None:
                    raise ImageError("unsupported_video", "it has no time stamps; give --every a number of frames")
                elif seconds >= next_time:
                    chosen, next_time = True, (seconds // self._sampling.seconds + 1) * self._sampling.seconds
                if chosen and index >= self._first:
                    shown = None if seconds is None else round(float(seconds), 6)
                    yield (
                        VideoFrame(index, shown, error=_CORRUPT)
                        if decoder.damaged
                        else VideoFrame(index, shown, converter.convert(frame))
                    )
                yield None
            decoder.check_end()


_CORRUPT = ImageError("corrupt_frame", "its data, or that of a frame that it is predicted from, is damaged")


def _open(file: BinaryIO) -> InputContainer:
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
            why = "it ends before its index, without which nothing of it can be decoded; copy or record it again"
            raise ImageError("truncated_video", why) from None
        raise ImageError("not_a_video", "no demuxer recognises it as a video") from None


def _find_stream(container: InputContainer, max_pixels: int) -> VideoStream:
    from av.stream import Disposition

    # album covers are video streams, too
    streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
    if not streams:
        raise ImageError("no_frames", "it has no video, perhaps only sound")
    stream = streams[0]
    if stream.codec_context is None:
        raise ImageError("unsupported_video", "this FFmpeg has no decoder for its codec; convert it to H.264")
    pixels = stream.width * stream.height
    if pixels > max_pixels:
        raise ImageError(
            "too_many_pixels",
            f"{stream.width}x{stream.height} is {pixels:,} pixels, over the limit of {max_pixels:,} (--max-pixels)",
        )
    # frames of another size than the header's come before anything else could refuse them
    options = {"max_pixels": str(max_pixels)}
    if stream.codec_context.name == "mjpeg":
        # without it, what cannot be decoded of a damaged frame keeps pixels of any earlier frame, and nothing says so
        options["err_detect"] = "explode"
    stream.codec_context.options = options
    # with several threads, the last frame of a cut video was marked as damaged in 14 of 15 readings
    stream.codec_context.thread_count = 1
    return stream


class _Clock:
    """The time of each frame after the first; it never decreases, as time stamps do in joined recordings."""

    def __init__(self, stream: VideoStream) -> None:
        rate = stream.average_rate or stream.guessed_rate
        self._step = 1 / Fraction(rate) if rate else None
        self._time_base = stream.time_base
        self._offset = self._last = Fraction(-1)

    def read(self, frame: av.VideoFrame) -> Fraction | None:
        """Return the seconds after the first frame; None without time stamps and frame rate."""
        base = frame.time_base or self._time_base
        stamp = None if frame.pts is None or base is None else frame.pts * Fraction(base)
        following = Fraction() if self._last < 0 else self._last + (self._step or 0)
        if stamp is None:
            if self._step is None:
                return None
            self._last = following
        else:
            if self._last < 0 or stamp - self._offset < self._last:
                self._offset = stamp - following
            self._last = stamp - self._offset
        return self._last


class _Decoder:
    """Decodes a video stream, and finds how much is missing; `damaged`: whether the last frame, or one it needs, is."""

    def __init__(self, container: InputContainer, stream: VideoStream) -> None:
        self._container, self._stream = container, stream
        self.damaged = False
        self._packets = self._frames = self._errors = 0
        # the last packet of the stream is not whole
        self._is_cut = False
        # of all streams, in seconds: sound may be longer than the video
        self._end = Fraction()
        self._reading_error = ""

    def decode(self) -> Iterator[av.VideoFrame]:
        """Yield the frames that can be decoded."""
        import av

        try:
            for packet in self._container.demux():
                if packet.pts is not None and packet.time_base is not None:
                    self._end = max(self._end, (packet.pts + (packet.duration or 0)) * packet.time_base)
                if packet.stream is not self._stream:
                    continue
                if packet.size:
                    # the last one has no data, and flushes the decoder
                    self._packets += 1
                    self._is_cut = packet.is_corrupt
                try:
                    frames, failed_checksums = self._decode_packet(packet)
                except av.FFmpegError:
                    self._errors += 1
                    self.damaged = True
                    continue
                for frame in frames:
                    self._frames += 1
                    self.damaged = failed_checksums or frame.is_corrupt or (self.damaged and not frame.key_frame)
                    yield frame
        except av.FFmpegError as error:
            self._reading_error = first_line(error)

    def _decode_packet(self, packet: av.Packet[Any]) -> tuple[list[av.VideoFrame], bool]:
        """Return the packet's frames, and whether one of its checksums is wrong."""
        if self._stream.codec_context.name != "ffv1":
            return self._stream.decode(packet), False
        # FFmpeg fills the slices in question from the previous frame, and only its log says so
        with _capture_errors() as errors:
            return self._stream.decode(packet), bool(errors)

    def check_end(self) -> None:
        """Raise ImageError if frames are missing, after all were taken."""
        start = Fraction(self._container.start_time or 0, _MICROSECONDS)
        seconds = self._end - start
        duration, expected = Fraction(self._container.duration or 0, _MICROSECONDS), self._stream.frames
        if expected:
            is_short, whole = self._packets < 0.99 * expected - 1, f" of {expected}"
        else:
            is_short = duration - seconds > min(Fraction(_ROUNDING_SECONDS), duration * _ROUNDING)
            whole = f" of {float(duration):.1f} s" if duration else ""
        if is_short or self._is_cut:
            found = f"{self._frames} frames" if expected else f"{self._frames} frames, {float(seconds):.1f} s"
            raise ImageError("truncated_video", f"it ends after {found}{whole}; copy or record it again")
        if self._errors or self._reading_error:
            reason = self._reading_error or f"{self._errors} of its {self._packets} packets cannot be decoded"
            raise ImageError("corrupt_video", f"it is damaged: {reason}; what can be read of it was answered")
        if not self._frames:
            raise ImageError("no_frames", "it has no frame")


@contextmanager
def _capture_errors() -> Iterator[list[tuple[int, str, str]]]:
    """Yield the list that receives this thread's FFmpeg errors while the block runs."""
    from av import logging

    level = logging.get_level()
    logging.set_level(logging.ERROR)
    try:
        with logging.Capture() as errors:
            yield errors
    finally:
        logging.set_level(level)


class _Converter:
    """Converts frames to RGB images, turned as a player shows them."""

    def __init__(self) -> None:
        self._rotation: int | None = None
        self._matrix: list[int] = []

    def convert(self, frame: av.VideoFrame) -> NDArray[np.uint8]:
        """Return the pixels, uint8 [H, W, 3] RGB; raise ImageError if swscale cannot convert them."""
        try:
            pixels = frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
        except Exception:  # whatever swscale says
            why = f"its pixels ({frame.format.name}) are not converted to RGB"
            raise ImageError("unsupported_video", why) from None
        if self._rotation != frame.rotation:
            # not for each frame: only the garbage collector frees a frame whose side data was read
            self._rotation, self._matrix = frame.rotation, _read_display_matrix(frame)
        return np.ascontiguousarray(_turn(pixels, self._matrix)) if self._matrix else pixels


def _read_display_matrix(frame: av.VideoFrame) -> list[int]:
    """Return the nine numbers of the display matrix, which phones write; empty without one."""
    data: Any = next((data for data in cast(Any, frame.side_data) if data.type.name == "DISPLAYMATRIX"), None)
    return [] if data is None else np.frombuffer(data, np.int32).tolist()


def _turn(pixels: NDArray[np.uint8], matrix: list[int]) -> NDArray[np.uint8]:
    """Apply a display matrix, rounded to quarter turns and reflections.

    It maps (x, y), y downwards, to (a x + c y, b x + d y): `libavutil/display.h`.
    """
    a, b, _, c, d, *_ = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, (a, d) = pixels.transpose(1, 0, 2), (c, b)
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
