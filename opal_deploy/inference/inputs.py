"""The inputs of a run: its images, with their boxes and labels."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opal_deploy.errors import UsageError
from opal_deploy.inference.options import InferOptions
from opal_deploy.inference.sources import discovery
from opal_deploy.inference.sources.annotations import Boxes, Labels, read_boxes, read_labels
from opal_deploy.inference.sources.counting import ImageCounter
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.inference.sources.video import VideoOptions
from opal_deploy.inference.types import Request, build_requests
from opal_deploy.preprocess.video import Sampling, require_pyav


@dataclass(frozen=True)
class Inputs:
    """The images of a run, with what is known of them.

    Attributes:
        images: folders, files, globs, archives, lists.
        shard: (i, n): every n-th image from the i-th on, counted from 1.
        recursive: look into the subfolders of folders.
        boxes: crops by image; None: no image is cropped.
        labels: labels by image; None: none is known.
        video: how videos are read, and which of their frames.
    """

    images: list[str]
    shard: tuple[int, int]
    recursive: bool
    boxes: Boxes | None
    labels: Labels | None
    video: VideoOptions

    @staticmethod
    def read(images: list[str], options: InferOptions) -> Inputs:
        """Check the inputs, and read the files of boxes and labels.

        Raises:
            UsageError: an input does not exist, or a shard, boxes or labels cannot be used.
        """
        video = VideoOptions(
            None if options.every is None else Sampling.parse(str(options.every)),
            max_pixels=options.max_pixels, isolate=options.isolate, timeout=options.decode_timeout or None,
        )  # fmt: skip
        discovery.check_inputs(images, video.sampling)
        if video.sampling is not None:
            require_pyav()
        boxes = None if options.boxes is None else read_boxes(Path(options.boxes))
        if boxes is not None and boxes.several:
            options.log(f"--boxes: {boxes.several} annotations have several boxes; the first is used, as in training")
        shard = (1, 1) if options.shard is None else parse_shard(options.shard)
        labels = None if options.labels is None else read_labels(options.labels)
        return Inputs(images, shard, options.recursive, boxes, labels, video)

    def build_requests(self, skipped: Skipped) -> Iterator[Request]:
        """Return the images in their order; `skipped` counts other files.

        Raises:
            UsageError: no image was found.
        """
        items = discovery.discover(self.images, skipped, sys.stdin, recursive=self.recursive, video=self.video)
        items = itertools.chain([next(items)], items)
        return build_requests(discovery.shard(items, *self.shard), self.boxes, self.labels)

    def counter(self) -> ImageCounter:
        """Return a counter of these images that works in the background."""
        videos = self.video.sampling is not None
        return ImageCounter(self.images, self.shard, recursive=self.recursive, videos=videos)


def parse_shard(text: str) -> tuple[int, int]:
    """Parse `i/n`, i from 1 to n; raise UsageError for anything else."""
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise UsageError(f"shard {text!r}: expected i/n with i from 1 to n, such as 1/4")
    return int(parts[0]), int(parts[1])
