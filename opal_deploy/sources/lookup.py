"""Values of images, found by the image's path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Generic, TypeVar

from opal_deploy.sources.items import FRAME_NAME
from opal_deploy.storage.urls import is_url, redact

T = TypeVar("T")


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
