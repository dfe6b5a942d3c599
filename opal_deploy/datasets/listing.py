"""What an adapter makes of a data set's own lists, before anybody looked whether the pictures are there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar

from opal_deploy.datasets.samples import DataSet, Sample, counted, listed
from opal_deploy.errors import UsageError

# a picture's file and its class index
Pair = tuple[Path, int]

T = TypeVar("T")


@dataclass(frozen=True)
class Listing:
    """A data set as its lists describe it.

    Attributes:
        data: the official splits; pictures may be missing or broken.
        problems: what is wrong with the lists, a clause each; any is an error, raised with all that `checks` finds.
        pictures: folders in which every picture should be in some list.
        advice: what to do about an error, completing "...; ".
    """

    data: DataSet
    problems: list[str] = field(default_factory=list)
    pictures: tuple[Path, ...] = ()
    advice: str = "unpack the official archives again"


@dataclass(frozen=True)
class Adapter:
    """How one data set is recognised and read.

    Attributes:
        name: as a user gives it.
        title: as its authors call it.
        recognises: whether a folder is unmistakably this data set's own.
        read: from the data set's folder and the partition's number to its lists.
        folders: what the data set's own folder is called where its parent is given, torchvision's names first.
        partitions: how many official ones there are; 0 for a data set with a single split.
    """

    name: str
    title: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, int], Listing]
    folders: tuple[str, ...] = ()
    partitions: int = 0


def lacking(folder: Path, names: Iterable[str]) -> list[str]:
    """Which of the files, or folders where the name ends in a slash, are not in `folder`."""
    return [n for n in names if not ((folder / n).is_dir() if n.endswith("/") else (folder / n).is_file())]


def has(folder: Path, *names: str) -> bool:
    """Whether `folder` has all these files, or folders where the name ends in a slash."""
    return not lacking(folder, names)


def require_files(folder: Path, title: str, absent: list[str], advice: str = "") -> None:
    """Refuse a folder in which files are absent.

    Raises:
        UsageError: all of them in one line.
    """
    if absent:
        raise UsageError(
            f"{folder}: it is read as {title} but lacks {listed(absent)}; "
            f"{advice or 'unpack all of the official archives there, or name another data set or folder'}; "
            "if its folders are classes, give --dataset imagefolder"
        )


def cannot_be_read(error: OSError, path: Path, advice: str = "make it readable, or move it elsewhere") -> UsageError:
    """What the operating system refused, for a person.

    Args:
        path: what was being read, where the error names no file.
        advice: completing "...; ".
    """
    named = error.filename if isinstance(error.filename, str | bytes) else str(path)
    return UsageError(f"{os.fsdecode(named)}: cannot be read ({error.strerror or error}); {advice}")


def text_of(path: Path, advice: str, *, errors: str = "strict") -> str:
    """A list's text. Editors on Windows put a mark in front of UTF-8, which is no part of the first word.

    Args:
        advice: what to do about a damaged list, completing "...; ".

    Raises:
        UsageError: not readable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except OSError as error:
        raise cannot_be_read(error, path, advice) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a readable UTF-8 table ({error}); {advice}") from None


def is_id(text: str) -> bool:
    """Whether a word is a number such as the lists count with; str.isdigit also takes a superscript 1."""
    return text.isascii() and text.isdecimal()


def stays_below(name: str) -> bool:
    """Whether a listed path, taken from a folder, stays in it."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def leaving(names: Iterable[str], table: str, folder: str) -> list[str]:
    """A problem where listed paths lead out of their folder: no other list could name such a picture."""
    strange = [name for name in names if not stays_below(name)]
    return [f"paths of {table} that lead out of {folder}/: {listed(strange)}"] if strange else []


def ids_apart(table: str, images: str, strange: list[str], absent: list[str]) -> list[str]:
    """Problems where a table and the one of the images do not have the same ids.

    Args:
        table, images: what the two are called.
        strange: ids of the table only.
        absent: ids of the images only.
    """
    problems = []
    if strange:
        ids = counted(len(strange), f"id of {table} is", f"ids of {table} are")
        problems.append(f"{ids} not in {images}: {listed(strange)}")
    if absent:
        ids = counted(len(absent), f"id of {images} is", f"ids of {images} are")
        problems.append(f"{ids} not in {table}: {listed(absent)}")
    return problems


def of_one_name(class_names: Sequence[str], table: str) -> list[str]:
    """A problem where classes share a name: an answer could not tell them apart."""
    doubled = [name for name, number in Counter(class_names).items() if number > 1]
    return [f"several classes of one name in {table}: {listed(doubled)}"] if doubled else []


def all_of(readers: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """What each of the readers returns.

    Raises:
        UsageError: one with the messages of all that failed.
    """
    found: dict[str, T] = {}
    messages: dict[str, None] = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except UsageError as error:
            messages[str(error)] = None
    if messages:
        raise UsageError("; also, ".join(messages))
    return found


def first_of(folder: Path, *names: str) -> Path:
    """The first of these files or folders that exists; the first name's path where none does."""
    paths = [folder / name for name in names]
    return next((path for path in paths if path.exists()), paths[0])


def from_pairs(
    layout: str,
    folder: Path,
    class_names: list[str],
    splits: Mapping[str, list[Pair]],
    *,
    problems: Iterable[str] = (),
    warnings: Iterable[str] = (),
    pictures: tuple[Path, ...] = (),
) -> Listing:
    """A listing of whole pictures; labels that no class has become a problem.

    Args:
        splits: `train`, and where there are such `val` and `test`.
    """
    problems = list(problems)
    samples: dict[str, list[Sample]] = {}
    for name, pairs in splits.items():
        strange = sorted({label for _, label in pairs if not 0 <= label < len(class_names)})
        if strange:
            # as in the official files, which count from 1
            found = listed([str(label + 1) for label in strange])
            problems.append(f"class ids in the {name} list outside 1 to {len(class_names)}: {found}")
        samples[name] = [Sample(path, label) for path, label in pairs if label not in strange]
    data = DataSet(
        folder,
        layout,
        class_names,
        samples["train"],
        samples.get("val", []),
        samples.get("test", []),
        warnings=list(warnings),
    )
    return Listing(data, problems, pictures)
