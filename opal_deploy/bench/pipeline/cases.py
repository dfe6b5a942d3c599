"""The cases of `bench pipeline`: batch size, workers and image size, each varied on its own around a base case.

Also the images of a case: decoded ones for the bare session, and resized copies of the files.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.decoding.prepare import prepare
from opal_deploy.inference.sources.items import Item
from opal_deploy.inference.types import InferenceOptions, build_requests
from opal_deploy.preprocess.decode import Decoding, decode
from opal_deploy.runtime.session import ImageBatch

T = TypeVar("T")
ImageSize = tuple[int, int]

COPY_QUALITY = 90
# more than a processor's caches hold, and little of its memory
_DECODED_IMAGES = 1024
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
# JPEG's limit, in pixels
_MAX_SIDE = 65_500


@dataclass(frozen=True)
class Case:
    """One way to run the pipeline.

    Attributes:
        batch: images a forward pass.
        workers: threads or processes that decode, and as many threads that draw.
        image_size: (width, height) that the images are resized to beforehand; None: left as they are.
        decode: the decode path.
        isolate: decode in processes.
    """

    batch: int
    workers: int
    image_size: ImageSize | None = None
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


def build_cases(
    default: Case, *, batches: Sequence[int] = (), workers: Sequence[int] = (), sizes: Sequence[ImageSize] = ()
) -> Iterator[Case]:
    """Yield the base case, then one case for each other value.

    A single value belongs to the base case. Several are varied around it; the base case has the default if it is one of
    them, else the first. With several sizes the base case leaves the images as they are.
    """
    base = replace(
        default,
        batch=_base_value(batches, default.batch),
        workers=_base_value(workers, default.workers),
        image_size=sizes[0] if len(sizes) == 1 else default.image_size,
    )
    cases = [base]
    cases += [replace(base, workers=value) for value in workers]
    cases += [replace(base, batch=value) for value in batches]
    cases += [replace(base, image_size=value) for value in sizes]
    yield from dict.fromkeys(cases)


def _base_value(values: Sequence[T], default: T) -> T:
    return default if not values or default in values else values[0]


def parse_counts(option: str, text: str | None) -> list[int]:
    """Parse `1,2,4`; None is no value.

    Raises:
        UsageError: not positive whole numbers with commas between them.
    """
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(_COUNT.fullmatch(part) for part in parts):
        raise UsageError(f"{option} {text!r}: expected whole numbers from 1 on, such as 1,2,4")
    return [int(part) for part in parts]


def parse_sizes(option: str, text: str | None) -> list[ImageSize]:
    """Parse `250x188,500x375` to (width, height) each; None is no value.

    Raises:
        UsageError: not WIDTHxHEIGHT, or a side of more than 65,500 pixels, which JPEG cannot hold.
    """
    matches = [] if text is None else [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    sizes = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    if len(sizes) < len(matches) or any(max(size) > _MAX_SIDE for size in sizes):
        raise UsageError(
            f"{option} {text!r}: expected WIDTHxHEIGHT in pixels, at most {_MAX_SIDE} each, such as 250x188,500x375"
        )
    return sizes


def decode_images(items: list[Item], input_size: tuple[int, int], batch: int) -> ImageBatch:
    """Decode usable images to the session's input, uint8 [N, H0, W0, 3]: whole batches, about a thousand at most.

    Raises:
        UsageError: fewer usable images than a batch.
    """
    prepared = (prepare(request, input_size, InferenceOptions()) for request in build_requests(items))
    usable = (entry.pixels for entry in prepared if entry.pixels is not None)
    pixels = list(itertools.islice(usable, max(_DECODED_IMAGES // batch, 1) * batch))
    if len(pixels) < batch:
        raise UsageError(f"{len(pixels)} usable images, and a batch takes {batch}; give more, or a smaller --batch")
    return np.stack(pixels[: len(pixels) // batch * batch])


@contextmanager
def resized_copies(items: list[Item], size: ImageSize | None) -> Iterator[list[Item]]:
    """Write copies of the images as JPEG files of `size` = (width, height), in a folder that is removed afterwards.

    With None the images themselves are used. An image that cannot be decoded is used as it is.
    """
    if size is None:
        yield items
        return
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        yield [_write_copy(item, size, Path(folder) / f"{index:06d}.jpg") for index, item in enumerate(items)]


def _write_copy(item: Item, size: ImageSize, path: Path) -> Item:
    if item.problem is not None:
        return item
    try:
        image = decode(item.source)
    except ImageError:
        return item
    image.resize(size, Image.Resampling.BICUBIC).save(path, "JPEG", quality=COPY_QUALITY)
    return Item(path, path.name)
