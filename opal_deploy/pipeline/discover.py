"""Which images a call means: folders (with their subfolders), files, globs, and lists on standard input.

Lazily, in sorted order, one folder's names in memory at a time.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from opal_deploy.errors import UsageError

# in a folder these are images, also where no decoder may know them: a HEIC file gets its error record, not silence
IMAGE_SUFFIXES = frozenset(
    [".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
     ".jpg", ".jxl", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".svg", ".tga", ".tif", ".tiff", ".webp"]
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One image to explain.

    Attributes:
        path: as a person would open it from the working directory.
        relative: to the folder that it was found in; the file's name for one named directly.
    """

    path: Path
    relative: str


@dataclass
class Skipped:
    """Files in folders that were passed over: not images by their names, or hidden."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Count one; the first few names are kept."""
        self.count += 1
        if len(self.examples) < 3:
            self.examples.append(path.name)


def discover(
    inputs: Iterable[str], skipped: Skipped, stdin: TextIO | None = None, *, recursive: bool = True
) -> Iterator[Item]:
    """The images that `inputs` name, in their order.

    Args:
        inputs: folders, files, globs, or `-` for one path a line on `stdin`.
        skipped: is told what a folder held beside images.
        stdin: where `-` reads.
        recursive: look into subfolders of folders.

    Raises:
        UsageError: an input is nothing of the kind, or a folder holds no image. Raised when the iteration gets there.
    """
    for text in inputs:
        if text == "-":
            yield from _from_list(stdin)
            continue
        path = Path(text)
        if path.is_dir():
            yield from _from_folder(path, skipped, recursive)
        elif os.path.lexists(path):
            yield Item(path, path.name)
        elif glob.has_magic(text):
            yield from _from_glob(text, skipped, recursive)
        else:
            raise UsageError(f"{text}: no such file or folder")


def check_inputs(inputs: Iterable[str]) -> None:
    """Refuse a call with a misspelt input before anything is loaded or written.

    Raises:
        UsageError: no input, or one that is neither `-`, nor there, nor a glob.
    """
    listed = list(inputs)
    if not listed:
        raise UsageError("no images given; expected folders, files, globs, or - for a list on standard input")
    for text in listed:
        if text != "-" and not os.path.lexists(text) and not glob.has_magic(text):
            raise UsageError(f"{text}: no such file or folder")


def _from_folder(folder: Path, skipped: Skipped, recursive: bool) -> Iterator[Item]:
    found = False
    for path in _walk(folder, skipped, recursive):
        found = True
        yield Item(path, path.relative_to(folder).as_posix())
    if not found:
        more = f" ({skipped.count} other files, such as {', '.join(skipped.examples)})" if skipped.count else ""
        raise UsageError(f"{folder}: no images in it or below{more}; expected files such as .jpg or .png")


def _walk(folder: Path, skipped: Skipped, recursive: bool) -> Iterator[Path]:
    """Depth first, sorted by bytes; links to folders are not followed, or a loop would never end."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError:
        # reading it will be refused in the same way, and that is an error record
        yield folder
        return
    for entry in listed:
        path = folder / entry.name
        if entry.name.startswith("."):
            skipped.add(path)
        elif entry.is_dir(follow_symlinks=False):
            if recursive:
                yield from _walk(path, skipped, recursive)
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            yield path
        else:
            skipped.add(path)


def _from_glob(pattern: str, skipped: Skipped, recursive: bool) -> Iterator[Item]:
    matches = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)
    if not matches:
        raise UsageError(f"{pattern}: nothing matches")
    for match in matches:
        path = Path(match)
        if path.is_dir():
            if "**" not in pattern:
                yield from _from_folder(path, skipped, recursive)
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            yield Item(path, path.name)
        else:
            skipped.add(path)


def _from_list(stdin: TextIO | None) -> Iterator[Item]:
    if stdin is None:
        raise UsageError("-: there is no standard input to read paths from")
    found = False
    for line in stdin:
        name = line.rstrip("\n")
        if name:
            found = True
            yield Item(Path(name), name)
    if not found:
        raise UsageError("-: standard input named no image; expected one path a line")


def shard(items: Iterable[Item], index: int, count: int) -> Iterator[Item]:
    """Every `count`-th item, beginning with the `index`-th (from 1): shards are disjoint and cover everything."""
    return (item for position, item in enumerate(items) if position % count == index - 1)
