"""Cut a run into chunks, assign them to actors, handle the death of actors, and keep the order of the results.

Records must not depend on how a run is cut. Runtimes may compute the last bit of a logit differently at another place
in a batch, so an image keeps the place that it has in a run on one machine: chunks begin at multiples of the batch, and
one that cannot (the first of a resumed run, a half) is padded at its start, see `predict_batches`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from opal_deploy.errors import OpalError
from opal_deploy.inference.cluster.actor import IN_FLIGHT, Chunk, ChunkResult
from opal_deploy.inference.executor import until_error
from opal_deploy.inference.types import InputImage
from opal_deploy.records.record import Record

if TYPE_CHECKING:
    from opal_deploy.inference.cluster.pool import Actor, ActorPool

# a chunk of members of a compressed archive, which are sent as bytes, ends early
_MAX_BYTES = 64 << 20


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


# chunks between the first one without a result and the last one begun, per actor: those in flight and as many as it
# does while another one is slow
_WINDOW = 8
# deaths until a chunk is halved, or a single image is the cause
_MAX_DEATHS = 2
# signals are handled in between
_WAIT_SECONDS = 0.2


class Scheduler:
    """Has chunks computed by the actors of a pool; used by one thread.

    A chunk whose actor died is retried once, as the only chunk of an actor. A chunk that kills again is the cause; it
    is halved until a single image is left.
    """

    def __init__(
        self,
        pool: ActorPool,
        chunks: Iterator[Chunk],
        *,
        first: int,
        size: int,
        batch: int,
        build_error: Callable[[InputImage], Record],
    ) -> None:
        """Start nothing yet.

        Args:
            pool: the actors.
            chunks: in order; read as they are assigned.
            first: number of the first image.
            size, batch: maximum images per chunk, and images per forward pass.
            build_error: returns the record of an image that kills actors.
        """
        self._pool, self._chunks, self._size, self._batch = pool, chunks, size, batch
        self._build_error = build_error
        # the first image without a record, and the first one after the last chunk taken
        self._head = self._taken = first
        # results that wait for earlier ones, by the number of their first image
        self._finished: dict[int, tuple[int, ChunkResult]] = {}
        self._suspects: list[tuple[int, Chunk]] = []
        self._ended = False
        self._errors: list[OpalError] = []
        self.num_retried = 0

    def run(self) -> Iterator[ChunkResult]:
        """Yield the results of one chunk after the other; raise StoppedEarly if no actor starts or several fail.

        An OpalError of the chunks is raised after all records before it.
        """
        while True:
            self._pool.maintain()
            self._assign()
            in_flight = any(actor.chunks for actor in self._pool.actors)
            if self._ended and not in_flight and not self._suspects:
                break
            for chunk, result in self._pool.wait(_WAIT_SECONDS):
                self._take_result(chunk, result)
            while self._head in self._finished:
                count, ready = self._finished.pop(self._head)
                self._head += count
                yield ready
        if self._errors:
            raise self._errors[0]

    def _take_result(self, chunk: Chunk, result: ChunkResult | OpalError | None) -> None:
        if isinstance(result, ChunkResult):
            self._finished[chunk.first] = len(chunk), result
            return
        self.num_retried += 1
        if isinstance(result, OpalError) and chunk.deaths >= _MAX_DEATHS:
            # not caused by an image: the disk is full, or devices are lost one after the other
            raise result
        if chunk.deaths < _MAX_DEATHS:
            self._add_suspect(chunk)
        elif len(chunk) > 1:
            for half in chunk.halve(self._batch):
                self._add_suspect(half)
        else:
            self._finished[chunk.first] = 1, ChunkResult.build([self._build_error(chunk.requests[0])])

    def _add_suspect(self, chunk: Chunk) -> None:
        heapq.heappush(self._suspects, (chunk.first, chunk))

    def _assign(self) -> None:
        actors = sorted((a for a in self._pool.actors if a.is_open), key=lambda actor: len(actor.chunks))
        waiting: list[tuple[int, Chunk]] = []
        while self._suspects:
            first, chunk = heapq.heappop(self._suspects)
            # an idle actor, on another node if possible; it gets nothing else until it is free
            actor = min(actors, key=lambda a: (a.node.key == chunk.node, len(a.chunks)), default=None)
            if actor is not None:
                actors.remove(actor)
            if actor is not None and not actor.chunks:
                actor.submit(chunk)
            else:
                waiting.append((first, chunk))
        self._suspects = waiting
        self._fill(actors)

    def _fill(self, actors: Sequence[Actor]) -> None:
        window = self._size * _WINDOW * max(1, len(self._pool.actors))
        for level in range(IN_FLIGHT):
            for actor in actors:
                if len(actor.chunks) > level or not actor.room:
                    continue
                if self._ended or self._taken - self._head >= window:
                    return
                chunk = self._next_chunk()
                if chunk is None:
                    return
                actor.submit(chunk)

    def _next_chunk(self) -> Chunk | None:
        try:
            chunk = next(self._chunks, None)
        except OpalError as error:
            # the records before it come first
            self._errors.append(error)
            chunk = None
        if chunk is None:
            self._ended = True
        else:
            self._taken = chunk.first + len(chunk)
        return chunk
