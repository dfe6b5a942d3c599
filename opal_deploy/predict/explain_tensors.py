"""The tensors of an explain model, in `serve` and in Triton alike: image files in, records out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from opal_deploy.preprocess.geometry import Box
from opal_deploy.records.names import escape_name
from opal_deploy.sources.image import InputImage

# the explain model is named after the model that takes pixels
EXPLAIN_SUFFIX = "_explain"
IMAGE, NAME, BOX, RECORD = "image", "name", "box", "record"
_MAX_NAME_BYTES = 4096


def build_explain_requests(
    images: Sequence[bytes], names: Sequence[bytes] | None, boxes: NDArray[np.float32] | None
) -> list[InputImage]:
    """Return one image to classify per row.

    Args:
        images: N image files.
        names: N names, see `parse_name`; None: no image has one.
        boxes: float32 [N, 4], see `InputImage.crop`; a row of NaN, or None: no crop.

    Raises:
        ValueError: another number of names or boxes, or a name that is too long.
    """
    for tensor, rows in ((NAME, names), (BOX, boxes)):
        if rows is not None and len(rows) != len(images):
            raise ValueError(f"input {tensor!r}: {len(rows)} rows found; expected {len(images)}, one per image")
    parsed = [None] * len(images) if names is None else [*map(parse_name, names)]
    crops = [None] * len(images) if boxes is None else [*map(_parse_box, boxes)]
    return [InputImage(name, bytes(image), crop) for image, name, crop in zip(images, parsed, crops, strict=True)]


def parse_name(name: bytes) -> str | None:
    """Return a name as a record's `image`, escaped as by `infer`; None if empty; raise ValueError if too long."""
    if len(name) > _MAX_NAME_BYTES:
        raise ValueError(f"input {NAME!r}: {len(name)} bytes found; expected at most {_MAX_NAME_BYTES}")
    return escape_name(name.decode("utf-8", "surrogateescape")) or None


def _parse_box(row: NDArray[np.float32]) -> Box | None:
    if np.isnan(row).all():
        return None
    x0, y0, x1, y1 = row.tolist()
    return x0, y0, x1, y1
