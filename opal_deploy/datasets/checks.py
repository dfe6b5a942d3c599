"""Checks of a data set's files, all reported at once and before the first epoch.

    missing       listed, but no file: an error
    unreadable    a file without an image header: left out with a warning
    empty         a class or split without an image: an error for training and validation, else a warning
    duplicate     listed twice, or two files with the same bytes: a warning; both stay, as official lists have them

Only image headers are read, in threads, because most of the time is spent waiting, above all on a network drive.
Training also looks for near copies of its images: saved again, resized, or the next ones of a burst.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.datasets.samples import (
    DataSet,
    Sample,
    classes_without_samples,
    display_path,
    list_images,
    pluralize,
    shorten_list,
)
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.logs import Progress, no_progress
from opal_deploy.options import StrPath
from opal_deploy.preprocess.decode import MAX_PIXELS, decode, is_transposed
from opal_deploy.preprocess.geometry import compute_geometry

T = TypeVar("T")
R = TypeVar("R")

# as many background images as the OOD score averages over
_MIN_BACKGROUND = 5
# and the images that a thread takes at a time: a million waiting calls would fill a gigabyte
_NUM_THREADS, _CHUNK_SIZE = 8, 16
# training images up to which near copies are looked for: a million thumbnails would take three gigabytes
MAX_IMAGES = 100_000
# side of a thumbnail in pixels, and its length as a vector
_SIDE = 16
THUMBNAIL = 3 * _SIDE * _SIDE
# largest distance, 1 - cosine, of a near copy. Of 543 birds and 372 pets, those saved again, down to JPEG quality 60 at
# 0.3 times the size, had 0.005 at most, different photographs 0.11 at least, but for one pair of near copies
_MAX_DISTANCE = 0.02
# and in shares of the median distance of training images to their nearest: what one fixed camera took is all alike
_MAX_SHARE = 0.05
# training images that the median is taken over, and images that are compared at once
_SAMPLE = 500


def check_dataset(data: DataSet, advice: str, progress: Progress = no_progress) -> DataSet:
    """Return the data set without unusable files, with a warning for each kind of finding.

    UsageError: one line with the lists' problems, missing images, empty classes or splits, the advice, and warnings.
    """
    problems, warnings = list(data.problems), list(data.warnings)
    unusable = find_problems(data.select("all"), progress)
    missing = [path for path in unusable if not os.path.isfile(path)]  # Path.is_file may raise
    unreadable = [path for path in unusable if path not in {*missing}]
    usable = replace(data.without(unusable), skipped=unreadable)
    if missing:
        names = shorten_list([display_path(path, data.root) for path in missing])
        problems.append(f"{pluralize(len(missing), 'listed image', 'listed images')} missing: {names}")
    if unreadable:
        names = shorten_list([f"{display_path(path, data.root)} ({unusable[path]})" for path in unreadable])
        warnings.append(f"{pluralize(len(unreadable), 'file', 'files')} cannot be used, left out: {names}")
    if data.num_classes < 2:
        problems.append(f"{pluralize(data.num_classes, 'class', 'classes')} found, at least 2 are needed")
    if same := [name for name, number in Counter(data.class_names).items() if number > 1]:
        problems.append(f"several classes with the same name: {shorten_list(same)}")
    if empty := classes_without_samples(usable.train, data.class_names):
        problems.append(f"classes without a training image: {shorten_list(empty)}")
    if data.val and not usable.val:
        problems.append("no validation image is left")
    for name, listed, kept in (("validation", data.val, usable.val), ("test", data.test, usable.test)):
        if listed and (lacking := classes_without_samples(kept, data.class_names)):
            warnings.append(f"classes without a {name} image: {shorten_list(lacking)}")
    if problems:
        findings = [*problems, advice, *warnings, *duplicate_warnings(usable)]
        raise UsageError(f"{data.root}: {'; '.join(findings)}")
    return replace(usable, warnings=warnings)


def find_problems(samples: list[Sample], progress: Progress = no_progress, *, whole: bool = False) -> dict[Path, str]:
    """Return the unusable files with the reasons, judged by their headers, or by the `whole` files."""

    def find_problem(sample: Sample) -> str | None:
        try:
            if whole or not _has_good_header(sample):
                decode(sample.path)
        except ImageError as error:
            return str(error)
        return None

    reasons: dict[Path, str] = {}
    for done, (sample, reason) in enumerate(zip(samples, map_in_threads(find_problem, samples), strict=True), 1):
        if reason is not None:
            reasons[sample.path] = reason
        progress(done, len(samples), "reading images" if whole else "reading headers")
    return reasons


def _has_good_header(sample: Sample) -> bool:
    """Return whether a file's header can be read and claims no more pixels than allowed; ImageError for a bad box."""
    try:
        with Image.open(sample.path) as image:
            size = image.size[::-1] if sample.box is not None and is_transposed(image) else image.size
    except Exception:  # Pillow's readers raise nearly anything for a damaged header; `decode` says why in a few words
        return False
    if sample.box is not None:
        compute_geometry(size, sample.box)
    return size[0] * size[1] <= MAX_PIXELS


def duplicate_warnings(data: DataSet) -> list[str]:
    """Return lines about duplicate images in one split and class, in two splits, and with two labels."""
    listed = [(split, sample) for split in ("train", "val", "test") for sample in data.select(split)]
    pairs: dict[str, list[str]] = defaultdict(list)
    for group in find_identical_files([sample.path for _, sample in listed]):
        (split, first), *others = (listed[position] for position in group)
        for other_split, other in others:
            a, b = display_path(first.path, data.root), display_path(other.path, data.root)
            if split != other_split:
                pairs["in two splits, which biases results"].append(f"{a} ({split}) = {b} ({other_split})")
            if first.label != other.label:
                names = data.class_names[first.label], data.class_names[other.label]
                pairs["with two labels"].append(f"{a} ({names[0]}) = {b} ({names[1]})")
            elif split == other_split:
                pairs["in one split and class"].append(f"{a} = {b}")
    return [
        f"{pluralize(len(names), 'pair of images is', 'pairs of images are')} listed twice or byte-identical {where}: "
        f"{shorten_list(names)}"
        for where, names in pairs.items()
    ]


def find_identical_files(paths: Sequence[Path]) -> list[list[int]]:
    """Return groups of two or more positions of files with the same bytes; a path may be listed twice."""
    positions = [*range(len(paths))]
    # only files of equal size are read
    for measure in (os.path.getsize, compute_sha256):
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for position, key in zip(positions, map_in_threads(measure, [paths[i] for i in positions]), strict=True):
            groups[key].append(position)
        repeated = [group for group in groups.values() if len(group) > 1]
        positions = [position for group in repeated for position in group]
    return repeated


def map_in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the function's result for each item, computed in threads, in the order of the items."""
    with ThreadPool(_NUM_THREADS) as pool:
        yield from pool.imap(function, items, _CHUNK_SIZE)


def read_background(folder: StrPath, data: DataSet) -> list[Sample]:
    """Return the out-of-distribution images of `--background`, whole, with label 0, checked like a data set's images.

    UsageError: there are fewer than five, one is damaged by its header, or one is in the data set, too.
    """
    root = Path(folder)
    background = [Sample(path, 0) for path in list_images(root)]
    own = len(background)
    if own < _MIN_BACKGROUND:
        images = pluralize(own, "image", "images")
        raise UsageError(f"--background {root}: {images} there; expected {_MIN_BACKGROUND} JPEG or PNG files or more")
    if problems := find_problems(background):
        listed = shorten_list([f"{display_path(path, root)} ({why})" for path, why in problems.items()])
        raise UsageError(f"--background {root}: cannot be used: {listed}; remove or replace them")
    groups = find_identical_files([sample.path for sample in (*background, *data.select("all"))])
    if both := sorted(background[i].path for group in groups if max(group) >= own for i in group if i < own):
        listed = shorten_list([display_path(path, root) for path in both])
        images = pluralize(len(both), "image is", "images are")
        raise UsageError(f"--background {root}: {images} in {data.root} too: {listed}; leave them out")
    return background


def compute_thumbnail(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the thumbnail of an image, uint8 [H, W, 3 or more], by its first three channels: float32 [768].

    The vector has mean 0 and length 1; it is all 0 for an image of one colour.
    """
    small = Image.fromarray(pixels[..., :3]).resize((_SIDE, _SIDE), Image.Resampling.BOX)
    vector = np.asarray(small, np.float32).ravel()
    vector = vector - vector.mean()
    return np.asarray(vector / max(float(np.linalg.norm(vector)), 1e-12))


def find_near_copies(train: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return for each image of another split the training image that it is nearly the same as, int64 [m]; -1: none.

    Both splits are given by their thumbnails, float32 [n, 768] and [m, 768].
    """
    copied = np.full(len(others), -1, np.int64)
    if not len(others) or not 2 <= len(train) <= MAX_IMAGES:
        return copied
    sample = np.linspace(0, len(train) - 1, min(len(train), _SAMPLE)).astype(np.int64)
    cosines = train[sample] @ train.T
    cosines[np.arange(len(sample)), sample] = -1
    limit = min(_MAX_DISTANCE, _MAX_SHARE * float(np.median(1 - cosines.max(axis=1))))
    for start in range(0, len(others), _SAMPLE):
        cosines = others[start : start + _SAMPLE] @ train.T
        nearest = cosines.argmax(axis=1)
        near = 1 - cosines[np.arange(len(cosines)), nearest] <= limit
        copied[start : start + _SAMPLE] = np.where(near, nearest, -1)
    return copied
