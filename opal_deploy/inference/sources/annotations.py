"""Things that a file tells of images, found by the image's path or by as much of its end as the file names.

Boxes to crop to before the model looks, from a CSV or a COCO file.

CSV: a header with `image` and either `x0,y0,x1,y1` or `x,y,width,height`. COCO: `images` with `file_name`,
`annotations` with `bbox` [x, y, width, height], one a picture. Pixels of the picture as a viewer shows it.

What images really show: their folders' names, or a CSV file with the columns `image` and `label`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.sources.items import Item
from opal_deploy.preprocess.geometry import Box

T = TypeVar("T")


class PathLookup(Generic[T]):
    """Values by image: `a/b.jpg` names `data/a/b.jpg`.

    Where the file's names begin further up (`data/a/b.jpg` for an image given as `a/b.jpg`), one that ends in the whole
    path that was given will do, if it is the only one. Names that differ in a folder never meet: `x/1.jpg` is not
    `y/1.jpg`, and a wrong value would be a wrong answer without a word.
    """

    def __init__(self, by_name: Mapping[str, T]) -> None:
        self._by_name = by_name
        self._by_base: dict[str, list[str]] = {}
        for name in by_name:
            self._by_base.setdefault(name.rpartition("/")[2], []).append(name)

    def __len__(self) -> int:
        return len(self._by_name)

    def names(self, path: str) -> list[str]:
        """The names that may mean `path`, with `/` between folders: none, one, or several that cannot be told apart."""
        parts = path.split("/")
        for start in range(len(parts)):
            key = "/".join(parts[start:])
            if key in self._by_name:
                return [key]
        return [name for name in self._by_base.get(parts[-1], []) if name.endswith("/" + path)]

    def __getitem__(self, name: str) -> T:
        return self._by_name[name]


_CORNERS = ("x0", "y0", "x1", "y1")
_SIZED = ("x", "y", "width", "height")


class Boxes:
    """An image's box, found by its path as `ByPath` says."""

    def __init__(self, by_name: dict[str, Box], origin: str) -> None:
        self._boxes = PathLookup(by_name)
        self._origin = origin

    def __len__(self) -> int:
        return len(self._boxes)

    def find(self, item: Item) -> Box:
        """The box of one image.

        Raises:
            ImageError: no_box.
        """
        names = self._boxes.names(item.path.as_posix())
        if len(names) != 1:
            why = "no box" if not names else f"{len(names)} boxes ({names[0]}, {names[1]}, ...)"
            raise ImageError("no_box", f"{self._origin} has {why} for it")
        return self._boxes[names[0]]


def read_boxes(path: Path) -> Boxes:
    """Read a CSV or COCO file.

    Raises:
        UsageError: unreadable, of another shape, a number that is none, an image with two boxes.
    """
    try:
        # line ends as they are: a quoted name may hold one
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            text = stream.read()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}); expected a CSV or COCO file") from None
    rows = _coco(path, text) if text.lstrip().startswith("{") else _csv(path, text)
    by_name: dict[str, Box] = {}
    for name, box in rows:
        name = name.removeprefix("./")
        if name in by_name:
            raise UsageError(f"{path}: two boxes for {name}; expected one an image")
        by_name[name] = box
    if not by_name:
        raise UsageError(f"{path}: no boxes in it")
    return Boxes(by_name, path.name)


def _csv(path: Path, text: str) -> list[tuple[str, Box]]:
    try:
        return _csv_rows(path, csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise UsageError(f"{path}: not a CSV file ({error}); expected a CSV or COCO file") from None


def _csv_rows(path: Path, reader: csv.DictReader[str]) -> list[tuple[str, Box]]:
    header = [name.strip() for name in reader.fieldnames or []]
    columns = next((c for c in (_CORNERS, _SIZED) if {"image", *c} <= set(header)), None)
    if columns is None:
        raise UsageError(
            f"{path}: columns {', '.join(header)[:80] or 'none'}; expected image with x0,y0,x1,y1 or x,y,width,height"
        )
    reader.fieldnames = header
    rows = []
    for row in reader:
        try:
            values = [float(row[column]) for column in columns]
        except (TypeError, ValueError):
            raise UsageError(f"{path}: line {reader.line_num} has no four numbers in {', '.join(columns)}") from None
        if not row["image"]:
            raise UsageError(f"{path}: line {reader.line_num} has no image's name")
        rows.append((row["image"], _corners(values, sized=columns is _SIZED)))
    return rows


def _coco(path: Path, text: str) -> list[tuple[str, Box]]:
    try:
        document: Any = json.loads(text)
        names = {image["id"]: str(image["file_name"]) for image in document["images"]}
        annotations = document["annotations"]
        return [(names[a["image_id"]], _corners([float(v) for v in a["bbox"]], sized=True)) for a in annotations]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: not a COCO file ({error!r}); expected images with id and file_name, annotations with bbox"
        ) from None


def _corners(values: list[float], *, sized: bool) -> Box:
    a, b, c, d = values
    return (a, b, a + c, b + d) if sized else (a, b, c, d)


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
        self._labels = PathLookup(by_name)
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
        identity = f"{path.name}, sha256 {compute_sha256(path)}"
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
