"""Shards: contiguous images of a run, as they travel to an actor.

Records must not depend on how a run is cut up. Runtimes may compute the last bit of a logit differently at another
place in a batch, so an image keeps the place that it has in a run on one machine: shards begin at multiples of the
batch, and one that cannot (a resumed run's first one, the halves of one that killed its actor) is filled up in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from opal_deploy.errors import ImageError
from opal_deploy.inference.types import Request

# a shard of members of a compressed archive, which travel as bytes, ends early
_MAX_BYTES = 64 << 20
_PADDING = Request(None, b"", error=ImageError("padding", "keeps an image's place in its batch"))


@dataclass(frozen=True)
class Shard:
    """Contiguous images of a run.

    Attributes:
        first: number of the first image in the run, from 0.
        requests: one an image.
        deaths: number of actors that died while they had it.
    """

    first: int
    requests: tuple[Request, ...]
    deaths: int = 0

    def __len__(self) -> int:
        return len(self.requests)

    def count_padding(self, batch: int) -> int:
        """Return the number of requests that `pad` puts in front."""
        return self.first % batch

    def pad(self, batch: int) -> Iterator[Request]:
        """Yield the requests, behind as many with an error as keep each at its place in its batch."""
        yield from [_PADDING] * self.count_padding(batch)
        yield from self.requests

    def count_death(self) -> Shard:
        """Return the shard after one more actor died with it."""
        return replace(self, deaths=self.deaths + 1)

    def halve(self, batch: int) -> tuple[Shard, Shard]:
        """Return two shards of about half the size, cut between two batches as long as there are several.

        Each counts one death: of which half it was is not known.
        """
        middle = self.first + len(self) // 2
        aligned = middle - middle % batch
        if self.first < aligned:
            middle = aligned
        cut = middle - self.first
        return Shard(self.first, self.requests[:cut], 1), Shard(middle, self.requests[cut:], 1)


def make_shards(requests: Iterator[Request], first: int, size: int, batch: int) -> Iterator[Shard]:
    """Cut requests into shards that end at multiples of `size`, or at an earlier one of `batch` where they are large.

    Args:
        requests: are taken as shards are.
        first: number of the first request's image in the run.
        size: images a shard, a multiple of `batch`.
        batch: images a forward pass.
    """
    part: list[Request] = []
    num_bytes = 0
    for number, request in enumerate(requests, first + 1):
        part.append(request)
        num_bytes += len(request.source) if isinstance(request.source, bytes) else 0
        if number % size == 0 or (num_bytes > _MAX_BYTES and number % batch == 0):
            yield Shard(number - len(part), tuple(part))
            part, num_bytes = [], 0
    if part:
        yield Shard(first if not part else number - len(part), tuple(part))
