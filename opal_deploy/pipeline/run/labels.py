"""What images really show: their folders' names, or a CSV file with the columns `image` and `label`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Protocol

from opal_deploy.artifact.files import sha256_of_file
from opal_deploy.errors import UsageError
from opal_deploy.pipeline.run.by_path import ByPath

FOLDERS = "folders"


class Labels(Protocol):
    """Tells an image's label."""

    def find(self, path: str) -> str | None:
        """The label of the image at `path`, `/` between folders; None if it has none."""
        ...

    @property
    def identity(self) -> str:
        """Differs where labels may differ."""
        ...


class FolderLabels:
    """The label of `a/b/c.jpg` is `b`."""

    identity = FOLDERS

    def find(self, path: str) -> str | None:
        """The name of the folder that holds it; none for a bare file name."""
        folder = path.rpartition("/")[0].rpartition("/")[2]
        return folder if folder not in ("", ".", "..") else None


class FileLabels:
    """Labels from a CSV file; names are found as `ByPath` says, and one that fits several rows has none."""

    def __init__(self, by_name: dict[str, str], identity: str) -> None:
        self._labels = ByPath(by_name)
        self.identity = identity

    def find(self, path: str) -> str | None:
        """The label of the only row that may mean it."""
        names = self._labels.names(path)
        return self._labels[names[0]] if len(names) == 1 else None


def read_labels(text: str) -> Labels:
    """`folders`, or a CSV file's path.

    Raises:
        UsageError: unreadable, other columns, an image with two labels.
    """
    if text == FOLDERS:
        return FolderLabels()
    path = Path(text)
    expected = "expected `folders`, or a CSV file with the columns image and label"
    try:
        # line ends as they are: a quoted name may hold one
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            by_name = _rows(path, csv.DictReader(stream))
        identity = f"{path.name}, sha256 {sha256_of_file(path)}"
    except OSError as error:
        raise UsageError(f"--labels {path}: cannot be read ({error.strerror or error}); {expected}") from None
    except csv.Error as error:
        raise UsageError(f"--labels {path}: not a CSV file ({error}); {expected}") from None
    if not by_name:
        raise UsageError(f"--labels {path}: no labels in it; {expected}")
    return FileLabels(by_name, identity)


def _rows(path: Path, reader: csv.DictReader[str]) -> dict[str, str]:
    header = [name.strip() for name in reader.fieldnames or []]
    if not {"image", "label"} <= set(header):
        raise UsageError(f"--labels {path}: columns {', '.join(header)[:80] or 'none'}; expected image and label")
    reader.fieldnames = header
    by_name: dict[str, str] = {}
    for row in reader:
        name, label = row["image"], row["label"]
        if not name or not label:
            raise UsageError(f"--labels {path}: line {reader.line_num} lacks an image's name or its label")
        name = name.removeprefix("./")
        if by_name.setdefault(name, label) != label:
            raise UsageError(f"--labels {path}: two labels for {name}; expected one an image")
    return by_name
