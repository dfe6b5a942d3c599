"""Listings: the content of a data set's official lists, and helpers that adapters share.

A `Listing` holds what the lists say; `checks` finds out whether the image files exist and can be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from opal_deploy.datasets.samples import DataSet, Sample, shorten_list
from opal_deploy.errors import UsageError, require

# an image file and its class index
LabeledPath = tuple[Path, int]


@dataclass(frozen=True)
class Listing:
    """A data set as its lists describe it.

    Attributes:
        data: the official splits; image files may be missing or broken.
        problems: clauses about what is wrong with the lists; they are raised together with the findings of `checks`.
        image_folders: folders whose images should all be in some list.
        advice: what to do about an error, completing "...; ".
    """

    data: DataSet
    problems: list[str] = field(default_factory=list)
    image_folders: tuple[Path, ...] = ()
    advice: str = "unpack the official archives again"


@dataclass(frozen=True)
class Adapter:
    """The functions that recognize and read one data set.

    Attributes:
        name: the name on the command line.
        title: its authors' name for it.
        recognizes: whether a folder is unmistakably this data set.
        read: from the data set's folder, and the partition's number if there are several, to its lists.
        folders: usual names of the data set's folder, to find it in its parent; torchvision's names first.
        partitions: the number of official partitions; 0 for a data set with a single split.
    """

    name: str
    title: str
    recognizes: Callable[[Path], bool]
    read: Callable[..., Listing]
    folders: tuple[str, ...] = ()
    partitions: int = 0


def build_listing(
    layout: str,
    folder: Path,
    class_names: list[str],
    splits: Mapping[str, list[LabeledPath]],
    *,
    problems: Iterable[str] = (),
    warnings: Iterable[str] = (),
    image_folders: tuple[Path, ...] = (),
) -> Listing:
    """Return a listing of whole images; labels without a class become a problem.

    Args:
        splits: `train`, and possibly `val` and `test`.
        layout, folder, class_names, problems, warnings, image_folders: as for DataSet and Listing.
    """
    problems = list(problems)
    samples: dict[str, list[Sample]] = {}
    for name, pairs in splits.items():
        unknown = sorted({label for _, label in pairs if not 0 <= label < len(class_names)})
        if unknown:
            # the official files count from 1
            ids = shorten_list([str(label + 1) for label in unknown])
            problems.append(f"class ids in the {name} list outside 1 to {len(class_names)}: {ids}")
        samples[name] = [Sample(path, label) for path, label in pairs if label not in unknown]
    train, val, test = (samples.get(name, []) for name in ("train", "val", "test"))
    return Listing(
        DataSet(folder, layout, class_names, train, val, test, warnings=list(warnings)), problems, image_folders
    )


def group_names(
    pairs: Iterable[LabeledPath], name_of: Callable[[Path], str], table: str
) -> tuple[dict[int, set[str]], list[str]]:
    """Return the names that each label of a table has, and problems unless labels and names are one to one."""
    names: dict[int, set[str]] = {}
    for path, label in pairs:
        names.setdefault(label, set()).add(name_of(path))
    problems = []
    if unused := [str(label + 1) for label in range(max(names, default=-1) + 1) if label not in names]:
        problems.append(f"class ids without an image in {table}: {shorten_list(unused)}")
    if several := [f"{label + 1} ({', '.join(sorted(each))})" for label, each in names.items() if len(each) > 1]:
        problems.append(f"class ids with several names in {table}: {shorten_list(several)}")
    return names, problems


# files ----------------------------------------------------------------------------------------------------------------


def missing_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names that `folder` lacks; a name that ends in a slash is a folder."""
    return [n for n in names if not ((folder / n).is_dir() if n.endswith("/") else (folder / n).is_file())]


def has_files(folder: Path, *names: str) -> bool:
    """Return whether `folder` has all these files; a name that ends in a slash is a folder."""
    return not missing_files(folder, names)


def require_files(folder: Path, title: str, missing: list[str], advice: str = "") -> None:
    """Raise UsageError with all the names, if any, that a data set's folder is missing."""
    if missing:
        raise UsageError(
            f"{folder}: read as {title} but lacks {shorten_list(missing)}; "
            f"{advice or 'unpack all of the official archives there, or name another data set or folder'}; "
            "if its folders are classes, give --dataset imagefolder"
        )


def unreadable_error(error: OSError, path: Path, advice: str = "make it readable, or move it elsewhere") -> UsageError:
    """Return the operating system's error as one line; `path` is for errors without a file name."""
    name = error.filename if isinstance(error.filename, str | bytes) else str(path)
    return UsageError(f"{os.fsdecode(name)}: cannot be read ({error.strerror or error}); {advice}")


def read_text(path: Path, advice: str, *, errors: str = "strict") -> str:
    """Return a list's text, without the byte order mark that editors on Windows add.

    Args:
        path: the list.
        advice: what to do about a damaged list, completing "...; ".
        errors: how to decode bytes that are not UTF-8, as for `open`.

    Raises:
        UsageError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except OSError as error:
        raise unreadable_error(error, path, advice) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a readable UTF-8 table ({error}); {advice}") from None


def read_matlab(path: Path) -> dict[str, Any]:
    """Return the variables of a Matlab file, squeezed.

    Raises:
        UsageError: not a Matlab file.
    """
    require("scipy", "train", f"reading {path}")
    from scipy.io import loadmat

    try:
        variables: dict[str, Any] = loadmat(path, squeeze_me=True)
    except Exception as error:  # SciPy's reader raises nearly anything for a damaged file
        raise UsageError(
            f"{path}: not a readable Matlab file ({summarize_error(error)}); unpack the official archive again"
        ) from None
    return variables


def summarize_error(error: Exception) -> str:
    """Return another library's error as one line, without torchvision's advice to download."""
    text = " ".join(str(error).split()).split(" You can use download")[0]
    return f"{type(error).__name__}: {text}" if not isinstance(error, RuntimeError) else text.rstrip(".")


# what lists say -------------------------------------------------------------------------------------------------------


def is_decimal(text: str) -> bool:
    """Return whether a word is an ASCII number; str.isdigit also takes a superscript 1."""
    return text.isascii() and text.isdecimal()


def is_path_inside(name: str) -> bool:
    """Return whether a path stays in the folder that it is relative to."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def find_escaping_paths(names: Iterable[str], table: str, folder: str) -> list[str]:
    """Return a problem if any of a table's paths lead out of the image folder."""
    outside = [name for name in names if not is_path_inside(name)]
    return [f"paths of {table} that lead out of {folder}/: {shorten_list(outside)}"] if outside else []
