"""Reading of a group's images ahead of their decoding, where each read waits for an answer over a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from opal_deploy.preprocess.decode import FileSource, Source
from opal_deploy.storage.files import RemoteFile

# requests that a worker has under way at a time, and bytes that it holds of images that are not decoded yet
_REQUESTS = 8
_MAX_BYTES = 64 << 20
# of an image that was not listed
_ASSUMED_BYTES = 4 << 20


def is_remote(source: Source) -> bool:
    """Return whether reading an image asks another machine."""
    return isinstance(source, RemoteFile) or isinstance(getattr(source, "path", None), RemoteFile)


class ReadAhead:
    """Reads images over a network ahead of their decoding, in threads of its own; used by one thread."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._threads = ThreadPoolExecutor(_REQUESTS, "read-ahead")

    def read(self, sources: Sequence[Source]) -> Iterator[Source]:
        """Yield the sources; of those over a network, the next few are read meanwhile.

        As many as fit into 64 MiB are held, and one that is larger.
        """
        futures: dict[int, Future[BinaryIO]] = {}
        sizes = [_size(source) if is_remote(source) else 0 for source in sources]
        begun = held = 0
        for index, source in enumerate(sources):
            while begun < len(sources) and (
                begun <= index or (len(futures) < _REQUESTS and held + sizes[begun] <= _MAX_BYTES)
            ):
                upcoming = sources[begun]
                if isinstance(upcoming, FileSource) and sizes[begun]:
                    futures[begun] = self._threads.submit(upcoming.open)
                    held += sizes[begun]
                begun += 1
            future = futures.pop(index, None)
            held -= sizes[index]
            yield source if future is None or not isinstance(source, FileSource) else _ReadFile(source, future)


class _ReadFile:
    """An image that is being read already; opened a second time, it is read again."""

    def __init__(self, source: FileSource, future: Future[BinaryIO]) -> None:
        self._source = source
        self._future: Future[BinaryIO] | None = future

    def open(self) -> BinaryIO:
        future, self._future = self._future, None
        return self._source.open() if future is None else future.result()


def _size(source: Source) -> int:
    size = getattr(source, "size", None)
    if isinstance(source, RemoteFile):
        size = None if source.fingerprint is None else source.fingerprint.size
    return max(1, size) if isinstance(size, int) else _ASSUMED_BYTES
