"""One image to explain, wherever it lies, and the files that were passed over on the way to it."""

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
from opal_deploy.records.names import escape_name
from opal_deploy.storage.files import RemoteFile

# these are images, also where no decoder may know them: a HEIC file gets its error record, not silence
IMAGE_SUFFIXES = frozenset(
    [".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
     ".jpg", ".jxl", ".mpo", ".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff", ".webp"]
)  # fmt: skip

VIDEO_SUFFIXES = frozenset(
    [".3g2", ".3gp", ".asf", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".mxf",
     ".ogv", ".ts", ".webm", ".wmv"]
)  # fmt: skip

# a frame of a video is named by the number of frames before it
FRAME_NAME = re.compile(r"(?s)(.+)#frame=(\d{1,12})")

# where an image lies: a path, or a URL
Location: TypeAlias = Path | RemoteFile

# problems of a folder, list or archive rather than of an image: `discover` refuses a call with nothing else
CONTAINER_CODES = frozenset(
    ["no_images", "unreadable", "storage_unavailable", "corrupt_archive", "unsupported_archive", "not_a_video",
     "no_frames", "unsupported_video", "truncated_video"]
)  # fmt: skip


@dataclass(frozen=True)
class FrameInfo:
    """The place of an image in the video that it is a frame of.

    Attributes:
        video: the video's path.
        index: number of frames before it.
        seconds: time after the first frame; None where the video has no time stamps.
        image_sha256: hex digest of the video's file.
    """

    video: Path
    index: int
    seconds: float | None
    image_sha256: str


@dataclass(frozen=True)
class Item:
    """One image to explain.

    Attributes:
        path: as a person would open it from the working directory, or its URL. Of an archive's member: the archive's, a
            slash, and the member's name, `shards/a.tar/dir/x.jpg`: a label for people and for boxes, never opened.
        relative: the path from the folder or archive that was searched; the file's name for one named directly.
        problem: why there is nothing to explain (a folder without images, or that cannot be listed); else None.
        content: where a member's bytes are, or a frame's pixels; None for a file of its own.
        index: position among all that the inputs name, from 0; None where it did not come from `discover`.
        frame: its place in a video; None where it is no frame of one.
    """

    path: Location
    relative: str
    problem: ImageError | None = None
    content: Source | None = None
    index: int | None = None
    frame: FrameInfo | None = None

    @property
    def name(self) -> str:
        """The image's name in its record: text that any JSON reader accepts, see `unescape_name`."""
        return escape_name(str(self.path))

    @property
    def source(self) -> Source:
        """The argument for `decode`."""
        return self.path if self.content is None else self.content


@dataclass
class Skipped:
    """Files and members that were passed over.

    Attributes:
        count: files that are hidden or no images by their names.
        examples: names of the first of these.
        folder_links: links to a folder that they lie in, or whose images come under the folder's own name.
        folder_link_examples: names of the first of these.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)
    folder_links: int = 0
    folder_link_examples: list[str] = field(default_factory=list)

    def add(self, path: Location) -> None:
        """Count one more; the first few names are kept."""
        self.count += 1
        if len(self.examples) < 3:
            self.examples.append(path.name)

    def add_folder_link(self, path: Path) -> None:
        """Count one more link to a folder."""
        self.folder_links += 1
        if len(self.folder_link_examples) < 3:
            self.folder_link_examples.append(path.name)

    def describe(self) -> Iterator[str]:
        """Yield a line for the files and one for the links, where there are any."""
        if self.count:
            examples = one_line(", ".join(self.examples))
            yield f"Skipped {self.count} hidden or non-image files ({examples})"
        if self.folder_links:
            examples = one_line(", ".join(self.folder_link_examples))
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
    """Return whether a file of this name is taken for an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def is_video_name(name: str) -> bool:
    """Return whether a file of this name is taken for a video."""
    return os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES


def container_error(path: Location, code: str, message: str) -> Item:
    """Return an item that stands for a whole folder, list or archive and says what is wrong with it."""
    return Item(path, path.name, ImageError(code, message))


def no_images_error(path: Location, others: Skipped, *, recursive: bool) -> Item:
    """Return the item of a folder (`recursive`: and its subfolders) or archive without images."""
    more = f" ({others.count} other files, such as {', '.join(others.examples)})" if others.count else ""
    where = "in it or below" if recursive else "in it"
    videos = "; frames of videos are taken with --every 1s" if any(map(is_video_name, others.examples)) else ""
    return container_error(path, "no_images", f"no images {where}{more}; expected files such as .jpg or .png{videos}")
