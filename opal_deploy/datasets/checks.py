"""Checks of a data set's files, all reported at once and before the first epoch.

    missing       listed, but no file: an error, or left out on request
    unreadable    a file without an image header: left out with a warning
    empty         a class or split without an image: an error for training and validation, else a warning
    duplicate     listed twice, or two files with the same bytes: a warning; both stay, as official lists have them

Only image headers are read, except for EXIF-rotated images with boxes. Files are read in threads, because most of the
time is spent waiting, above all on a network drive.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from PIL import ExifTags, Image

from opal_deploy.datasets.listing import Listing
from opal_deploy.datasets.samples import (
    DataSet,
    Sample,
    classes_without_samples,
    display_path,
    pluralize,
    shorten_list,
)
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import Progress
from opal_deploy.preprocess.decode import MAX_PIXELS, decode, decode_error, open_file
from opal_deploy.preprocess.geometry import compute_geometry

T = TypeVar("T")
R = TypeVar("R")

# EXIF orientations that swap width and height
_TRANSPOSED = (5, 6, 7, 8)
# enough to tell nearly all images of equal size apart
_HEAD_BYTES = 4096
_NUM_THREADS = 8
# a pool keeps every waiting call in memory: a million would be a gigabyte
_CHUNK_SIZE = 8192


def check_dataset(listing: Listing, *, skip_missing: bool = False, progress: Progress | None = None) -> DataSet:
    """Return the data set without unusable files, with a warning for each kind of finding.

    Raises:
        UsageError: one line with the lists' problems, missing images unless `skip_missing` leaves them out, classes or
            splits with nothing left, and then all other findings.
    """
    data = listing.data
    paths = list(dict.fromkeys(sample.path for sample in data.select("all")))
    problems, warnings = list(listing.problems), []
    # Path.is_file may raise
    missing = [
        path for path, is_there in zip(paths, _map_in_threads(os.path.isfile, paths), strict=True) if not is_there
    ]
    absent = {*missing}
    unreadable = find_header_problems([s for s in data.select("all") if s.path not in absent], progress)
    # missing images are an error of their own: they do not also make a split empty
    unusable = absent | unreadable.keys() if skip_missing else unreadable.keys()
    train, val, test = ([s for s in split if s.path not in unusable] for split in (data.train, data.val, data.test))
    usable = replace(data, train=train, val=val, test=test)

    if missing:
        names = shorten_list([display_path(path, data.root) for path in missing])
        line = f"{len(missing):,} of {pluralize(len(paths), 'listed image', 'listed images')} missing"
        if skip_missing:
            warnings.append(f"{line} and left out: {names}")
        else:
            problems.append(f"{line}: {names} (--skip-missing leaves them out)")
    if unreadable:
        names = shorten_list([f"{display_path(path, data.root)} ({reason})" for path, reason in unreadable.items()])
        warnings.append(f"{pluralize(len(unreadable), 'file', 'files')} cannot be used, left out: {names}")

    if data.num_classes < 2:
        problems.append(f"{pluralize(data.num_classes, 'class', 'classes')} found, at least 2 are needed")
    if same := [name for name, number in Counter(data.class_names).items() if number > 1]:
        problems.append(f"several classes with the same name: {shorten_list(same)}")
    if not data.train:
        problems.append("no images to train on")
    if empty := classes_without_samples(usable.train, data.class_names):
        problems.append(f"classes without a training image: {shorten_list(empty)}")
    if data.val and not val:
        problems.append("no validation image is left")
    for name, split in (("validation", val), ("test", test)):
        if split and (lacking := classes_without_samples(split, data.class_names)):
            warnings.append(f"classes without a {name} image: {shorten_list(lacking)}")
    if data.test and not test:
        warnings.append("no test image is left")
    if problems:
        also = "; ".join([*warnings, *duplicate_warnings(usable)])
        raise UsageError(
            f"{data.root}: {'; '.join([*problems, listing.advice])}{'; also found: ' if also else ''}{also}"
        )
    return replace(usable, warnings=[*data.warnings, *warnings], skipped=[*missing, *unreadable])


def find_header_problems(samples: list[Sample], progress: Progress | None = None) -> dict[Path, str]:
    """Return the unusable files, judged by their headers, with the reasons."""
    reasons: dict[Path, str] = {}
    for done, (sample, reason) in enumerate(zip(samples, _map_in_threads(_header_problem, samples), strict=True), 1):
        if reason is not None:
            reasons[sample.path] = reason
        if progress is not None:
            progress(done, len(samples), "reading headers")
    return reasons


def _header_problem(sample: Sample) -> str | None:
    """Return why a file cannot be used, judged by its header; None for a good file."""
    try:
        with Image.open(sample.path) as image:
            if image.width * image.height > MAX_PIXELS:
                return f"{image.width}x{image.height} is over the limit of {MAX_PIXELS:,} pixels"
            if sample.box is not None:
                transposed = image.getexif().get(ExifTags.Base.Orientation) in _TRANSPOSED
                compute_geometry(decode(sample.path) if transposed else image, sample.box)
    except ImageError as error:
        return str(error)
    except Exception as error:  # Pillow's readers raise nearly anything for a damaged header; none of it is ours
        try:
            with open_file(sample.path) as stream:
                return (
                    str(decode_error(error, stream, None, MAX_PIXELS)) if sample.path.stat().st_size else "zero bytes"
                )
        except ImageError as unreadable:
            return str(unreadable)
    return None


def duplicate_warnings(data: DataSet) -> list[str]:
    """Return lines about duplicate images in one split and class, in two splits, and with two labels."""
    listed: dict[Path, list[tuple[str, int]]] = defaultdict(list)
    for split in ("train", "val", "test"):
        for sample in data.select(split):
            listed[sample.path].append((split, sample.label))
    groups = find_identical_files(listed)
    # one file, listed twice
    groups += [[path] for path in listed.keys() - {path for group in groups for path in group} if len(listed[path]) > 1]
    pairs: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        (first, split, label), *others = ((path, *entry) for path in group for entry in listed[path])
        for other, other_split, other_label in others:
            a, b = display_path(first, data.root), display_path(other, data.root)
            if split != other_split:
                pairs["in two splits, which biases results"].append(f"{a} ({split}) = {b} ({other_split})")
            if label != other_label:
                names = data.class_names[label], data.class_names[other_label]
                pairs["with two labels"].append(f"{a} ({names[0]}) = {b} ({names[1]})")
            elif split == other_split:
                pairs["in one split and class"].append(f"{a} = {b}")
    return [
        f"{pluralize(len(names), 'pair of images is', 'pairs of images are')} listed twice or byte-identical {where}: "
        f"{shorten_list(names)}"
        for where, names in pairs.items()
    ]


def find_identical_files(paths: Iterable[Path]) -> list[list[Path]]:
    """Return groups of two or more files with the same bytes, in the order of `paths`.

    Files are compared by size, then by a hash of the first 4 KB, then of the whole file, so few are read in full.
    """
    keys: dict[Path, tuple[Hashable, ...]] = dict.fromkeys(paths, ())
    groups = [list(keys)]
    for measure in (os.path.getsize, partial(_hash_file, length=_HEAD_BYTES), _hash_file):
        candidates = [path for group in groups for path in group]
        for path, key in zip(candidates, _map_in_threads(partial(_or_path, measure), candidates), strict=True):
            keys[path] += (key,)
        parts: dict[Hashable, list[Path]] = defaultdict(list)
        for path in candidates:
            parts[keys[path]].append(path)
        groups = [part for part in parts.values() if len(part) > 1]
    return groups


def _or_path(measure: Callable[[Path], Hashable], path: Path) -> Hashable:
    """Return a measure of a file; the path of an unreadable one, which equals no other. The header check names it."""
    try:
        return measure(path)
    except OSError:
        return path


def _hash_file(path: Path, length: int = -1) -> bytes:
    with path.open("rb") as file:
        return hashlib.blake2b(file.read(length)).digest()


def _map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the function's result for each item, computed in threads, in the order of the items."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for start in range(0, len(items), _CHUNK_SIZE):
            yield from pool.map(function, items[start : start + _CHUNK_SIZE])
