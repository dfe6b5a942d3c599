"""Boxes to crop to before the model looks, from a CSV or a COCO file.

CSV: a header with `image` and either `x0,y0,x1,y1` or `x,y,width,height`. COCO: `images` with `file_name`,
`annotations` with `bbox` [x, y, width, height], one a picture. Pixels of the picture as a viewer shows it.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.pipeline.discover import Item
from opal_deploy.pipeline.run.by_path import ByPath
from opal_deploy.preprocess.resize import Box

_CORNERS = ("x0", "y0", "x1", "y1")
_SIZED = ("x", "y", "width", "height")


class Boxes:
    """An image's box, found by its path as `ByPath` says."""

    def __init__(self, by_name: dict[str, Box], origin: str) -> None:
        self._boxes = ByPath(by_name)
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
