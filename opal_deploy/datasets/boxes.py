"""CUB-200-2011's boxes, for images that are used without the rest of their data set.

bounding_boxes.txt has lines of <image id> <x> <y> <width> <height>; images.txt next to it names the images. Boxes are
(x0, y0, x1, y1) in pixels of the image, as training crops to them.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opal_deploy.datasets.cub import read_table, to_corners
from opal_deploy.datasets.location import find_root
from opal_deploy.datasets.samples import pluralize, shorten_list
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

CUB_BOXES, CUB_IMAGES = "bounding_boxes.txt", "images.txt"
_CUB_LINE = re.compile(r"\s*\d+(\s+[-+.\deE]+){4}\s*$")


def find_box_file(root: Path) -> Path | None:
    """Return CUB's file of boxes in a data set's folder; None without it."""
    return root / CUB_BOXES if (root / CUB_BOXES).is_file() else None


def format_box_option(training: Mapping[str, Any], model: Path | None = None) -> str:
    """Return the shell option `--boxes FILE` for the boxes that training cropped to, by the training summary.

    FILE is a placeholder if the data set has no such file here; `model` is the model's file, see `find_root`.
    """
    root, file = find_root(training, model), None
    with contextlib.suppress(OSError):
        file = None if root is None else find_box_file(root)
    return f"--boxes {shlex.quote(str(file or 'boxes.csv'))}"


def is_cub_boxes(text: str) -> bool:
    """Return whether a text starts like CUB's bounding_boxes.txt, with a line of an id and four numbers."""
    return _CUB_LINE.match(text.lstrip().partition("\n")[0]) is not None


def read_cub_boxes(path: Path) -> list[tuple[str, Box]]:
    """Return (path under the images' folder, box) of every image in CUB's bounding_boxes.txt.

    Raises:
        UsageError: images.txt is not next to the file or lacks some of its ids, or a table is not CUB's.
    """
    names_path = path.with_name(CUB_IMAGES)
    if not names_path.is_file():
        raise UsageError(
            f"{path}: CUB's boxes by image id, but {CUB_IMAGES}, which names the images, is not next to it; copy it "
            "there, or give a CSV file (image,x,y,width,height)"
        )
    boxes, names = read_table(path, 4), read_table(names_path, 1)
    if unknown := [key for key in boxes if key not in names]:
        ids = pluralize(len(unknown), "image id", "image ids")
        raise UsageError(f"{path}: {ids} that {names_path.name} next to it does not name: {shorten_list(unknown)}")
    return [(names[key][0], to_corners(values)) for key, values in boxes.items()]
