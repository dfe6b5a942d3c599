"""The cases of `bench pipeline`, and their images: decoded for the bare session, or resized copies of the files."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from opal_deploy.bench.options import PipelineOptions, Size
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.sources.items import Item
from opal_deploy.inference.types import InferenceOptions, build_requests
from opal_deploy.preprocess.decode import Decoding, decode
from opal_deploy.runtime.session import ImageBatch

T = TypeVar("T")

DEFAULT_BATCH = 8
COPY_QUALITY = 90
# more than a processor's caches hold, but little memory
_DECODED_IMAGES = 1024


@dataclass(frozen=True)
class Case:
    """One way to run the pipeline.

    Attributes:
        batch: batch size.
        workers: parallel decoders, threads or processes, and as many threads that draw.
        image_size: (width, height) of resized copies; None: the images themselves.
        decode: the decode path.
        isolate: decode in processes.
    """

    batch: int
    workers: int
    image_size: Size | None = None
    decode: Decoding = Decoding.default
    isolate: bool = False

    @property
    def size_name(self) -> str:
        """The images' size, for people and measurements."""
        return "as given" if self.image_size is None else f"{self.image_size[0]}x{self.image_size[1]}"

    def describe(self) -> str:
        """Return one line for a person."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        path = "" if self.decode is Decoding.default else f", decode {self.decode}"
        return f"batch {self.batch}, {workers}{' in processes' * self.isolate}, images {self.size_name}{path}"


def build_cases(options: PipelineOptions, default_workers: int) -> list[Case]:
    """Return the base case, then one case for each other batch size, number of workers and image size.

    A single value belongs to the base case. Of several, the base case has the default if it is one of them, else the
    first; with several image sizes it leaves the images as they are.
    """
    base = Case(
        _base_value(options.batch, DEFAULT_BATCH),
        _base_value(options.workers, default_workers),
        options.image_size[0] if len(options.image_size) == 1 else None,
        Decoding(options.decode),
        options.isolate,
    )
    cases = [base]
    cases += [replace(base, workers=value) for value in options.workers]
    cases += [replace(base, batch=value) for value in options.batch]
    cases += [replace(base, image_size=value) for value in options.image_size]
    return list(dict.fromkeys(cases))


def _base_value(values: Sequence[T], default: T) -> T:
    return default if not values or default in values else values[0]


def decode_images(items: list[Item], input_size: tuple[int, int], batch: int) -> ImageBatch:
    """Decode usable images to the session's input, uint8 [N, H0, W0, 3], in whole batches; at most about 1,000.

    Raises:
        UsageError: fewer usable images than a batch.
    """
    prepared = (prepare(request, input_size, InferenceOptions()) for request in build_requests(items))
    usable = (entry.pixels for entry in prepared if entry.pixels is not None)
    pixels = list(itertools.islice(usable, max(_DECODED_IMAGES // batch, 1) * batch))
    if len(pixels) < batch:
        raise UsageError(f"{len(pixels)} usable images for a batch of {batch}; give more, or a smaller --batch")
    return np.stack(pixels[: len(pixels) // batch * batch])


@contextmanager
def resized_copies(items: list[Item], size: Size | None) -> Iterator[list[Item]]:
    """Yield copies of the images as JPEG files of `size` = (width, height), in a temporary folder.

    With None, and for images that cannot be decoded, the originals are used.
    """
    if size is None:
        yield items
        return
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        yield [_write_copy(item, size, Path(folder) / f"{index:06d}.jpg") for index, item in enumerate(items)]


def _write_copy(item: Item, size: Size, path: Path) -> Item:
    if item.problem is not None:
        return item
    try:
        image = decode(item.source)
    except ImageError:
        return item
    image.resize(size, Image.Resampling.BICUBIC).save(path, "JPEG", quality=COPY_QUALITY)
    return Item(path, path.name)
