"""Chunks of a run: contiguous images, and their results."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec

from opal_deploy.errors import OpalError
from opal_deploy.predict.executor import until_error
from opal_deploy.records.record import Answered, Failed, Record
from opal_deploy.sources.image import InputImage

# a worker that dies costs at most two chunks; a message costs as much as some images
BATCHES_PER_CHUNK = 4
# chunks in flight per worker
IN_FLIGHT = 2
# a chunk of members of a compressed archive, which are sent as bytes, ends early
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Chunk:
    """Contiguous images of a run.

    Attributes:
        first: number of the first image in the run, from 0.
        requests: the images.
        deaths: number of workers that died while they had this chunk.
        place: where the last of these ran, see `Worker.place`; empty for none.
    """

    first: int
    requests: tuple[InputImage, ...]
    deaths: int = 0
    place: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    def to_bytes(self) -> bytes:
        """Return the chunk as it is sent: its pickle would be several times larger and slower."""
        requests = [
            # a path is pickled in a fraction of the time as text
            (
                r.name,
                os.fspath(r.source) if isinstance(r.source, Path) else r.source,
                r.crop,
                r.label,
                r.error,
                r.index,
                r.drawn,
                r.frame,
                r.detection,
            )
            for r in self.requests
        ]
        return pickle.dumps((self.first, requests), pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def from_bytes(data: bytes) -> Chunk:
        """Return the chunk of `to_bytes`."""
        first, requests = pickle.loads(data)  # noqa: S301 (the driver of this run wrote it)
        return Chunk(first, tuple(InputImage(*fields) for fields in requests))

    def count_death(self, place: str) -> Chunk:
        """Return the chunk after one more worker died with it, see `Worker.place`."""
        return replace(self, deaths=self.deaths + 1, place=place)

    def halve(self, batch: int) -> tuple[Chunk, Chunk]:
        """Return two chunks of about half the size, cut between two batches if there are several.

        Each counts one death, since either half may have caused it.
        """
        middle = self.first + len(self) // 2
        aligned = middle - middle % batch
        if self.first < aligned:
            middle = aligned
        cut = middle - self.first
        return (
            Chunk(self.first, self.requests[:cut], 1, self.place),
            Chunk(middle, self.requests[cut:], 1, self.place),
        )


# msgspec tells no two classes apart by themselves
_PAIRS = msgspec.msgpack.Decoder(list[tuple[Answered | None, Failed | None]])
_PICKLE = b"\x80"


@dataclass(frozen=True)
class ChunkResult:
    """The results of a chunk: encoded records, which take a fifth of a list's memory, and messages for the user."""

    records: bytes
    messages: tuple[str, ...]

    @staticmethod
    def build(records: list[Record], messages: tuple[str, ...] = ()) -> ChunkResult:
        """Return the result that holds these records."""
        pairs = [(None, record) if isinstance(record, Failed) else (record, None) for record in records]
        try:
            # read in half the time that unpickling takes, and the calling process reads the records of all others
            return ChunkResult(msgspec.msgpack.encode(pairs), messages)
        except UnicodeEncodeError:
            # a lone surrogate
            return ChunkResult(pickle.dumps(records, pickle.HIGHEST_PROTOCOL), messages)

    def load(self) -> list[Record]:
        """Return the records."""
        if self.records.startswith(_PICKLE):
            records: list[Record] = pickle.loads(self.records)  # noqa: S301 (a worker of this run wrote it)
            return records
        return [cast(Record, answered or failed) for answered, failed in _PAIRS.decode(self.records)]


def make_chunks(requests: Iterator[InputImage], first: int, size: int, batch: int) -> Iterator[Chunk]:
    """Cut images into chunks that end at multiples of `size`, or if they are large at an earlier one of `batch`.

    Args:
        requests: the images, read as chunks are taken.
        first: number of the first image in the run.
        size: maximum images per chunk, a multiple of `batch`.
        batch: images per forward pass.

    Raises:
        OpalError: `requests` raised it; the images before were yielded.
    """
    part: list[InputImage] = []
    num_bytes, number = 0, first
    errors: list[OpalError] = []
    for number, request in enumerate(until_error(requests, errors), first + 1):
        part.append(request)
        num_bytes += len(request.source) if isinstance(request.source, bytes) else getattr(request.source, "nbytes", 0)
        if number % size == 0 or (num_bytes > _MAX_BYTES and number % batch == 0):
            yield Chunk(number - len(part), tuple(part))
            part, num_bytes = [], 0
    if part:
        yield Chunk(number - len(part), tuple(part))
    if errors:
        raise errors[0]
