"""From a folder to a data set that is known to be usable before the first epoch.

Two layouts are told apart by their files: CUB-200-2011's own (see `cub`) and ImageFolder (see `image_folder`). Every
file's header is read once, so that what cannot be a picture is named at the start and not in epoch 9.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from PIL import ExifTags, Image, UnidentifiedImageError

from opal_deploy.errors import ImageError, UsageError, require
from opal_deploy.preprocess.decode import MAX_PIXELS, decode
from opal_deploy.preprocess.resize import lay_out
from opal_deploy.train.data import cub, image_folder
from opal_deploy.train.data.samples import DataSet, Sample, classes_without, listed

__all__ = ["DataSet", "Sample", "read", "stratified_split"]

# the authors' validation split
VAL_FRACTION = 0.2
VAL_SEED = 42

# EXIF orientations that swap width and height
_TRANSPOSED = (5, 6, 7, 8)
# headers are waited for more than computed, above all on a network drive
_HEADER_THREADS = 8


def read(root: Path) -> DataSet:
    """Read, check, and set a fifth of each class aside for validation where the data set does not.

    Args:
        root: CUB's folder or an ImageFolder.

    Raises:
        UsageError: one line with everything that is wrong and what to do.
    """
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder; give CUB-200-2011's folder or one with a folder per class")
    data = _without_unreadable(cub.read(root) if cub.is_cub(root) else image_folder.read(root))
    if data.val:
        return data
    train, val = stratified_split([sample.label for sample in data.train], data.class_names)
    return replace(data, train=[data.train[i] for i in train], val=[data.train[i] for i in val])


def stratified_split(labels: list[int], class_names: list[str]) -> tuple[list[int], list[int]]:
    """The authors' split of the training pictures: a fifth of each class for validation.

    Args:
        labels: class index of each picture.
        class_names: C names, for errors.

    Returns:
        Positions in `labels` for training and for validation, each ascending.

    Raises:
        UsageError: a class with one picture, or fewer validation pictures than classes.
    """
    require("sklearn", "train", "a data set without val/", pip_name="scikit-learn")
    from sklearn.model_selection import StratifiedShuffleSplit

    counts = Counter(labels)
    lonely = [name for label, name in enumerate(class_names) if counts[label] < 2]
    advice = "add pictures, or give a val/ folder beside train/"
    if lonely:
        raise UsageError(f"no validation split possible, classes with a single picture: {listed(lonely)}; {advice}")
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=VAL_FRACTION, random_state=VAL_SEED)
    try:
        train, val = next(splitter.split(labels, labels))
    except ValueError as error:
        raise UsageError(
            f"no validation split possible, {len(labels)} pictures are too few for {len(class_names)} classes "
            f"({error}); {advice}"
        ) from None
    return sorted(int(i) for i in train), sorted(int(i) for i in val)


def _without_unreadable(data: DataSet) -> DataSet:
    everything = [*data.train, *data.val, *data.test]
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        reasons = dict(zip((s.path for s in everything), pool.map(_header_problem, everything), strict=True))
    bad = {path: reason for path, reason in reasons.items() if reason is not None}
    if not bad:
        return data
    train, val, test = ([s for s in split if s.path not in bad] for split in (data.train, data.val, data.test))
    lines = [f"{path.relative_to(data.root)} ({reason})" for path, reason in bad.items()]
    line = f"{len(bad):,} of {len(everything):,} files cannot be used and are left out: {listed(lines)}"
    if gone := classes_without(train, data.class_names):
        raise UsageError(f"{data.root}: no training picture is left of {listed(gone)}; {line}")
    if data.val and not val:
        raise UsageError(f"{data.root}: no validation picture is left; {line}")
    return replace(
        data, train=train, val=val, test=test, warnings=[*data.warnings, line], skipped=[*data.skipped, *bad]
    )


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
