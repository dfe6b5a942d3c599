"""Names of images and videos, the errors of whole folders and archives, and the files that were skipped."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from opal_deploy.errors import ImageError
from opal_deploy.logs import one_line
from opal_deploy.records.names import escape_name
from opal_deploy.sources.image import InputImage, Location

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

# errors of a folder, list or archive rather than of an image: `discover` refuses a call with nothing else
CONTAINER_CODES = frozenset(
    ["no_images", "unreadable", "storage_unavailable", "corrupt_archive", "unsupported_archive", "not_a_video",
     "no_frames", "unsupported_video", "truncated_video"]
)  # fmt: skip


@dataclass
class Skipped:
    """Files and members that were skipped, with the names of the first ones.

    Attributes:
        count: hidden files, and files whose names are not an image's.
        examples: names of the first of these.
        folder_links: links to a folder around them, or to one whose images come under its own name.
        folder_link_examples: names of the first of these.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)
    folder_links: int = 0
    folder_link_examples: list[str] = field(default_factory=list)

    def add(self, path: Location) -> None:
        """Count one more file."""
        self.count += 1
        if len(self.examples) < 3:
            self.examples.append(path.name)

    def add_folder_link(self, path: Path) -> None:
        """Count one more link to a folder."""
        self.folder_links += 1
        if len(self.folder_link_examples) < 3:
            self.folder_link_examples.append(path.name)

    def describe(self) -> Iterator[str]:
        """Yield a line for the files and one for the links, if there are any."""
        if self.count:
            examples = one_line(", ".join(map(escape_name, self.examples)))
            yield f"Skipped {self.count} hidden or non-image files ({examples})"
        if self.folder_links:
            examples = one_line(", ".join(map(escape_name, self.folder_link_examples)))
            yield (
                "Links not followed, to a folder around them or to one whose images come under its own name: "
                f"{self.folder_links} ({examples})"
            )

    def merge(self, other: Skipped) -> None:
        """Add the files and links of another count."""
        self.count += other.count
        self.examples = (self.examples + other.examples)[:3]
        self.folder_links += other.folder_links
        self.folder_link_examples = (self.folder_link_examples + other.folder_link_examples)[:3]


def is_image_name(name: str) -> bool:
    """Return whether a file of this name is an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_video_name(name: str) -> bool:
    """Return whether a file of this name is a video."""
    return os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES


def container_error(path: Location, code: str, message: str) -> InputImage:
    """Return the image that stands for a whole folder, list or archive with an error."""
    return InputImage.at(path, error=ImageError(code, message))


def no_images_error(path: Location, others: Skipped, *, recursive: bool) -> InputImage:
    """Return the error of an archive or folder (`recursive`: with its subfolders) without images."""
    more = f" ({others.count} other files, such as {', '.join(others.examples)})" if others.count else ""
    where = "in it or below" if recursive else "in it"
    videos = "; frames of videos are taken with --every 1s" if any(map(is_video_name, others.examples)) else ""
    return container_error(path, "no_images", f"no images {where}{more}; expected files such as .jpg or .png{videos}")
