"""Shards: contiguous images of a run, as they travel to an actor.

Records must not depend on how a run is cut up. Runtimes may compute the last bit of a logit differently at another
place in a batch, so an image keeps the place that it has in a run on one machine: shards begin at multiples of the
batch, and one that cannot (a resumed run's first one, the halves of one that killed its actor) is filled up in front,
see `predict_batches`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from opal_deploy.errors import OpalError
from opal_deploy.inference.executor import until_error
from opal_deploy.inference.types import Request

# a shard of members of a compressed archive, which travel as bytes, ends early
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Shard:
    """Contiguous images of a run.

    Attributes:
        first: number of the first image in the run, from 0.
        requests: one an image.
        deaths: number of actors that died while they had it.
        node: id of the node where the last of these was; empty for none.
    """

    first: int
    requests: tuple[Request, ...]
    deaths: int = 0
    node: str = ""

    def __len__(self) -> int:
        return len(self.requests)

    def to_bytes(self) -> bytes:
        """Return the shard as it travels: in a fraction of the time and size that its pickle would take."""
        requests = [
            # a path is pickled in a fraction of the time as text
            (
                r.name,
                os.fspath(r.source) if isinstance(r.source, Path) else r.source,
                r.box,
                r.label,
                r.error,
                r.index,
                r.drawn,
                r.frame,
            )
            for r in self.requests
        ]
        return pickle.dumps((self.first, requests), pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def from_bytes(data: bytes) -> Shard:
        """Return the shard of `to_bytes`."""
        first, requests = pickle.loads(data)  # noqa: S301 (the driver of this run wrote it)
        return Shard(first, tuple(Request(*fields) for fields in requests))

    def count_death(self, node: str) -> Shard:
        """Return the shard after one more actor died with it, on the node with this id."""
        return replace(self, deaths=self.deaths + 1, node=node)

    def halve(self, batch: int) -> tuple[Shard, Shard]:
        """Return two shards of about half the size, cut between two batches as long as there are several.

        Each counts one death: of which half it was is not known.
        """
        middle = self.first + len(self) // 2
        aligned = middle - middle % batch
        if self.first < aligned:
            middle = aligned
        cut = middle - self.first
        return (
            Shard(self.first, self.requests[:cut], 1, self.node),
            Shard(middle, self.requests[cut:], 1, self.node),
        )


def make_shards(requests: Iterator[Request], first: int, size: int, batch: int) -> Iterator[Shard]:
    """Cut requests into shards that end at multiples of `size`, or at an earlier one of `batch` where they are large.

    Args:
        requests: are taken as shards are.
        first: number of the first request's image in the run.
        size: images a shard, a multiple of `batch`.
        batch: images a forward pass.

    Raises:
        OpalError: `requests` raised it; a shard of all before it was yielded.
    """
    part: list[Request] = []
    num_bytes, number = 0, first
    errors: list[OpalError] = []
    for number, request in enumerate(until_error(requests, errors), first + 1):
        part.append(request)
        num_bytes += len(request.source) if isinstance(request.source, bytes) else getattr(request.source, "nbytes", 0)
        if number % size == 0 or (num_bytes > _MAX_BYTES and number % batch == 0):
            yield Shard(number - len(part), tuple(part))
            part, num_bytes = [], 0
    if part:
        yield Shard(number - len(part), tuple(part))
    if errors:
        raise errors[0]
