"""Looking at many files at once: they are waited for more than computed on, above all on a network drive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 8
# a pool keeps every waiting call in memory: a million would be a gigabyte
_AT_ONCE = 8192


def in_threads(look: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """`look` at every item, in threads; results in the items' order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(items), _AT_ONCE):
            yield from pool.map(look, items[start : start + _AT_ONCE])
