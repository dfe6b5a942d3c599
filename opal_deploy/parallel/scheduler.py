"""Assign the chunks of a run to workers, handle the death of workers, and keep the order of the results.

Records must not depend on how a run is cut. Runtimes may compute the last bit of a logit differently at another place
in a batch, so an image keeps the place that it has in a run on one machine: chunks begin at multiples of the batch, and
one that cannot (the first of a resumed run, a half) is padded at its start, see `predict_batches`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from opal_deploy.errors import OpalError
from opal_deploy.logs import Log
from opal_deploy.parallel.chunk import IN_FLIGHT, Chunk, ChunkResult
from opal_deploy.records.build import Digests, error_record
from opal_deploy.records.record import Record
from opal_deploy.sources.image import InputImage

# per worker, the most chunks from the first without a result to the last begun: those in flight, and as many as it
# finishes while another worker is slow
_WINDOW = 8
# deaths until a chunk is halved, or a single image is the cause
_MAX_DEATHS = 2
# signals are handled in between
_WAIT_SECONDS = 0.2


# a chunk that is done, with its result, or why its worker is replaced: an error, None for its death
Done: TypeAlias = tuple[Chunk, ChunkResult | OpalError | None]


class Worker(ABC):
    """A worker that predicts chunks: a process or an actor.

    Attributes:
        name, prefix: what messages call it, and how they begin.
        place: the node or device that it runs on; a chunk whose worker died is retried on another one.
        key: failures in a row are counted for all workers of the same key.
        is_open: whether the worker takes chunks.
        chunks: those in flight, under keys of the worker's own.
    """

    def __init__(self, name: str, place: str, key: str, prefix: str = "") -> None:
        self.name, self.place, self.key, self.prefix = name, place, key, prefix
        self.is_open = False
        self.chunks: dict[Any, Chunk] = {}

    @property
    def room(self) -> int:
        """The number of chunks that the worker accepts now; a chunk that killed a worker gets a worker for itself."""
        if not self.is_open or any(chunk.deaths for chunk in self.chunks.values()):
            return 0
        return IN_FLIGHT - len(self.chunks)

    @abstractmethod
    def submit(self, chunk: Chunk) -> None:
        """Send the worker a chunk."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker at once."""


W = TypeVar("W", bound=Worker)


class WorkerPool(ABC, Generic[W]):
    """The workers of a run, replaced when they die; used by one thread."""

    def __init__(self, print_message: Log) -> None:
        """Start nothing yet."""
        # those that are running or starting
        self.workers: list[W] = []
        self.num_lost = 0
        self._print_message = print_message
        # consecutive failures by the workers' key
        self._failures: Counter[str] = Counter()
        self._last_failure = ""

    @abstractmethod
    def maintain(self) -> None:
        """Replace workers that died; raise StoppedEarly if none can be started."""

    @abstractmethod
    def wait(self, seconds: float) -> list[Done]:
        """Wait until something happens, `seconds` at most, and return the chunks that are done.

        Those whose worker died, or is replaced after an error, count it as a death.
        """

    def _finish(self, worker: W, key: object, result: ChunkResult | OpalError) -> list[Done]:
        """Return a worker's chunk with its result; after an error, bury the worker and return its other chunks too."""
        chunk = worker.chunks.pop(key)
        if isinstance(result, OpalError):
            # a device that was lost may be lost repeatedly
            self._count_failure(worker, str(result))
            return [(chunk.count_death(worker.place), result), *self._bury(worker, f"failed: {result}")]
        self._failures[worker.key] = 0
        for line in result.messages:
            self._print_message(f"{worker.prefix}{line}")
        return [(chunk, result)]

    def _bury(self, worker: W, ending: str) -> list[Done]:
        """Forget a worker that ended or cannot go on, and return the chunks that it had."""
        worker.kill()
        self.workers.remove(worker)
        self.num_lost += 1
        chunks, worker.chunks = worker.chunks, {}
        again = f"; its {len(chunks)} chunks are tried again" if chunks else ""
        self._print_message(f"{worker.prefix}{worker.name} {ending}{again}")
        return [(chunk.count_death(worker.place), None) for chunk in chunks.values()]

    def _count_failure(self, worker: W, reason: str) -> None:
        self._failures[worker.key] += 1
        self._last_failure = reason


class Scheduler:
    """Has chunks computed by the workers of a pool; used by one thread.

    A chunk whose worker died is retried once, as the only chunk of a worker. A chunk that kills again is the cause; it
    is halved until a single image is left.
    """

    def __init__(
        self,
        pool: WorkerPool[Any],
        chunks: Iterator[Chunk],
        *,
        first: int,
        size: int,
        batch: int,
        model_sha256: str | None,
    ) -> None:
        """Start nothing yet.

        Args:
            pool: the workers.
            chunks: in order; read as they are assigned.
            first: number of the first image.
            size, batch: maximum images per chunk, and images per forward pass.
            model_sha256: digest of the model's file, for the record of an image that kills workers; None if unknown.
        """
        self._pool, self._chunks, self._size, self._batch = pool, chunks, size, batch
        self._model_sha256 = model_sha256
        # the first image without a record, and the first one after the last chunk taken
        self._head = self._taken = first
        # results that wait for earlier ones, by the number of their first image
        self._finished: dict[int, tuple[int, ChunkResult]] = {}
        self._suspects: list[tuple[int, Chunk]] = []
        self._ended = False
        self._errors: list[OpalError] = []
        self.num_retried = 0

    def run(self) -> Iterator[ChunkResult]:
        """Yield the results of one chunk after the other; raise StoppedEarly if no worker starts or several fail.

        An OpalError of the chunks is raised after all records before it.
        """
        while True:
            self._pool.maintain()
            self._assign()
            in_flight = any(worker.chunks for worker in self._pool.workers)
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

    def _build_error(self, request: InputImage) -> Record:
        message = "the workers that predicted it died, the last one with no other image in flight"
        digests = Digests(None, self._model_sha256)
        return error_record(
            request.name, "worker_died", message, digests=digests, label=request.label, index=request.index
        )

    def _assign(self) -> None:
        workers = sorted((w for w in self._pool.workers if w.is_open), key=lambda worker: len(worker.chunks))
        waiting: list[tuple[int, Chunk]] = []
        while self._suspects:
            first, chunk = heapq.heappop(self._suspects)
            # an idle worker, at another place if possible; it gets nothing else until it is free
            worker = min(workers, key=lambda w: (w.place == chunk.place, len(w.chunks)), default=None)
            if worker is not None:
                workers.remove(worker)
            if worker is not None and not worker.chunks:
                worker.submit(chunk)
            else:
                waiting.append((first, chunk))
        self._suspects = waiting
        self._fill(workers)

    def _fill(self, workers: Sequence[Worker]) -> None:
        window = self._size * _WINDOW * max(1, len(self._pool.workers))
        for level in range(IN_FLIGHT):
            for worker in workers:
                if len(worker.chunks) > level or not worker.room:
                    continue
                if self._ended or self._taken - self._head >= window:
                    return
                chunk = self._next_chunk()
                if chunk is None:
                    return
                worker.submit(chunk)

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
