"""An image to classify, before it is decoded; which names are images and videos; and the files that were skipped.

Light to import: decode processes load this module, and no runtime.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from opal_deploy.errors import ImageError
from opal_deploy.logs import one_line
from opal_deploy.preprocess.decode import Source
from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import escape_name
from opal_deploy.remote import RemoteFile

# where an image lies
Location: TypeAlias = Path | RemoteFile

# includes formats without a decoder: a HEIC file gets its error record
IMAGE_SUFFIXES = frozenset(
    [".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
     ".jpg", ".jxl", ".mpo", ".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff", ".webp"]
)  # fmt: skip

VIDEO_SUFFIXES = frozenset(
    [".3g2", ".3gp", ".asf", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".mxf",
     ".ogv", ".ts", ".webm", ".wmv"]
)  # fmt: skip

# a frame is named by the number of frames before it
FRAME_NAME = re.compile(r"(?s)(.+)#frame=(\d{1,12})")


def is_image_name(name: str) -> bool:
    """Return whether a file of this name is an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_video_name(name: str) -> bool:
    """Return whether a file of this name is a video."""
    return os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES


@dataclass(frozen=True)
class FrameInfo:
    """The place of a frame in its video.

    Attributes:
        video: the video's path.
        index, seconds: number of frames before this one, and time after the first; None without time stamps.
        image_sha256: hex digest of the video's file.
    """

    video: Path
    index: int
    seconds: float | None
    image_sha256: str


@dataclass(frozen=True)
class InputImage:
    """An image to classify, with everything known before it is decoded.

    Attributes:
        name: the image's name in its record, see `escape_name`; None for an image without a name.
        source: a path, a remote file, bytes, an archive member, a PIL image, or uint8 [H, W, 3] RGB.
        crop: (x0, y0, x1, y1) to crop to first, in pixels of the whole oriented image.
        label: the image's label, if it has one.
        error: why the image cannot be classified, if that is known already: an empty folder, a missing crop.
        index: position among all images of the inputs, from 0; None for an image that `discover` did not find.
        frame: the place in a video; None for an image that is not a frame.
        detection: position of the crop among the boxes of a detector, see `annotations.Crop`.
        relative: the path from the folder or archive that was searched; the file's name for a file given directly.
    """

    name: str | None
    source: Source
    crop: Box | None = None
    label: str | None = None
    error: ImageError | None = None
    index: int | None = None
    frame: FrameInfo | None = None
    detection: int | None = None
    relative: str = ""

    @classmethod
    def at(
        cls, path: Location, relative: str | None = None, error: ImageError | None = None, source: Source | None = None
    ) -> InputImage:
        """Return the image at a path or URL, named after it.

        Args:
            path: as a person would open it from the working directory. For an archive's member the archive's path, a
                slash and the member's name, which is only a label.
            relative, error: see `InputImage`; by default `relative` is the last part of `path`.
            source: the member's bytes or the frame's pixels; None: the file itself.
        """
        source, relative = path if source is None else source, path.name if relative is None else relative
        return cls(escape_name(str(path)), source, error=error, relative=relative)


@dataclass
class Skipped:
    """Files and members that were skipped: hidden, without an image's name, links to a folder around them.

    Attributes:
        count: their number.
        examples: names of the first ones.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Count one more."""
        self.merge(Skipped(1, [name]))

    def merge(self, other: Skipped) -> None:
        """Add those of another count."""
        self.count += other.count
        self.examples = (self.examples + other.examples)[:3]

    def describe(self) -> Iterator[str]:
        """Yield a line for a person, if there are any."""
        if self.count:
            examples = one_line(", ".join(map(escape_name, self.examples)))
            yield f"Skipped {self.count} hidden or non-image files ({examples})"


def no_images_error(path: Location, others: Skipped) -> InputImage:
    """Return the image that stands for a folder or an archive without images."""
    more = f" ({others.count} other files, such as {', '.join(others.examples)})" if others.count else ""
    videos = "; frames of videos are taken with --every 1s" if any(map(is_video_name, others.examples)) else ""
    message = f"no images in it{more}; expected files such as .jpg or .png{videos}"
    return InputImage.at(path, error=ImageError("no_images", message))
