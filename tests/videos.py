"""Videos for tests, encoded by PyAV, and a decoder that crashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np

from opal_deploy.sources.video import Frame, _next_in_worker

# every tenth frame is a key frame
FRAMES, RATE, KEY = 30, 10, 10


def picture(number: int, size: tuple[int, int] = (64, 48)) -> np.ndarray:
    """Return the frame of this number: its grey level says which it is; the top left is red."""
    pixels = np.full((size[1], size[0], 3), 20 + 7 * number, np.uint8)
    pixels[: size[1] // 2, : size[0] // 2] = (200, 30, 30)
    return pixels


def noise(number: int) -> np.ndarray:
    """Return a frame that takes as many bytes as any other."""
    return np.random.default_rng(number).integers(0, 255, (48, 64, 3), np.uint8)


def number_of(pixels: np.ndarray) -> int:
    """Return the number of the frame of these pixels, read off its bottom right."""
    height, width = pixels.shape[:2]
    return round((float(pixels[height * 3 // 4, width * 3 // 4].mean()) - 20) / 7)


def write_video(
    path: Path,
    codec: str = "libx264",
    *,
    frames: int = FRAMES,
    pixel_format: str = "yuv420p",
    rotation: float | None = None,
    options: Mapping[str, str] = {},
    draw: Callable[[int], np.ndarray] = picture,
    colorspace: str | None = None,
) -> Path:
    """Write a video of `frames` frames, ten a second; `rotation` counter-clockwise in degrees."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faststart = {"movflags": "faststart"} if path.suffix == ".mp4" else {}
    with av.open(str(path), "w", options=faststart) as container:
        stream: Any = container.add_stream(codec, rate=RATE)
        first = draw(0)
        stream.width, stream.height, stream.pix_fmt = first.shape[1], first.shape[0], pixel_format
        stream.codec_context.gop_size = KEY
        stream.bit_rate = 2_000_000
        stream.options = dict(options)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(draw(number), "rgb24")
            if colorspace is not None:
                # these numbers are in the stream's header: BT.709 is 1, BT.601 is 6
                stream.codec_context.colorspace = {"ITU709": 1, "ITU601": 6}[colorspace]
                frame = frame.reformat(format=pixel_format, dst_colorspace=colorspace)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_sound(path: Path) -> Path:
    """Write a file of sound alone."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), "fltp", "mono")
        frame.rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def damage(path: Path, *, start: float = 0.5, count: int = 3000) -> Path:
    """Overwrite bytes in the middle of a file."""
    data = bytearray(path.read_bytes())
    at = int(len(data) * start)
    data[at : at + count] = bytes(255 - byte for byte in data[at : at + count])
    path.write_bytes(data)
    return path


def cut(path: Path, share: float = 0.6) -> Path:
    """Keep only the first bytes of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def crash_at_ten() -> Any:
    """Crash or stop the process after frame 9 of a video called so; see `video._next_in_worker`."""
    step = _next_in_worker()
    if isinstance(step, Frame) and step.info.index >= 10 and step.info.video.stem in ("crash", "stop"):
        os.kill(os.getpid(), signal.SIGSEGV if step.info.video.stem == "crash" else signal.SIGSTOP)
    return step
