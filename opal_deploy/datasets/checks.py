"""What is wrong with a data set's files, all of it at once and before the first epoch.

    missing       listed but not there: an error, or left out where the user said so
    unreadable    there, but its header is no picture's: left out with a warning
    unlisted      a picture in the data set's folder that no list names: a warning
    doubled       see `duplicates`: a warning

Headers are read, pixels are not, except of turned pictures with boxes.

Pictures that are there twice: listed twice, or two files with the same bytes.

Nothing is left out for it: which of two is right is not ours to say, and official lists stay official.

Looking at many files at once: they are waited for more than computed on, above all on a network drive."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from PIL import ExifTags, Image, UnidentifiedImageError

from opal_deploy.datasets import checks
from opal_deploy.datasets.image_folder import EXTENSIONS
from opal_deploy.datasets.listing import Listing
from opal_deploy.datasets.samples import DataSet, Report, Sample, classes_without, counted, listed, shown
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import MAX_PIXELS, decode
from opal_deploy.preprocess.geometry import compute_geometry

T = TypeVar("T")

# EXIF orientations that swap width and height
_TRANSPOSED = (5, 6, 7, 8)


def usable(listing: Listing, *, skip_missing: bool = False, report: Report | None = None) -> DataSet:
    """The data set without what cannot be used, with a warning for each kind of thing found.

    Args:
        listing: from an adapter.
        skip_missing: leave missing pictures out instead of refusing the data set.
        report: called while the pictures' headers are looked at.

    Raises:
        UsageError: one line with the lists' problems, missing pictures, classes or splits that have nothing left, and,
            after those, whatever else was found.
    """
    whole = listing.data
    everything = [*whole.train, *whole.val, *whole.test]
    problems, warnings = list(listing.problems), list(whole.warnings)

    present = _by_path(everything, lambda sample: os.path.isfile(sample.path))  # Path.is_file may raise
    missing = [path for path, there in present.items() if not there]
    existing = [sample for sample in everything if present[sample.path]]
    reasons = _by_path(existing, _header_problem, report)
    bad = {path: reason for path, reason in reasons.items() if reason is not None}
    # what is refused below for missing pictures is not called empty on top of it
    left = _without(whole, {*missing, *bad} if skip_missing else bad)

    if missing:
        names = listed([shown(path, whole.root) for path in missing])
        of = counted(len(present), "listed picture", "listed pictures")
        line = f"{counted(len(missing), f'of {of} is', f'of {of} are')} missing"
        if skip_missing:
            warnings.append(f"{line} and left out: {names}")
        else:
            problems.append(f"{line}: {names} (--skip-missing leaves them out)")
    if bad:
        names = listed([f"{shown(path, whole.root)} ({reason})" for path, reason in bad.items()])
        warnings.append(f"{len(bad):,} of {counted(len(reasons), 'file', 'files')} cannot be used, left out: {names}")
    if unlisted := sorted(set(_pictures_in(listing.pictures)) - present.keys()):
        names = listed([shown(path, whole.root) for path in unlisted])
        warnings.append(f"{counted(len(unlisted), 'picture is', 'pictures are')} in no list and not used: {names}")

    if whole.num_classes < 2:
        problems.append(f"{counted(whole.num_classes, 'class', 'classes')} found, at least 2 are needed")
    if not whole.train:
        problems.append("no pictures to train on")
    never = classes_without(whole.train, whole.class_names)
    if never:
        problems.append(f"classes without a training picture: {listed(never)}")
    if gone := [name for name in classes_without(left.train, whole.class_names) if name not in never]:
        problems.append(f"no training picture is left of {listed(gone)}")
    if whole.val and not left.val:
        problems.append("no validation picture is left")
    if whole.test and not left.test:
        warnings.append("no test picture is left")
    if problems:
        also = [*warnings[len(whole.warnings) :], *checks.warnings(left)]
        raise UsageError(
            f"{whole.root}: {'; '.join(problems)}; {listing.advice}{'; found too: ' if also else ''}{'; '.join(also)}"
        )
    return replace(left, warnings=warnings, skipped=[*missing, *bad])


def _by_path(samples: list[Sample], look: Callable[[Sample], T], report: Report | None = None) -> dict[Path, T]:
    found: dict[Path, T] = {}
    for done, (sample, result) in enumerate(zip(samples, in_threads(look, samples), strict=True), 1):
        found[sample.path] = result
        if report is not None:
            report(done, len(samples), "reading headers")
    return found


def _without(data: DataSet, gone: Collection[Path]) -> DataSet:
    if not gone:
        return data
    gone = set(gone)
    train, val, test = ([s for s in split if s.path not in gone] for split in (data.train, data.val, data.test))
    return replace(data, train=train, val=val, test=test)


def _pictures_in(folders: tuple[Path, ...]) -> Iterator[Path]:
    for folder in folders:
        for parent, below, names in os.walk(folder):
            below[:] = [name for name in below if not name.startswith(".")]
            for name in names:
                if Path(name).suffix.lower() in EXTENSIONS and not name.startswith("."):
                    yield Path(parent, name)


def _header_problem(sample: Sample) -> str | None:
    """Why this file cannot be used, from its header alone; None for a good one."""
    try:
        with Image.open(sample.path) as image:
            if image.width * image.height > MAX_PIXELS:
                return f"{image.width}x{image.height} is over the limit of {MAX_PIXELS:,} pixels"
            if sample.box is not None:
                turned = image.getexif().get(ExifTags.Base.Orientation) in _TRANSPOSED
                compute_geometry(decode(sample.path) if turned else image, sample.box)
    except UnidentifiedImageError:
        return "zero bytes" if sample.path.stat().st_size == 0 else "no decoder recognises it as an image"
    except ImageError as error:
        return str(error)
    except Exception as error:  # Pillow's readers raise nearly anything for a damaged header; none of it is ours
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


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


R = TypeVar("R")

_THREADS = 8
# a pool keeps every waiting call in memory: a million would be a gigabyte
_AT_ONCE = 8192


def in_threads(look: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """`look` at every item, in threads; results in the items' order."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(items), _AT_ONCE):
            yield from pool.map(look, items[start : start + _AT_ONCE])
