"""Names of images and videos, look-up by name, the errors of whole folders and archives, and skipped files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

from opal_deploy.errors import ImageError
from opal_deploy.logs import one_line
from opal_deploy.records.names import escape_name
from opal_deploy.remote import is_url, redact
from opal_deploy.sources.image import InputImage, Location

T = TypeVar("T")

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
        folder_links: links to a folder around them, and links and devices in archives.
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
            yield f"Links not followed, to a folder around them or in an archive: {self.folder_links} ({examples})"

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


class PathLookup(Generic[T]):
    """Values by image path: the entry `a/b.jpg` is found for `data/a/b.jpg`.

    An entry may have more folders than the path (`data/a/b.jpg` for `a/b.jpg`), if it is the only one that ends in the
    whole path. Names that differ in a folder never match: `x/1.jpg` is not `y/1.jpg`, since a wrong value would go
    unnoticed. A frame without an entry gets its video's value.
    """

    def __init__(self, by_name: Mapping[str, T]) -> None:
        self._by_name = by_name
        self._names_by_file_name: dict[str, list[str]] = {}
        for name in by_name:
            self._names_by_file_name.setdefault(name.rpartition("/")[2], []).append(name)

    def __len__(self) -> int:
        return len(self._by_name)

    def matches(self, path: str) -> list[str]:
        """Return the names that may mean `path`, with `/` between folders: none, one, or several candidates."""
        parts = path.split("/")
        for start in range(len(parts)):
            suffix = "/".join(parts[start:])
            if suffix in self._by_name:
                return [suffix]
        names = [name for name in self._names_by_file_name.get(parts[-1], []) if name.endswith("/" + path)]
        frame = None if names else FRAME_NAME.fullmatch(path)
        return names if frame is None else self.matches(frame[1])

    def __getitem__(self, name: str) -> T:
        return self._by_name[name]


def normalize_name(name: str) -> str:
    """Return a name as an image's name is written: a path without `.` and double slashes, a URL without secrets."""
    return redact(name) if is_url(name) else PurePosixPath(name).as_posix()
