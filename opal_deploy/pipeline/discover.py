"""Which images a call means: folders, files, globs, archives, and lists of these.

Lazily and in a fixed order: that of the call; sorted by bytes in a folder and a glob; an archive's and a list's own.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from opal_deploy.errors import UsageError
from opal_deploy.pipeline.sources.archives import archive_items, is_archive_name
from opal_deploy.pipeline.sources.folders import folder_items
from opal_deploy.pipeline.sources.item import OF_A_HOLDER, Item, Skipped, holder_problem, is_image_name
from opal_deploy.pipeline.sources.lists import file_lines, stdin_lines

__all__ = ["Item", "Skipped", "check_inputs", "discover", "shard"]

STDIN, LIST_MARK = "-", "@"


def discover(
    inputs: Iterable[str], skipped: Skipped, stdin: TextIO | None = None, *, recursive: bool = True
) -> Iterator[Item]:
    """The images that `inputs` name, in their order.

    Args:
        inputs: folders, files, globs, archives (.tar, plain or compressed, and .zip; also what a glob matches), `-` for
            one path a line on `stdin`, or `@list.txt` for one path a line in that file. A line names a file or an
            archive. What exists under the very name given is that file, whatever it looks like.
        skipped: is told what folders and archives held beside images.
        stdin: where `-` reads.
        recursive: look into subfolders of folders.

    Raises:
        UsageError: not one image was found. Inputs without an image beside others that have some are items with a
            `problem`: one empty folder costs the other folders nothing.
    """
    held: list[Item] = []
    found = False
    for item in _items(inputs, skipped, stdin, recursive):
        if not found and item.problem is not None and item.problem.code in OF_A_HOLDER:
            held.append(item)
            continue
        if not found:
            found = True
            yield from held
        yield item
    if not found:
        raise UsageError(f"{held[0].path}: {held[0].problem}" if held else "not one image was given")


def check_inputs(inputs: Iterable[str]) -> None:
    """Refuse a call with a misspelt input before anything is loaded or written.

    Raises:
        UsageError: no input, or one that is neither `-`, nor there, nor a glob.
    """
    listed = list(inputs)
    if not listed:
        raise UsageError(
            "no images given; expected folders, files, globs, or - for a list on standard input, @FILE for a list in it"
        )
    for text in listed:
        if text == STDIN or os.path.lexists(text) or glob.has_magic(text):
            continue
        if not text.startswith(LIST_MARK):
            raise UsageError(f"{text}: no such file or folder")
        if not os.path.lexists(text.removeprefix(LIST_MARK)) or os.path.isdir(text.removeprefix(LIST_MARK)):
            raise UsageError(f"{text}: no such list; expected a text file with a path a line")


def shard(items: Iterable[Item], index: int, count: int) -> Iterator[Item]:
    """Every `count`-th item, beginning with the `index`-th (from 1): shards are disjoint and cover everything."""
    return (item for position, item in enumerate(items) if position % count == index - 1)


def _items(inputs: Iterable[str], skipped: Skipped, stdin: TextIO | None, recursive: bool) -> Iterator[Item]:
    for text in inputs:
        # os.path: unlike pathlib's it is False, not an error, where the answer is refused
        if text == STDIN:
            yield from _listed(stdin_lines(stdin), Path("-"), "standard input", skipped)
        elif os.path.isdir(text):
            yield from folder_items(Path(text), skipped, recursive=recursive)
        elif os.path.lexists(text):
            yield from _file(Path(text), skipped)
        elif text.startswith(LIST_MARK) and os.path.lexists(text.removeprefix(LIST_MARK)):
            path = Path(text.removeprefix(LIST_MARK))
            yield from _listed(file_lines(path), path, "the list", skipped)
        elif glob.has_magic(text):
            yield from _matches(text, skipped, recursive)
        else:
            # it was there when the call was checked; its record will say not_found
            yield Item(Path(text), Path(text).name)


def _file(path: Path, skipped: Skipped) -> Iterator[Item]:
    """A file that was named: an archive's members, or the file itself, whatever it is called."""
    if is_archive_name(path.name) and os.path.isfile(path):
        yield from archive_items(path, skipped)
    else:
        yield Item(path, path.name)


def _listed(lines: Iterator[str], origin: Path, called: str, skipped: Skipped) -> Iterator[Item]:
    found = False
    for line in lines:
        found = True
        path = Path(line)
        if is_archive_name(path.name):
            yield from _file(path, skipped)
        else:
            yield Item(path, line)
    if not found:
        yield holder_problem(origin, "no_images", f"{called} named no image; expected one path a line")


def _matches(pattern: str, skipped: Skipped, recursive: bool) -> Iterator[Item]:
    matches = sorted(glob.glob(pattern, recursive=True), key=os.fsencode)
    found = False
    for match in matches:
        path = Path(match)
        if os.path.isdir(match):
            if "**" not in pattern:
                found = True
                yield from folder_items(path, skipped, recursive=recursive)
        elif is_archive_name(path.name):
            found = True
            yield from _file(path, skipped)
        elif is_image_name(path.name):
            found = True
            yield Item(path, path.name)
        else:
            skipped.add(path)
    if not found:
        what = f"none of its {len(matches)} matches is an image by its name" if matches else "nothing matches"
        yield holder_problem(Path(pattern), "no_images", what)
