"""Which images a call means: folders, files, globs, archives, and lists of these.

Lazily and in a fixed order: that of the call; sorted by bytes in a folder and a glob; an archive's and a list's own.

Images of a folder: sorted by bytes, depth first, one folder's names in memory at a time.

Lists of paths, one a line, on standard input or in a file."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from opal_deploy.errors import UsageError
from opal_deploy.inference.run.image_files import OVERLAYS, SHEETS
from opal_deploy.inference.run.results import RESULTS
from opal_deploy.inference.sources.archives import archive_items, is_archive_name
from opal_deploy.inference.sources.items import OF_A_HOLDER, Item, Skipped, container_error, is_image_name, no_images

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
        yield container_error(origin, "no_images", f"{called} named no image; expected one path a line")


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
        yield container_error(Path(pattern), "no_images", what)


def folder_items(folder: Path, skipped: Skipped, *, recursive: bool) -> Iterator[Item]:
    """The folder's images, with those below it if `recursive`; a single item with a problem where there are none."""
    found = False
    others = Skipped()
    for item in _walk(folder, others, recursive):
        found = True
        yield item
    skipped.merge(others)
    if not found:
        yield no_images(folder, others, below=recursive)


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
        yield container_error(folder, "unreadable", f"the folder cannot be listed: {error.strerror or error}")
        return
    ours = any(entry.name == RESULTS for entry in listed)
    for entry in listed:
        path = folder / entry.name
        # overlays of an earlier run, or of this one, are no photographs
        if entry.name.startswith(".") or (ours and entry.name in (OVERLAYS, SHEETS)):
            skipped.add(path)
        elif entry.is_dir(follow_symlinks=False):
            if recursive:
                yield path
        elif is_image_name(entry.name):
            yield Item(path, entry.name)
        else:
            skipped.add(path)


def stdin_lines(stdin: TextIO | None) -> Iterator[str]:
    """Paths on standard input.

    Raises:
        UsageError: there is none.
    """
    if stdin is None:
        raise UsageError("-: there is no standard input to read paths from")
    if isinstance(stdin, io.TextIOWrapper):
        # names are bytes; one that is not UTF-8 names a file all the same
        stdin.reconfigure(errors="surrogateescape")
    yield from _names(stdin)


def file_lines(path: Path) -> Iterator[str]:
    """Paths in a text file, UTF-8; relative ones are meant from the working directory, as on standard input.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as stream:
            yield from _names(stream)
    except OSError as error:
        raise UsageError(
            f"@{path}: the list cannot be read ({error.strerror or error}); expected a text file with a path a line"
        ) from None


def _names(stream: TextIO) -> Iterator[str]:
    for line in stream:
        name = line.rstrip("\n")
        if name:
            yield name
