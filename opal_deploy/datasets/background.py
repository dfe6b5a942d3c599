"""Out-of-distribution images, the folder of `--background`: empty scenes and other things that a camera sees."""

from __future__ import annotations

from pathlib import Path

from opal_deploy.datasets.checks import find_header_problems, find_identical_files
from opal_deploy.datasets.samples import DataSet, Sample, display_path, list_images, pluralize, shorten_list
from opal_deploy.errors import UsageError
from opal_deploy.options import StrPath

# as many as the OOD score averages over
_MIN_IMAGES = 5


def list_background(folder: StrPath) -> list[Sample]:
    """Return the images below a folder, whole and with label 0; UsageError for fewer than five."""
    images = list_images(Path(folder))
    if len(images) < _MIN_IMAGES:
        raise UsageError(
            f"--background {folder}: {pluralize(len(images), 'image', 'images')} there; expected at least "
            f"{_MIN_IMAGES}, out-of-distribution JPEG or PNG files"
        )
    return [Sample(image, 0) for image in images]


def read_background(folder: StrPath, data: DataSet) -> list[Sample]:
    """Return the images below a folder, checked like a data set's images.

    Raises:
        UsageError: there are fewer than five, one is damaged by its header, or one is in the data set, too.
    """
    background = list_background(folder)
    if problems := find_header_problems(background):
        listed = shorten_list([f"{display_path(path, Path(folder))} ({why})" for path, why in problems.items()])
        raise UsageError(f"--background {folder}: cannot be used: {listed}; remove or replace them")
    known, paths = {sample.path for sample in data.select("all")}, {sample.path for sample in background}
    copies = [path for group in find_identical_files(known | paths) if known.intersection(group) for path in group]
    if both := sorted(paths.intersection([*known, *copies])):
        listed = shorten_list([display_path(path, Path(folder)) for path in both])
        raise UsageError(
            f"--background {folder}: {pluralize(len(both), 'image is', 'images are')} in {data.root} too: {listed}; "
            "it is for out-of-distribution images"
        )
    return background
