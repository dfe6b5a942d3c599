"""The inputs of a run: its images, with crops and labels, and their number.

Images are counted in a thread while they are processed, so that the time left is known. Listing names a second time
takes some 10 µs per image. Inputs that would have to be read, requested over a network or waited for are not counted:
standard input, URLs other than of one image, tars, videos.
"""

from __future__ import annotations

import glob
import itertools
import os
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

from opal_deploy.errors import OpalError, UsageError
from opal_deploy.preprocess.video import Sampling, require_pyav
from opal_deploy.records.names import unescape_name
from opal_deploy.run.options import InferOptions
from opal_deploy.sources import discovery
from opal_deploy.sources.annotations import Labels, annotate, read_boxes, read_labels
from opal_deploy.sources.archives import archive_items, is_archive_name
from opal_deploy.sources.detections import Crops
from opal_deploy.sources.discovery import LIST_MARK, STDIN, expand_glob, file_lines, folder_items, glob_items
from opal_deploy.sources.image import InputImage
from opal_deploy.sources.items import Skipped, is_image_name, is_video_name
from opal_deploy.sources.video import VideoOptions
from opal_deploy.storage.buckets import has_magic
from opal_deploy.storage.urls import is_url


@dataclass(frozen=True)
class Inputs:
    """The images of a run.

    Attributes:
        images: folders, files, globs, archives, lists.
        shard: (i, n): every n-th image from the i-th on, counted from 1.
        recursive: include subfolders.
        boxes, labels: crops and labels by image; None: none.
        video: how videos are read, and which of their frames.
    """

    images: list[str]
    shard: tuple[int, int]
    recursive: bool
    boxes: Crops | None
    labels: Labels | None
    video: VideoOptions

    @staticmethod
    def read(images: list[str], options: InferOptions) -> Inputs:
        """Check the inputs, and read the files of boxes and labels; raise UsageError if any cannot be used."""
        video = VideoOptions(
            None if options.every is None else Sampling.parse(str(options.every)),
            max_pixels=options.max_pixels, isolate=options.isolate, timeout=options.decode_timeout or None,
        )  # fmt: skip
        discovery.check_inputs(images, video.sampling)
        if video.sampling is not None:
            require_pyav()
        boxes = None if options.boxes is None else read_boxes(Path(options.boxes), options.box_confidence)
        if boxes is not None and boxes.note:
            options.log(boxes.note)
        shard = (1, 1) if options.shard is None else parse_shard(options.shard)
        labels = None if options.labels is None else read_labels(options.labels)
        return Inputs(images, shard, options.recursive, boxes, labels, video)

    def find_images(self, skipped: Skipped) -> Iterator[InputImage]:
        """Yield the images in order, with crops and labels; `skipped` counts other files; raise UsageError if none."""
        images = discovery.discover(self.images, skipped, sys.stdin, recursive=self.recursive, video=self.video)
        images = itertools.chain([next(images)], images)
        return discovery.shard(annotate(images, self.boxes, self.labels), *self.shard)

    def unused_labels(self) -> list[str]:
        """Return the images that the file of labels names, and that `find_images` has not yielded.

        Empty for a shard, since other shards have those images.
        """
        return self.labels.unused() if self.labels is not None and self.shard[1] == 1 else []

    def counter(self) -> ImageCounter:
        """Return a counter of these images."""
        videos = self.video.sampling is not None
        return ImageCounter(self.images, self.shard, recursive=self.recursive, videos=videos, boxes=self.boxes)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, i from 1 to n; raise UsageError for anything else."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])


# after so many images the thread pauses for so many seconds, in favour of the others
_CHUNK, _PAUSE = 256, 0.005


class _NotCountable(Exception):
    """An input that would have to be read, requested or waited for."""


class ImageCounter:
    """Counts, in a thread while its block runs, what `discover` yields for the same inputs.

    `total` is None until it is known, or if counting would be slow.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        shard: tuple[int, int] = (1, 1),
        *,
        recursive: bool = True,
        videos: bool = False,
        boxes: Crops | None = None,
    ) -> None:
        """Start nothing yet; see `discover` for `inputs` and `recursive`, `Inputs` for `shard` and `boxes`."""
        self.total: int | None = None
        self._on_total: Callable[[int], None] | None = None
        self._inputs, self._shard, self._recursive = inputs, shard, recursive
        self._videos, self._boxes = videos, boxes
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="count images", daemon=True)

    def notify(self, on_total: Callable[[int], None]) -> Self:
        """Return the counter, which in its block calls `on_total` from its thread when the number is known."""
        self._on_total = on_total
        return self

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # not joined: a folder on a slow disk may be being listed
        self._stopped.set()

    def join(self) -> None:
        """Wait until the count has ended."""
        self._thread.join()

    def _run(self) -> None:
        number = records = 0
        try:
            for number, found in enumerate(chain.from_iterable(map(self._find, self._inputs)), 1):
                name = found.name or "" if isinstance(found, InputImage) else found
                if self._videos and is_video_name(name):
                    return
                records += 1 if self._boxes is None else self._boxes.count(unescape_name(name))
                if number % _CHUNK == 0 and self._stopped.wait(_PAUSE):
                    return
        except (_NotCountable, OpalError, OSError):
            return
        index, count = self._shard
        self.total = len(range(index - 1, records, count))
        if self._on_total is not None and not self._stopped.is_set():
            self._on_total(self.total)

    def _find(self, text: str) -> Iterable[InputImage | str]:
        """Yield each image or name of an input, decided as `discover` does; raise _NotCountable."""
        if text == STDIN or is_url(text.removeprefix(LIST_MARK)):
            return _one(text)
        if os.path.isdir(text):
            return folder_items(Path(text), Skipped(), recursive=self._recursive, videos=self._videos)
        if os.path.lexists(text):
            return _one(text)
        if text.startswith(LIST_MARK) and os.path.lexists(text.removeprefix(LIST_MARK)):
            return chain.from_iterable(map(_one, file_lines(Path(text.removeprefix(LIST_MARK)))))
        if glob.has_magic(text) and not any(map(is_archive_name, expand_glob(text))):
            return glob_items(text, Skipped(), recursive=self._recursive, videos=self._videos)
        return _one(text)


def _one(name: str) -> Iterable[InputImage | str]:
    """Return the images of a file, a URL or a line of a list: itself, or the members of a zip; raise _NotCountable."""
    if is_url(name):
        if has_magic(name) or not is_image_name(name):
            raise _NotCountable
    elif name == STDIN or name.startswith(LIST_MARK):
        raise _NotCountable
    elif is_archive_name(name):
        # its directory lists the members
        if not (name.lower().endswith(".zip") and zipfile.is_zipfile(name)):
            raise _NotCountable
        return archive_items(Path(name), Skipped())
    return [name]
