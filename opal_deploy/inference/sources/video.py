"""Frames of videos as images: which of the items found are videos, and the names of their frames.

A frame is called `clip.mp4#frame=000120`, after its video and the number of frames before it: names sort as the frames
follow each other, and `explain` and `verify` find the frame again by its name alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.decoding.frames import DecodedFrame, FrameReader
from opal_deploy.inference.sources.items import FRAME_NAME, FrameInfo, Item, is_video_name
from opal_deploy.preprocess.decode import MAX_PIXELS
from opal_deploy.preprocess.video import ALL_FRAMES, Sampling, require_pyav
from opal_deploy.storage.urls import is_url

_HOW = "choose its frames by `infer --every 1s`, or --every 30 for every 30th, or name one: {}#frame=0"


@dataclass(frozen=True)
class VideoOptions:
    """How videos are read.

    Attributes:
        sampling: the frames to take; None: only those that are named.
        max_pixels: width times height above which a video is refused.
        isolate: decode in a process, so that a decoder that crashes or hangs costs one video.
        timeout: seconds that decoding may stand still; None: no limit.
    """

    sampling: Sampling | None = None
    max_pixels: int = MAX_PIXELS
    isolate: bool = False
    timeout: float | None = None

    def open_reader(self) -> FrameReader:
        """Return what reads the frames."""
        return FrameReader(self.max_pixels, isolate=self.isolate, timeout=self.timeout)


_BEHIND_THE_END = 10**15
# of a call that takes only frames that it names
NO_VIDEOS = VideoOptions()


@dataclass(frozen=True)
class FrameName:
    """A frame by its name: its video, and the number of frames before it."""

    video: str
    index: int


def parse_frame_name(name: str) -> FrameName | None:
    """Return the frame that a path names, `clip.mp4#frame=000120`; None for every other path, and for a file."""
    match = FRAME_NAME.fullmatch(name)
    if match is None or not is_video_name(match[1]) or is_url(name) or os.path.lexists(name):
        return None
    return FrameName(match[1], int(match[2]))


def check_video_input(text: str, sampling: Sampling | None) -> None:
    """Refuse an input that is a video without a choice of frames, or that cannot be read.

    Raises:
        UsageError: it is a video on a server, or no frames are chosen. MissingExtra: PyAV is not installed.
    """
    frame = parse_frame_name(text)
    if frame is not None:
        require_pyav()
    elif is_video_name(text) and is_url(text):
        raise UsageError(f"{text}: videos are read from disks only; download it first")
    elif is_video_name(text) and os.path.isfile(text):
        if sampling is None:
            raise UsageError(f"{text}: it is a video; {_HOW.format(text)}")
        require_pyav()


def expand_videos(items: Iterable[Item], options: VideoOptions) -> Iterator[Item]:
    """Yield the items, with the chosen frames in place of each video.

    A video that is damaged or cannot be read is an item with a problem behind the frames that it gave.
    """
    with options.open_reader() as reader:
        for item in items:
            if item.content is not None or item.problem is not None or not isinstance(item.path, Path):
                yield item
            elif (name := parse_frame_name(str(item.path))) is not None:
                yield _read_frame(reader, name, item)
            elif is_video_name(item.path.name):
                yield from _frames(reader, item, item.path, options.sampling)
            else:
                yield item


def find_frame(reader: FrameReader, path: Path, item: Item, *, at_end: bool = False) -> Item:
    """Return the item of a recorded image with the frame that its path names; any other item as it is.

    Args:
        reader: reads the frame.
        path: where the image is now.
        item: the image.
        at_end: of a video itself, find what is wrong with it by reading all of it.
    """
    name = parse_frame_name(str(path))
    if name is None and at_end and is_video_name(path.name) and path.is_file():
        name = FrameName(str(path), _BEHIND_THE_END)
    return item if name is None else _read_frame(reader, name, item)


def _read_frame(reader: FrameReader, name: FrameName, item: Item) -> Item:
    """Return the item with the pixels of the frame that it names, or with the reason why there are none."""
    try:
        found = reader.read(Path(name.video), ALL_FRAMES, name.index)
    except ImageError as error:
        return replace(item, problem=error)
    if found is None:
        return replace(item, problem=ImageError("not_found", f"{name.video} has no frame {name.index}"))
    return _with_frame(item, Path(name.video), found)


def _frames(reader: FrameReader, item: Item, video: Path, sampling: Sampling | None) -> Iterator[Item]:
    if sampling is None:
        yield replace(item, problem=ImageError("not_an_image", f"it is a video; {_HOW.format(video)}"))
        return
    first = 0
    while True:
        try:
            found = reader.read(video, sampling, first)
        except ImageError as error:
            yield replace(item, problem=error)
            return
        if found is None:
            return
        first = found.frame.index + 1
        mark = f"#frame={found.frame.index:06d}"
        yield _with_frame(Item(Path(f"{video}{mark}"), f"{item.relative}{mark}"), video, found)
        # a frame may take tens of megabytes, and the next one is decoded meanwhile
        del found


def _with_frame(item: Item, video: Path, found: DecodedFrame) -> Item:
    frame = found.frame
    info = FrameInfo(video, frame.index, frame.seconds, found.image_sha256)
    return replace(item, content=frame.pixels, problem=frame.error, frame=info)
