"""Things that a file tells of images, found by the image's path or by as much of its end as the file names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class ByPath(Generic[T]):
    """Values by image: `a/b.jpg` names `data/a/b.jpg`.

    Where the file's names begin further up (`data/a/b.jpg` for an image given as `a/b.jpg`), one that ends in the whole
    path that was given will do, if it is the only one. Names that differ in a folder never meet: `x/1.jpg` is not
    `y/1.jpg`, and a wrong value would be a wrong answer without a word.
    """

    def __init__(self, by_name: Mapping[str, T]) -> None:
        self._by_name = by_name
        self._by_base: dict[str, list[str]] = {}
        for name in by_name:
            self._by_base.setdefault(name.rpartition("/")[2], []).append(name)

    def __len__(self) -> int:
        return len(self._by_name)

    def names(self, path: str) -> list[str]:
        """The names that may mean `path`, with `/` between folders: none, one, or several that cannot be told apart."""
        parts = path.split("/")
        for start in range(len(parts)):
            key = "/".join(parts[start:])
            if key in self._by_name:
                return [key]
        return [name for name in self._by_base.get(parts[-1], []) if name.endswith("/" + path)]

    def __getitem__(self, name: str) -> T:
        return self._by_name[name]
