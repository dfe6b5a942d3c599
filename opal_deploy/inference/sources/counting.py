"""Count the images of a call in a thread while they are worked on, so that the time left can be told.

Names of files are listed a second time, which takes some 10 µs an image. What would have to be read, asked for over a
network or waited for is not counted: standard input, URLs that are not of one image, compressed and plain tars, videos.
"""

from __future__ import annotations

import glob
import os
import threading
import zipfile
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Self

from opal_deploy.errors import OpalError
from opal_deploy.inference.sources.archives import archive_items, is_archive_name
from opal_deploy.inference.sources.discovery import LIST_MARK, STDIN, expand_glob, file_lines, folder_items, glob_items
from opal_deploy.inference.sources.items import Item, Skipped, is_image_name, is_video_name
from opal_deploy.storage.listing import has_magic
from opal_deploy.storage.urls import is_url

# the thread gives way to the ones that work after so many images, for so many seconds
_CHUNK, _PAUSE = 256, 0.005


class _NotCountable(Exception):
    """An input would have to be read, asked for or waited for."""


class ImageCounter:
    """Counts in a thread while its block runs what `discover` yields for the same inputs.

    Attributes:
        total: number of images; None until it is known, for ever where counting would not be cheap.
    """

    def __init__(
        self, inputs: Sequence[str], shard: tuple[int, int] = (1, 1), *, recursive: bool = True, videos: bool = False
    ) -> None:
        """Start nothing yet.

        Args:
            inputs: of `discover`.
            shard: (i, n): every n-th image is counted, beginning with the i-th, from 1.
            recursive: whether to look into subfolders.
            videos: whether frames of videos are taken.
        """
        self.total: int | None = None
        self._on_total: Callable[[int], None] | None = None
        self._inputs, self._shard, self._recursive = inputs, shard, recursive
        self._videos = videos
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="count images", daemon=True)

    def notify(self, on_total: Callable[[int], None]) -> Self:
        """Return the counter, which in its block calls `on_total`, in its own thread, once the number is known."""
        self._on_total = on_total
        return self

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # not joined: a folder on a slow disk may be being listed
        self._stopped.set()

    def join(self) -> None:
        """Wait until the count has ended."""
        self._thread.join()

    def _run(self) -> None:
        number = 0
        try:
            for number, found in enumerate(chain.from_iterable(map(self._find, self._inputs)), 1):
                if self._videos and is_video_name(found.path.name if isinstance(found, Item) else found):
                    return
                if number % _CHUNK == 0 and self._stopped.wait(_PAUSE):
                    return
        except (_NotCountable, OpalError, OSError):
            return
        index, count = self._shard
        self.total = len(range(index - 1, number, count))
        if self._on_total is not None and not self._stopped.is_set():
            self._on_total(self.total)

    def _find(self, text: str) -> Iterable[Item | str]:
        """Yield the item or the name of each image of an input, decided as `discover` does.

        Raises:
            _NotCountable: that would not be cheap.
        """
        if text == STDIN or is_url(text.removeprefix(LIST_MARK)):
            return _one(text)
        if os.path.isdir(text):
            return folder_items(Path(text), Skipped(), recursive=self._recursive, videos=self._videos)
        if os.path.lexists(text):
            return _one(text)
        if text.startswith(LIST_MARK) and os.path.lexists(text.removeprefix(LIST_MARK)):
            return chain.from_iterable(map(_one, file_lines(Path(text.removeprefix(LIST_MARK)))))
        if glob.has_magic(text) and not any(map(is_archive_name, expand_glob(text))):
            return glob_items(text, Skipped(), recursive=self._recursive, videos=self._videos)
        return _one(text)


def _one(name: str) -> Iterable[Item | str]:
    """Return the images of a file, a URL or a line of a list: itself, or the members of a zip.

    Raises:
        _NotCountable: an archive that has to be read, a folder or glob in a bucket, a list on a server, standard input.
    """
    if is_url(name):
        if has_magic(name) or not is_image_name(name):
            raise _NotCountable
    elif name == STDIN or name.startswith(LIST_MARK):
        raise _NotCountable
    elif is_archive_name(name):
        # its directory lists the members
        if not (name.lower().endswith(".zip") and zipfile.is_zipfile(name)):
            raise _NotCountable
        return archive_items(Path(name), Skipped())
    return [name]
