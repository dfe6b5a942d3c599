"""Which images a call means: folders (with their subfolders), files, globs, and lists on standard input.

Lazily, in sorted order, one folder's names in memory at a time.
"""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.pipeline.output import OVERLAYS, RESULTS

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
        problem: why there is nothing to explain (a folder without images, or that cannot be listed); else None.
    """

    path: Path
    relative: str
    problem: ImageError | None = None


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

    def merge(self, other: Skipped) -> None:
        """Add another's."""
        self.count += other.count
        self.examples = (self.examples + other.examples)[:3]


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
        UsageError: not one image was found. Inputs without an image beside others that have some are items with a
            `problem`: one empty folder costs the other folders nothing.
    """
    held: list[Item] = []
    found = False
    for item in _items(inputs, skipped, stdin, recursive):
        if item.problem is not None and not found:
            held.append(item)
            continue
        if not found:
            found = True
            yield from held
        yield item
    if not found:
        raise UsageError(f"{held[0].path}: {held[0].problem}" if held else "not one image was given")


def _items(inputs: Iterable[str], skipped: Skipped, stdin: TextIO | None, recursive: bool) -> Iterator[Item]:
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
            # it was there when the call was checked; its record will say not_found
            yield Item(path, path.name)


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
    others = Skipped()
    for item in _walk(folder, others, recursive):
        found = True
        yield item
    skipped.merge(others)
    if not found:
        more = f" ({others.count} other files, such as {', '.join(others.examples)})" if others.count else ""
        below = " or below" if recursive else ""
        yield _nothing(folder, f"no images in it{below}{more}; expected files such as .jpg or .png")


def _walk(folder: Path, skipped: Skipped, recursive: bool) -> Iterator[Item]:
    """Depth first, sorted by bytes; links to folders are not followed, or a loop would never end."""
    # a stack of our own: folders may be nested deeper than Python's
    waiting = [_list(folder, skipped, recursive)]
    while waiting:
        path = next(waiting[-1], None)
        if path is None:
            waiting.pop()
        elif isinstance(path, Item):
            yield Item(path.path, path.path.relative_to(folder).as_posix(), path.problem)
        else:
            waiting.append(_list(path, skipped, recursive))


def _list(folder: Path, skipped: Skipped, recursive: bool) -> Iterator[Item | Path]:
    """One folder's images as items, its subfolders as paths."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        problem = ImageError("unreadable", f"the folder cannot be listed: {error.strerror or error}")
        yield Item(folder, folder.name, problem)
        return
    ours = any(entry.name == RESULTS for entry in listed)
    for entry in listed:
        path = folder / entry.name
        # overlays of an earlier run, or of this one, are no photographs
        if entry.name.startswith(".") or (ours and entry.name == OVERLAYS):
            skipped.add(path)
        elif entry.is_dir(follow_symlinks=False):
            if recursive:
                yield path
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            yield Item(path, entry.name)
        else:
            skipped.add(path)


def _nothing(path: Path, message: str) -> Item:
    return Item(path, path.name, ImageError("no_images", message))


def _from_glob(pattern: str, skipped: Skipped, recursive: bool) -> Iterator[Item]:
    matches = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)
    found = False
    for match in matches:
        path = Path(match)
        if path.is_dir():
            if "**" not in pattern:
                found = True
                yield from _from_folder(path, skipped, recursive)
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            found = True
            yield Item(path, path.name)
        else:
            skipped.add(path)
    if not found:
        what = f"none of its {len(matches)} matches is an image by its name" if matches else "nothing matches"
        yield _nothing(Path(pattern), what)


def _from_list(stdin: TextIO | None) -> Iterator[Item]:
    if stdin is None:
        raise UsageError("-: there is no standard input to read paths from")
    if isinstance(stdin, io.TextIOWrapper):
        # names are bytes; one that is not UTF-8 names a file all the same
        stdin.reconfigure(errors="surrogateescape")
    found = False
    for line in stdin:
        name = line.rstrip("\n")
        if name:
            found = True
            yield Item(Path(name), name)
    if not found:
        yield _nothing(Path("-"), "standard input named no image; expected one path a line")


def shard(items: Iterable[Item], index: int, count: int) -> Iterator[Item]:
    """Every `count`-th item, beginning with the `index`-th (from 1): shards are disjoint and cover everything."""
    return (item for position, item in enumerate(items) if position % count == index - 1)
