"""Checks of a data set's files, all reported at once and before the first epoch.

    missing       listed, but no file: an error, or left out on request
    unreadable    a file without an image header: left out with a warning
    unlisted      an image in the data set's folder that no list names: a warning
    duplicate     listed twice, or two files with the same bytes: a warning; both stay, as official lists have them

Only image headers are read, except for EXIF-rotated images with boxes. Files are read in threads, because most of the
time is spent waiting, above all on a network drive.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from PIL import ExifTags, Image

from opal_deploy.datasets.image_folder import EXTENSIONS
from opal_deploy.datasets.listing import Listing
from opal_deploy.datasets.samples import DataSet, Sample, classes_without_samples, display_path, pluralize, shorten_list
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import Progress
from opal_deploy.preprocess.decode import MAX_PIXELS, decode, open_file
from opal_deploy.preprocess.decode_errors import decode_error
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

    Args:
        listing: what an adapter read.
        skip_missing: leave missing images out instead of raising.
        progress: called while image headers are read.

    Raises:
        UsageError: one line with the lists' problems, missing images, classes or splits with nothing left, and then all
            other findings.
    """
    data = listing.data
    samples = [*data.train, *data.val, *data.test]
    problems, warnings = list(listing.problems), list(data.warnings)

    exists = _check_each(samples, lambda sample: os.path.isfile(sample.path))  # Path.is_file may raise
    missing = [path for path, is_there in exists.items() if not is_there]
    existing = [sample for sample in samples if exists[sample.path]]
    unreadable = find_header_problems(existing, progress)
    # missing images are an error of their own: they do not also make a split empty
    unusable = {*missing, *unreadable} if skip_missing else unreadable.keys()
    train, val, test = ([s for s in split if s.path not in unusable] for split in (data.train, data.val, data.test))
    usable = replace(data, train=train, val=val, test=test)

    if missing:
        names = shorten_list([display_path(path, data.root) for path in missing])
        of = pluralize(len(exists), "listed image", "listed images")
        line = f"{pluralize(len(missing), f'of {of} is', f'of {of} are')} missing"
        if skip_missing:
            warnings.append(f"{line} and left out: {names}")
        else:
            problems.append(f"{line}: {names} (--skip-missing leaves them out)")
    if unreadable:
        names = shorten_list([f"{display_path(path, data.root)} ({reason})" for path, reason in unreadable.items()])
        files = pluralize(len(exists) - len(missing), "file", "files")
        warnings.append(f"{len(unreadable):,} of {files} cannot be used, left out: {names}")
    if unlisted := sorted(set(_walk_images(listing.image_folders)) - exists.keys()):
        names = shorten_list([display_path(path, data.root) for path in unlisted])
        warnings.append(f"skipped {pluralize(len(unlisted), 'image', 'images')} that no list names: {names}")

    if data.num_classes < 2:
        problems.append(f"{pluralize(data.num_classes, 'class', 'classes')} found, at least 2 are needed")
    if not data.train:
        problems.append("no images to train on")
    never_listed = classes_without_samples(data.train, data.class_names)
    if never_listed:
        problems.append(f"classes without a training image: {shorten_list(never_listed)}")
    emptied = [name for name in classes_without_samples(usable.train, data.class_names) if name not in never_listed]
    if emptied:
        problems.append(f"no training image is left of {shorten_list(emptied)}")
    if data.val and not usable.val:
        problems.append("no validation image is left")
    if data.test and not usable.test:
        warnings.append("no test image is left")
    if problems:
        also = [*warnings[len(data.warnings) :], *duplicate_warnings(usable)]
        raise UsageError(
            f"{data.root}: {'; '.join(problems)}; {listing.advice}{'; also found: ' if also else ''}{'; '.join(also)}"
        )
    return replace(usable, warnings=warnings, skipped=[*missing, *unreadable])


def find_header_problems(samples: list[Sample], progress: Progress | None = None) -> dict[Path, str]:
    """Return the unusable files, judged by their headers, with the reasons."""
    reasons = _check_each(samples, _header_problem, progress)
    return {path: reason for path, reason in reasons.items() if reason is not None}


def _check_each(samples: list[Sample], check: Callable[[Sample], T], progress: Progress | None = None) -> dict[Path, T]:
    results: dict[Path, T] = {}
    for done, (sample, result) in enumerate(zip(samples, map_in_threads(check, samples), strict=True), 1):
        results[sample.path] = result
        if progress is not None:
            progress(done, len(samples), "reading headers")
    return results


def _walk_images(folders: tuple[Path, ...]) -> Iterator[Path]:
    for folder in folders:
        for parent, subfolders, names in os.walk(folder):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for name in names:
                if Path(name).suffix.lower() in EXTENSIONS and not name.startswith("."):
                    yield Path(parent, name)


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
        return _explain_header(sample.path, error)
    return None


def _explain_header(path: Path, error: Exception) -> str:
    try:
        with open_file(path) as stream:
            return str(decode_error(error, stream, None, MAX_PIXELS)) if path.stat().st_size else "zero bytes"
    except ImageError as unreadable:
        return str(unreadable)


def duplicate_warnings(data: DataSet) -> list[str]:
    """Return lines about duplicate images in one split and class, in two splits, and with two labels."""
    occurrences: dict[Path, list[tuple[str, Sample]]] = defaultdict(list)
    for split, samples in (("train", data.train), ("val", data.val), ("test", data.test)):
        for sample in samples:
            occurrences[sample.path].append((split, sample))
    groups = find_identical_files(occurrences)
    grouped = {path for group in groups for path in group}
    groups += [[path] for path, listed in occurrences.items() if len(listed) > 1 and path not in grouped]

    same, splits, labels = [], [], []
    for group in groups:
        (split, first), *others = (occurrence for path in group for occurrence in occurrences[path])
        for other_split, other in others:
            a, b = display_path(first.path, data.root), display_path(other.path, data.root)
            if split != other_split:
                splits.append(f"{a} ({split}) = {b} ({other_split})")
            if first.label != other.label:
                labels.append(f"{a} ({data.class_names[first.label]}) = {b} ({data.class_names[other.label]})")
            if (split, first.label) == (other_split, other.label):
                same.append(f"{a} = {b}")
    lines = {
        "listed twice or byte-identical, in one split and class": same,
        "listed or byte-identical in two splits, which biases results": splits,
        "listed or byte-identical with two labels": labels,
    }
    return [
        f"{pluralize(len(pairs), 'pair of images is', 'pairs of images are')} {what}: {shorten_list(pairs)}"
        for what, pairs in lines.items()
        if pairs
    ]


def find_identical_files(paths: Iterable[Path]) -> list[list[Path]]:
    """Return groups of two or more files with the same bytes, in the order of `paths`.

    Files are compared by size, then by a hash of the first 4 KB, then of the whole file, so few are read in full.
    """
    groups = [list(paths)]
    for key in (_file_size, partial(_hash_file, length=_HEAD_BYTES), _hash_file):
        keys = map_in_threads(partial(_or_none, key), [path for group in groups for path in group])
        groups = [part for group in groups for part in _split_by_key(group, keys)]
    return groups


def _split_by_key(group: list[Path], keys: Iterator[Hashable]) -> list[list[Path]]:
    """Return the parts of a group, of two or more files, that share a key; takes one of `keys` for each path."""
    parts: dict[Hashable, list[Path]] = defaultdict(list)
    for path in group:
        parts[next(keys)].append(path)
    # unreadable files equal no other; the header check names them
    parts.pop(None, None)
    return [part for part in parts.values() if len(part) > 1]


def _or_none(key: Callable[[Path], Hashable], path: Path) -> Hashable:
    try:
        return key(path)
    except OSError:
        return None


def _file_size(path: Path) -> int:
    return path.stat().st_size


def _hash_file(path: Path, length: int = -1) -> bytes:
    with path.open("rb") as file:
        return hashlib.blake2b(file.read(length)).digest()


def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the function's result for each item, computed in threads, in the order of the items."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for start in range(0, len(items), _CHUNK_SIZE):
            yield from pool.map(function, items[start : start + _CHUNK_SIZE])
