"""What a data set's official lists say, and the readers that data sets share; `checks` looks at the image files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from opal_deploy.datasets.samples import Crop, DataSet, Sample, shorten_list
from opal_deploy.errors import UsageError

ADVICE = "unpack the official archives again"


@dataclass(frozen=True)
class Listing:
    """A data set by its lists, whose image files may be missing or broken; the lists' faults, and advice on them."""

    data: DataSet
    problems: list[str] = field(default_factory=list)
    advice: str = ADVICE


@dataclass(frozen=True)
class Adapter:
    """The functions that recognise and read one data set.

    Attributes:
        name, title: the name on the command line, and its authors' name.
        read: from the data set's folder, and the partition's number if there are several, to its lists.
        files: the files that the folder must have, see `missing_files`.
        folders: usual names of the data set's folder, to find it in its parent.
        partitions: the number of official partitions; 0 for a data set with a single split.
        is_own: whether a folder is unmistakably this data set; None: if it has all files.
    """

    name: str
    title: str
    read: Callable[..., Listing]
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    partitions: int = 0
    is_own: Callable[[Path], bool] | None = None

    def recognizes(self, folder: Path) -> bool:
        """Return whether a folder is unmistakably this data set."""
        return not missing_files(folder, *self.files) if self.is_own is None else self.is_own(folder)


def build_listing(
    layout: str, folder: Path, class_names: list[str], splits: Mapping[str, list[Sample]], *, crop: Crop | None = None
) -> Listing:
    """Return a listing of `train`, `val` and `test`; labels without a class and paths elsewhere become problems."""
    problems: list[str] = []
    kept: dict[str, list[Sample]] = {"train": [], "val": [], "test": []}
    for split, samples in splits.items():
        kept[split] = [sample for sample in samples if 0 <= sample.label < len(class_names)]
        if unknown := sorted({sample.label + 1 for sample in samples} - {sample.label + 1 for sample in kept[split]}):
            ids = shorten_list([*map(str, unknown)])
            problems.append(f"class ids in the {split} list outside 1 to {len(class_names)}: {ids}")
        paths = [sample.path for sample in samples]
        if outside := [str(p) for p in paths if not p.is_relative_to(folder) or ".." in p.relative_to(folder).parts]:
            problems.append(f"paths in the {split} list that lead out of the folder: {shorten_list(outside)}")
    return Listing(DataSet(folder, layout, class_names, kept["train"], kept["val"], kept["test"], crop), problems)


def missing_files(folder: Path, *names: str) -> list[str]:
    """Return the names that `folder` lacks; one that ends in a slash is a folder, and `a|b` is either."""

    def exists(name: str) -> bool:
        return (folder / name).is_dir() if name.endswith("/") else (folder / name).is_file()

    return [name.replace("|", " or ") for name in names if not any(map(exists, name.split("|")))]


def read_text(path: Path, advice: str) -> str:
    """Return a UTF-8 list's text without byte order mark; UsageError with `advice` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable_error(error, path, advice) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a readable UTF-8 table ({error}); {advice}") from None


def unreadable_error(error: OSError, path: Path, advice: str = "make it readable, or move it elsewhere") -> UsageError:
    """Return the operating system's error as one line; `path` is for errors without a file name."""
    name = error.filename if isinstance(error.filename, str | bytes) else str(path)
    return UsageError(f"{os.fsdecode(name)}: cannot be read ({error.strerror or error}); {advice}")
