"""Images of a folder: sorted by bytes, depth first, one folder's names in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from opal_deploy.pipeline.run.drawings import OVERLAYS, SHEETS
from opal_deploy.pipeline.run.output import RESULTS
from opal_deploy.pipeline.sources.item import Item, Skipped, holder_problem, is_image_name, no_images


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
        yield holder_problem(folder, "unreadable", f"the folder cannot be listed: {error.strerror or error}")
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
