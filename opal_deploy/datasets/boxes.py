"""Boxes and masks as data sets publish them, for images used with or without the rest of their data set.

    bounding_boxes.txt    CUB-200-2011: <image id> <x> <y> <width> <height>, with images.txt next to it
    Annotation/           Stanford Dogs: a folder of PASCAL VOC XML files, one per image, named like the image
                          (only `train` reads these)

    annotations/trimaps/  Oxford-IIIT Pet: masks whose pixels are 1 (the pet), 2 (background) or 3 (the border)

Boxes are (x0, y0, x1, y1) in pixels of the image, as training crops to them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.datasets.cub import BOXES, IMAGES, read_table, to_corners
from opal_deploy.datasets.samples import find_root, pluralize, shorten_list
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box

# LookupError: an unknown encoding
ANNOTATION_ERRORS = (OSError, ElementTree.ParseError, ValueError, LookupError)
# of a trimap's pixels
_BACKGROUND = 2
_CUB_LINE = re.compile(r"\s*\d+(\s+[-+.\deE]+){4}\s*$")


def find_box_file(root: Path) -> Path | None:
    """Return CUB's file of boxes in a data set's folder; None without it."""
    return root / BOXES if (root / BOXES).is_file() else None


def format_box_option(training: Mapping[str, Any], model: Path | None = None) -> str:
    """Return the shell option `--boxes FILE` for the boxes that training cropped to, by the training summary.

    FILE is a placeholder if the data set has no such file here; `model` is the model's file, see `find_root`.
    """
    root = find_root(training, model)
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
    boxes, names = read_table(path, 4), read_table(path.with_name(IMAGES), 1)
    if unknown := [key for key in boxes if key not in names]:
        ids = pluralize(len(unknown), "image id", "image ids")
        raise UsageError(f"{path}: {ids} that {IMAGES} next to it does not name: {shorten_list(unknown)}")
    return [(names[key][0], to_corners(values)) for key, values in boxes.items()]


def read_annotation(path: Path) -> list[Box]:
    """Return the one or more boxes of an annotation in PASCAL VOC's XML, (x0, y0, x1, y1) in pixels.

    Raises:
        ANNOTATION_ERRORS: the file cannot be read, is not XML, or has no box of four numbers.
    """
    boxes = []
    for element in ElementTree.parse(path).getroot().findall("object/bndbox"):
        x0, y0, x1, y1 = (float(element.findtext(edge, "absent")) for edge in ("xmin", "ymin", "xmax", "ymax"))
        boxes.append((x0, y0, x1, y1))
    if not boxes:
        raise ValueError("no object/bndbox")
    return boxes


def read_trimap(path: Path) -> NDArray[np.bool_]:
    """Return the pet's pixels in a trimap, its border included: bool [H, W]; UsageError if it cannot be read."""
    try:
        with Image.open(path) as image:
            return np.asarray(np.asarray(image) != _BACKGROUND)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{path}: not a readable trimap ({error}); unpack the annotations again") from None


def draw_boxes(boxes: Sequence[Box], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Return the pixels in any of some boxes of an image, bool [H, W] of `size`."""
    covered = np.zeros(size, np.bool_)
    for box in boxes:
        x0, y0, x1, y1 = (max(round(edge), 0) for edge in box)
        covered[y0:y1, x0:x1] = True
    return covered
