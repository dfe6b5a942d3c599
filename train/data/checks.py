"""What is wrong with a data set's files, all of it at once and before the first epoch.

    missing       listed but not there: an error, or left out where the user said so
    unreadable    there, but its header is no picture's: left out with a warning
    unlisted      a picture in the data set's folder that no list names: a warning
    doubled       see `duplicates`: a warning

Headers are read, pixels are not, except of turned pictures with boxes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from PIL import ExifTags, Image, UnidentifiedImageError

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.preprocess.decode import MAX_PIXELS, decode
from opal_deploy.preprocess.resize import lay_out
from opal_deploy.train.data import duplicates
from opal_deploy.train.data.image_folder import EXTENSIONS
from opal_deploy.train.data.listing import Listing
from opal_deploy.train.data.samples import DataSet, Report, Sample, classes_without, counted, listed, shown
from opal_deploy.train.data.threads import in_threads

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
        also = [*warnings[len(whole.warnings) :], *duplicates.warnings(left)]
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
                lay_out(decode(sample.path) if turned else image, sample.box)
    except UnidentifiedImageError:
        return "zero bytes" if sample.path.stat().st_size == 0 else "no decoder recognises it as an image"
    except ImageError as error:
        return str(error)
    except Exception as error:  # Pillow's readers raise nearly anything for a damaged header; none of it is ours
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None
