"""Pictures that are there twice: listed twice, or two files with the same bytes.

Nothing is left out for it: which of two is right is not ours to say, and official lists stay official.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

from opal_deploy.train.data.samples import DataSet, Sample, counted, listed, shown
from opal_deploy.train.data.threads import in_threads

# enough to tell nearly all pictures of equal length apart without reading them
_HEAD_BYTES = 4096


def warnings(data: DataSet) -> list[str]:
    """One line each for doubled pictures within a split and class, in two splits, and with two labels."""
    listings: dict[Path, list[tuple[str, Sample]]] = defaultdict(list)
    for split, samples in (("train", data.train), ("val", data.val), ("test", data.test)):
        for sample in samples:
            listings[sample.path].append((split, sample))
    same, splits, labels = [], [], []
    groups = identical(listings)
    grouped = {path for group in groups for path in group}
    groups += [[path] for path, found in listings.items() if len(found) > 1 and path not in grouped]
    for group in groups:
        (split, first), *others = (occurrence for path in group for occurrence in listings[path])
        for other_split, other in others:
            a, b = shown(first.path, data.root), shown(other.path, data.root)
            if split != other_split:
                splits.append(f"{a} ({split}) = {b} ({other_split})")
            if first.label != other.label:
                labels.append(f"{a} ({data.class_names[first.label]}) = {b} ({data.class_names[other.label]})")
            if (split, first.label) == (other_split, other.label):
                same.append(f"{a} = {b}")
    lines = {
        "listed twice or byte-identical, in one split and class": same,
        "listed or byte-identical in two splits, so that one is measured on what another has seen": splits,
        "listed or byte-identical with two labels": labels,
    }
    return [
        f"{counted(len(pairs), 'pair of pictures is', 'pairs of pictures are')} {what}: {listed(pairs)}"
        for what, pairs in lines.items()
        if pairs
    ]


def identical(paths: Iterable[Path]) -> list[list[Path]]:
    """Groups of two or more files with the same bytes, in the order given.

    By size, then by a hash of the first 4 KB, then of the whole file: few files are read in full.
    """
    groups = [list(paths)]
    for key in (_size, _head, _whole):
        keys = in_threads(key, [path for group in groups for path in group])
        groups = [part for group in groups for part in _alike(group, keys)]
    return groups


def _alike(group: list[Path], keys: Iterator[Hashable]) -> list[list[Path]]:
    """The parts of two or more of a group that have the same key; takes one of `keys` for each path."""
    parts: dict[Hashable, list[Path]] = defaultdict(list)
    for path in group:
        parts[next(keys)].append(path)
    # a file that cannot be read is like no other; the header check names it
    parts.pop(None, None)
    return [part for part in parts.values() if len(part) > 1]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _head(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return hashlib.blake2b(file.read(_HEAD_BYTES)).digest()
    except OSError:
        return None


def _whole(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError:
        return None
