"""The inputs of a run: its images, with crops and labels, and their number."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from opal_deploy.errors import OpalError, UsageError
from opal_deploy.records.names import unescape_name
from opal_deploy.run.options import InferOptions
from opal_deploy.sources import discovery
from opal_deploy.sources.annotations import Crops, Labels, annotate, read_boxes, read_labels
from opal_deploy.sources.image import InputImage, Skipped
from opal_deploy.sources.video import NO_VIDEOS, Sampling, VideoOptions, require_pyav


@dataclass(frozen=True)
class Inputs:
    """The images of a run.

    Attributes:
        images: folders, files, globs, archives, lists.
        recursive: include subfolders.
        boxes, labels: crops and labels by image; None: none.
        video: how videos are read, and which of their frames.
        part: the shard's positions in the list of images, in which a video counts as one; None: all.
    """

    images: list[str]
    recursive: bool = True
    boxes: Crops | None = None
    labels: Labels | None = None
    video: VideoOptions = NO_VIDEOS
    part: range | None = None

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
        labels = None if options.labels is None else read_labels(options.labels)
        return Inputs(images, options.recursive, boxes, labels, video)

    def find_images(self, skipped: Skipped) -> Iterator[InputImage]:
        """Yield the images in order, with crops and labels; `skipped` counts other files; raise UsageError if none."""
        items = self._list_items(skipped)
        if self.part is None:
            images = discovery.expand(items, self.video)
        else:
            items = itertools.islice(items, self.part.start, self.part.stop)
            images = discovery.expand(items, self.video, self.part.start, is_part=True)
        # searched now, so that a call without images ends before anything is written
        head = list(itertools.islice(images, 1))
        images = itertools.chain(head, images)
        return images if self.boxes is None and self.labels is None else annotate(images, self.boxes, self.labels)

    def take_shard(self, shard: tuple[int, int], batch: int) -> Inputs:
        """Return the i-th of n contiguous shards of the list; all but the last are whole batches."""
        index, count = shard
        length = -(-self.count_items() // (count * batch)) * batch
        return replace(self, part=range((index - 1) * length, index * length))

    def count_items(self) -> int:
        """Return the number of images in the list, in which a video counts as one."""
        return sum(1 for _ in self._list_items(Skipped()))

    def _list_items(self, skipped: Skipped) -> Iterator[InputImage]:
        videos = self.video.sampling is not None
        return discovery.list_items(self.images, skipped, sys.stdin, recursive=self.recursive, videos=videos)

    def counter(self) -> ImageCounter:
        """Return a counter of these images."""
        videos = self.video.sampling is not None
        return ImageCounter(self.images, recursive=self.recursive, boxes=self.boxes, videos=videos)

    def unused_labels(self) -> list[str]:
        """Return the images that the file of labels names, and that `find_images` has not yielded.

        Empty for a shard, since other shards have those images.
        """
        return self.labels.unused() if self.labels is not None and self.part is None else []


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, i from 1 to n; raise UsageError for anything else."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])


# after so many images the thread pauses for so many seconds, in favour of the others
_CHUNK, _PAUSE = 256, 0.005


class ImageCounter:
    """Counts the records of inputs in a thread while its block runs; `total` is None until the number is known.

    Listing names a second time takes some 10 µs per image. Inputs that would have to be read, requested over a network
    or waited for are not counted.
    """

    def __init__(
        self, inputs: Sequence[str], *, recursive: bool = True, boxes: Crops | None = None, videos: bool = False
    ) -> None:
        """Start nothing yet; `videos`: frames are taken, which are not counted; else see `Inputs`."""
        self.total: int | None = None
        self._on_total: Callable[[int], None] | None = None
        self._inputs, self._recursive, self._boxes, self._videos = inputs, recursive, boxes, videos
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="count images", daemon=True)

    def notify(self, on_total: Callable[[int], None]) -> Self:
        """Return the counter, which in its block calls `on_total` from its thread when the number is known."""
        self._on_total = on_total
        return self

    def __enter__(self) -> Self:
        if not self._videos and all(map(discovery.is_countable, self._inputs)):
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # not joined: a folder on a slow disk may be being listed
        self._stopped.set()

    def join(self) -> None:
        """Wait until the count has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        records = 0
        with suppress(OpalError, OSError):
            items = discovery.list_items(self._inputs, Skipped(), None, recursive=self._recursive)
            for number, item in enumerate(items, 1):
                records += 1 if self._boxes is None else self._boxes.count(unescape_name(item.name or ""))
                if number % _CHUNK == 0 and self._stopped.wait(_PAUSE):
                    return
            self.total = records
            if self._on_total is not None and not self._stopped.is_set():
                self._on_total(records)
