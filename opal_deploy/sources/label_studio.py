"""Objects in Label Studio's JSON export, the list of a project's tasks (https://labelstud.io/guide/task_format).

`data.image` of a task is the address of its image. `annotations` are the task's submissions. Their `result` is a list
of regions; those of type `rectanglelabels` have their corner and size in percent of the image as a viewer shows it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from opal_deploy.errors import UsageError
from opal_deploy.preprocess.geometry import Box
from opal_deploy.sources.annotations import CocoObject
from opal_deploy.sources.lookup import normalize_name

# an address of local storage has the path after `?d=`; an uploaded file's name follows eight random digits
_LOCAL = re.compile(r".*/data/local-files/?\?d=(.+)", re.DOTALL)
_UPLOAD = re.compile(r".*/data/upload/(?:\d+/)?[0-9a-f]{8}-(.+)", re.DOTALL)

# types of regions, without the ending `labels`; the empty one is of the tag Labels, which several shapes share
_OTHER_SHAPES = {"", "bitmask", "brush", "ellipse", "keypoint", "polygon", "vector"}


def parse_export(path: Path, text: str) -> list[tuple[str, CocoObject]]:
    """Return the rectangles of an export with the names of their images, one entry per label.

    The newest annotation of a task counts, without skipped ones. Tasks of the same image add up.

    Raises:
        UsageError: another format, no annotations, two images of one name, or regions that are not rectangles.
    """
    expected = "expected Label Studio's export format JSON: tasks with data.image and annotations"
    try:
        tasks = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error!r}); {expected}") from None
    addresses: dict[str, str] = {}
    objects: list[tuple[str, CocoObject]] = []
    annotated = False
    for position, task in enumerate(tasks, 1):
        number = position
        try:
            number = task.get("id", position)
            address = str(task["data"]["image"])
            regions = _newest_result(task)
            annotated |= regions is not None
            name = _image_name(address)
            found = [thing for region in regions or [] for thing in _parse_region(region)]
        except UsageError as error:
            raise UsageError(f"{path}: task {number}: {error}") from None
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"{path}: task {number} is not Label Studio's ({error!r}); {expected}") from None
        # uploads lose their folders: even an image without boxes would get those of its namesake
        if addresses.setdefault(name, address) != address:
            raise UsageError(
                f"{path}: two images named {name} ({addresses[name]}, {address}); expected one: rename a file, "
                "or import from local storage, which keeps folders"
            )
        objects.extend((name, thing) for thing in found)
    if not annotated:
        raise UsageError(
            f"{path}: {len(tasks):,} tasks, none with an annotation; predictions do not count: submit them in Label "
            "Studio, and export again"
        )
    return objects


def _newest_result(task: dict[str, Any]) -> list[Any] | None:
    """Return the regions of a task's newest annotation; None if it has none or was skipped."""
    submitted = [entry for entry in task.get("annotations", []) if not entry.get("was_cancelled")]
    # as Label Studio's own converter orders them
    newest = sorted(submitted, key=lambda entry: str(entry.get("created_at", "")))[-1:]
    return list(newest[0]["result"]) if newest else None


def _image_name(address: str) -> str:
    """Return the path of an image whose address Label Studio may have made from it."""
    made = _LOCAL.fullmatch(address) or _UPLOAD.fullmatch(address)
    return normalize_name(unquote(made[1]) if made else address)


def _parse_region(region: dict[str, Any]) -> Iterator[CocoObject]:
    """Yield a rectangle once per label; choices, texts and the like are no regions and yield nothing."""
    shape = str(region["type"]).removesuffix("labels")
    if shape in _OTHER_SHAPES:
        raise UsageError(f"a region of type {region['type']}; expected rectanglelabels: remove it, or export as COCO")
    if shape != "rectangle":
        return
    if region.get("image_rotation"):
        raise UsageError(
            f"its image is turned by {region['image_rotation']} degrees; expected 0: turn it back in Label Studio"
        )
    width, height, value = int(region["original_width"]), int(region["original_height"]), region["value"]
    x, w = (float(value[key]) * width / 100 for key in ("x", "width"))
    y, h = (float(value[key]) * height / 100 for key in ("y", "height"))
    box: Box = (x, y, x + w, y + h)
    polygon: list[list[float]] | None = None
    if angle := math.radians(float(value.get("rotation") or 0)):
        # clockwise about (x, y), in pixels
        cos, sin = math.cos(angle), math.sin(angle)
        corners = [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in ((0, 0), (w, 0), (w, h), (0, h))]
        (x0, x1), (y0, y1) = ((min(values), max(values)) for values in zip(*corners, strict=True))
        box, polygon = (x0, y0, x1, y1), [[number for corner in corners for number in corner]]
    for label in value.get("rectanglelabels") or [""]:
        yield CocoObject(str(label), box, polygon, (height, width))
