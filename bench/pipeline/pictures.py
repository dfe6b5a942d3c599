"""The pictures of a measurement: decoded batches for the bare session, and copies of another size."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from opal_deploy.bench.pipeline.cases import ImageSize
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.pipeline.decoding.prepare import prepare
from opal_deploy.pipeline.discover import Item
from opal_deploy.pipeline.run.infer import requests
from opal_deploy.preprocess.decode import MAX_PIXELS, decode
from opal_deploy.runtime.session import ImageBatch

COPY_QUALITY = 90


def decoded(items: list[Item], input_size: tuple[int, int], batch: int) -> list[ImageBatch]:
    """The usable pictures as the session takes them, uint8 [N, H0, W0, 3] each; the last may be smaller.

    Raises:
        UsageError: fewer usable pictures than a batch.
    """
    prepared = (prepare(r, input_size, MAX_PIXELS, keep_picture=False) for r in requests(items, None))
    pixels = [entry.pixels for entry in prepared if entry.pixels is not None]
    if len(pixels) < batch:
        raise UsageError(f"{len(pixels)} usable pictures, and a batch takes {batch}; give more, or a smaller --batch")
    source = iter(pixels)
    batches = []
    while group := list(itertools.islice(source, batch)):
        batches.append(np.stack(group))
    return batches


@contextmanager
def resized(items: list[Item], size: ImageSize | None) -> Iterator[list[Item]]:
    """The same pictures as JPEG files of `size` = (width, height), in a folder that is gone afterwards.

    None: the pictures themselves. A picture that cannot be decoded stays what it is.
    """
    if size is None:
        yield items
        return
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        yield [_copy(item, size, Path(folder) / f"{index:06d}.jpg") for index, item in enumerate(items)]


def _copy(item: Item, size: ImageSize, path: Path) -> Item:
    if item.problem is not None:
        return item
    try:
        picture = decode(item.source)
    except ImageError:
        return item
    picture.resize(size, Image.Resampling.BICUBIC).save(path, "JPEG", quality=COPY_QUALITY)
    return Item(path, path.name)
