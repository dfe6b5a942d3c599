"""Sources of images according to their files: the camera, the program that wrote them, size, folder and name.

A slot that fires on the images of one source and not on the others of its class reads something that the source added:
a stamp, a frame, a backdrop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from opal_deploy.artifact.outputs import FloatArray
from opal_deploy.datasets.samples import Sample

# characters of a value
_LONGEST = 60
_TAGS = {
    "camera maker": ExifTags.Base.Make,
    "camera": ExifTags.Base.Model,
    "software": ExifTags.Base.Software,
}


def read_sources(samples: Sequence[Sample]) -> list[dict[str, str]]:
    """Return for each image the properties of its file that are known, such as {"camera": "NIKON D70"}."""
    return [_read_source(sample) for sample in samples]


def _read_source(sample: Sample) -> dict[str, str]:
    found = {"folder": sample.path.parent.name}
    # the letters before a number: IMG_0123, DSC00456
    if prefix := re.match(r"[^\W\d_]{2,}", sample.path.name):
        found["file name"] = f"{prefix[0]}…"
    try:
        with Image.open(sample.path) as image:
            found["size"] = f"{image.width}x{image.height}"
            exif = image.getexif()
            found |= {name: text for name, tag in _TAGS.items() if (text := _clean(exif.get(tag)))}
    except Exception:  # damaged EXIF raises what its parser stumbles over; the pixels are fine
        pass
    return {name: value[:_LONGEST] for name, value in found.items()}


def _clean(value: object) -> str:
    return value.strip("\0 ") if isinstance(value, str) else ""


def group_by_source(sources: Sequence[dict[str, str]], least: int) -> dict[str, NDArray[np.bool_]]:
    """Return groups of n images that share a property, bool [n] by description.

    Args:
        least: images that a group, and the rest, need.
    """
    groups: dict[str, NDArray[np.bool_]] = {}
    for name in dict.fromkeys(name for source in sources for name in source):
        values = np.array([source.get(name, "") for source in sources])
        for value in np.unique(values[values != ""]).tolist():
            group = values == value
            # of properties that always come together the first is enough
            if least <= group.sum() <= len(group) - least and not any(
                (group == known).all() for known in groups.values()
            ):
                groups[f"{name} {value}"] = group
    return groups


def compare_groups(scores: FloatArray, group: NDArray[np.bool_]) -> tuple[float, float]:
    """Return how well scores [n] tell a group from the rest, and how likely that is by chance.

    The first is the area under the ROC curve: 1 if every image of the group scores higher than all others. The second
    is the one-sided p-value of the Mann-Whitney test, by its normal approximation.
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # of equal scores each has the mean rank
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    inside, outside = int(group.sum()), int((~group).sum())
    higher = float(ranks[group].sum()) - inside * (inside + 1) / 2
    deviation = math.sqrt(inside * outside * (len(scores) + 1) / 12)
    return higher / (inside * outside), math.erfc((higher - inside * outside / 2) / deviation / math.sqrt(2)) / 2
