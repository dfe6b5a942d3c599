"""Assign the chunks of a run to workers, handle the death of workers, and keep the order of the results.

Records must not depend on how a run is cut. Runtimes may compute the last bit of a logit differently at another place
in a batch, so an image keeps the place that it has in a run on one machine: chunks begin at multiples of the batch, and
one that cannot (the first of a resumed run, a half) is padded at its start, see `predict_batches`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from opal_deploy.errors import OpalError
from opal_deploy.parallel.chunk import IN_FLIGHT, Chunk, ChunkResult
from opal_deploy.records.record import Digests, Record, error_record
from opal_deploy.sources.image import InputImage

# chunks between the first one without a result and the last one begun, per worker: those in flight and as many as it
# does while another one is slow
_WINDOW = 8
# deaths until a chunk is halved, or a single image is the cause
_MAX_DEATHS = 2
# signals are handled in between
_WAIT_SECONDS = 0.2


class Worker(ABC):
    """A worker as the scheduler sees it; `chunks` are those in flight, under keys of the worker's own."""

    chunks: dict[Any, Chunk]

    @property
    @abstractmethod
    def place(self) -> str:
        """The node or device that the worker runs on; a chunk whose worker died is retried on another one."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether it takes chunks."""

    @property
    def room(self) -> int:
        """The number of chunks that it accepts now; a chunk that killed a worker gets a worker for itself."""
        if not self.is_open or any(chunk.deaths for chunk in self.chunks.values()):
            return 0
        return IN_FLIGHT - len(self.chunks)

    @abstractmethod
    def submit(self, chunk: Chunk) -> None:
        """Send it a chunk."""


class WorkerPool(Protocol):
    """The workers of a run; used by one thread."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that are running or starting."""
        ...

    def maintain(self) -> None:
        """Replace workers that died; raise StoppedEarly if none can be started."""
        ...

    def wait(self, seconds: float) -> list[tuple[Chunk, ChunkResult | OpalError | None]]:
        """Wait until something happens, and return the chunks that are done.

        Args:
            seconds: to wait at most.

        Returns:
            Each chunk with its result; with None where its worker died, and with an error after which its worker is
            replaced. These two count it as a death of the chunk.
        """
        ...


class Scheduler:
    """Has chunks computed by the workers of a pool; used by one thread.

    A chunk whose worker died is retried once, as the only chunk of a worker. A chunk that kills again is the cause; it
    is halved until a single image is left.
    """

    def __init__(
        self,
        pool: WorkerPool,
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
        message = "the workers that predicted it died, the last one with no other image in work"
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
