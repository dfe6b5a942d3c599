"""What is varied: pictures a batch, threads, and the size of the pictures, one at a time around a base case.

The pictures of a measurement: decoded batches for the bare session, and copies of another size."""

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

_COUNT = re.compile(r"[1-9][0-9]{0,5}")
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_LONGEST = 65_500


@dataclass(frozen=True)
class Case:
    """One way to run the pipeline.

    Attributes:
        batch: pictures a forward pass.
        workers: threads or processes that decode, and as many threads that draw.
        image_size: (width, height) that the pictures were made beforehand; None: as given.
        decode: which decode path. isolate: decode in processes.
    """

    batch: int
    workers: int
    image_size: ImageSize | None = None
    decode: Decoding = Decoding.default
    isolate: bool = False

    @property
    def pictures(self) -> str:
        """The pictures' size, for people and records."""
        return "as given" if self.image_size is None else f"{self.image_size[0]}x{self.image_size[1]}"

    def line(self) -> str:
        """For a person."""
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        path = "" if self.decode is Decoding.default else f", decode {self.decode}"
        return f"batch {self.batch}, {workers}{' in processes' * self.isolate}, pictures {self.pictures}{path}"


def build_cases(
    default: Case, *, batches: Sequence[int] = (), workers: Sequence[int] = (), sizes: Sequence[ImageSize] = ()
) -> Iterator[Case]:
    """The base case, then each value that differs from it.

    One value alone belongs to the base case. Several are swept around it; in it stands the default if it is one of
    them, else the first. Pictures as given are the base case of several sizes.
    """
    base = replace(
        default,
        batch=_base(batches, default.batch),
        workers=_base(workers, default.workers),
        image_size=sizes[0] if len(sizes) == 1 else default.image_size,
    )
    yield base
    varied = [replace(base, workers=value) for value in workers]
    varied += [replace(base, batch=value) for value in batches]
    varied += [replace(base, image_size=value) for value in sizes]
    seen = {base}
    for case in varied:
        if case not in seen:
            seen.add(case)
            yield case


def _base(values: Sequence[T], default: T) -> T:
    return default if not values or default in values else values[0]


def parse_counts(option: str, text: str | None) -> list[int]:
    """`1,2,4`; None is no value.

    Raises:
        UsageError: not positive whole numbers with commas between them.
    """
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(_COUNT.fullmatch(part) for part in parts):
        raise UsageError(f"{option} {text!r}: expected whole numbers from 1 on, such as 1,2,4")
    return [int(part) for part in parts]


def parse_sizes(option: str, text: str | None) -> list[ImageSize]:
    """`250x188,500x375` as (width, height); None is no value.

    Raises:
        UsageError: not WIDTHxHEIGHT, or a side of more than 65,500 pixels, which JPEG cannot hold.
    """
    matches = [] if text is None else [_SIZE.fullmatch(part.strip()) for part in text.split(",")]
    sizes = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    if len(sizes) < len(matches) or any(max(size) > _LONGEST for size in sizes):
        raise UsageError(
            f"{option} {text!r}: expected WIDTHxHEIGHT in pixels, at most {_LONGEST} each, such as 250x188,500x375"
        )
    return sizes


COPY_QUALITY = 90


def decode_batches(items: list[Item], input_size: tuple[int, int], batch: int) -> list[ImageBatch]:
    """The usable pictures as the session takes them, uint8 [N, H0, W0, 3] each; the last may be smaller.

    Raises:
        UsageError: fewer usable pictures than a batch.
    """
    prepared = (prepare(request, input_size, InferenceOptions()) for request in build_requests(items))
    pixels = [entry.pixels for entry in prepared if entry.pixels is not None]
    if len(pixels) < batch:
        raise UsageError(f"{len(pixels)} usable pictures, and a batch takes {batch}; give more, or a smaller --batch")
    source = iter(pixels)
    batches = []
    while group := list(itertools.islice(source, batch)):
        batches.append(np.stack(group))
    return batches


@contextmanager
def resized_copies(items: list[Item], size: ImageSize | None) -> Iterator[list[Item]]:
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
