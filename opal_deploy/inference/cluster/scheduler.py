"""Which shard goes to which actor, what follows from an actor's death, and the order of the results."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from opal_deploy.errors import OpalError
from opal_deploy.inference.cluster.actor import IN_FLIGHT, ShardResult
from opal_deploy.inference.cluster.pool import Actor, ActorPool
from opal_deploy.inference.cluster.shards import Shard
from opal_deploy.inference.types import Request
from opal_deploy.records.record import Record

# shards between the first one without a result and the last one begun, per actor: those in flight and as many as it
# does while another one is slow
_WINDOW = 8
# deaths with a shard until it is halved, or, of one image, until it is the reason
_MAX_DEATHS = 2
# signals are taken in between
_WAIT_SECONDS = 0.2


class Scheduler:
    """Has shards answered by the actors of a pool; used by one thread.

    A shard whose actor died is tried once more, alone on an actor: others that were there go on, and what dies again
    is to blame. That one is halved until a single image is left.
    """

    def __init__(
        self,
        pool: ActorPool,
        shards: Iterator[Shard],
        *,
        first: int,
        size: int,
        batch: int,
        build_error: Callable[[Request], Record],
    ) -> None:
        """Start nothing yet.

        Args:
            pool: the actors.
            shards: in their order; taken as there is room for them.
            first: number of the first image.
            size: images a shard at most.
            batch: images a forward pass.
            build_error: returns the record of an image that kills actors.
        """
        self._pool, self._shards, self._size, self._batch = pool, shards, size, batch
        self._build_error = build_error
        # the first image without a record, and the one behind the last shard taken
        self._head = self._taken = first
        # results that others must come before, by the number of their first image
        self._finished: dict[int, tuple[int, ShardResult | list[Record]]] = {}
        self._suspects: list[tuple[int, Shard]] = []
        self._ended = False
        self._errors: list[OpalError] = []
        self.num_retried = 0

    def run(self) -> Iterator[Sequence[Record]]:
        """Yield the records of one shard after the other.

        Raises:
            StoppedEarly: no actor can be started, or one after the other cannot go on.
            OpalError: the shards raised it; all records before were yielded. Or a node is not fit for the run.
        """
        while True:
            self._pool.maintain()
            self._assign()
            in_flight = any(actor.shards for actor in self._pool.actors)
            if self._ended and not in_flight and not self._suspects:
                break
            for shard, result in self._pool.wait(_WAIT_SECONDS):
                self._take_result(shard, result)
            while self._head in self._finished:
                count, ready = self._finished.pop(self._head)
                self._head += count
                yield ready.load() if isinstance(ready, ShardResult) else ready
        if self._errors:
            raise self._errors[0]

    def _take_result(self, shard: Shard, result: ShardResult | OpalError | None) -> None:
        if isinstance(result, ShardResult):
            self._finished[shard.first] = len(shard), result
            return
        self.num_retried += 1
        if isinstance(result, OpalError) and shard.deaths >= _MAX_DEATHS:
            # no image causes it: the disk is full, or devices are lost one after the other
            raise result
        if shard.deaths < _MAX_DEATHS:
            self._add_suspect(shard)
        elif len(shard) > 1:
            for half in shard.halve(self._batch):
                self._add_suspect(half)
        else:
            self._finished[shard.first] = 1, [self._build_error(shard.requests[0])]

    def _add_suspect(self, shard: Shard) -> None:
        heapq.heappush(self._suspects, (shard.first, shard))

    def _assign(self) -> None:
        actors = sorted((a for a in self._pool.actors if a.is_open), key=lambda actor: len(actor.shards))
        waiting: list[tuple[int, Shard]] = []
        while self._suspects:
            first, shard = heapq.heappop(self._suspects)
            # an actor of its own, on another node if there is one; it gets nothing else until it is free
            actor = min(actors, key=lambda a: (a.node.key == shard.node, len(a.shards)), default=None)
            if actor is not None:
                actors.remove(actor)
            if actor is not None and not actor.shards:
                actor.submit(shard)
            else:
                waiting.append((first, shard))
        self._suspects = waiting
        self._fill(actors)

    def _fill(self, actors: Sequence[Actor]) -> None:
        window = self._size * _WINDOW * max(1, len(self._pool.actors))
        for level in range(IN_FLIGHT):
            for actor in actors:
                if len(actor.shards) > level or not actor.room:
                    continue
                if self._ended or self._taken - self._head >= window:
                    return
                shard = self._next_shard()
                if shard is None:
                    return
                actor.submit(shard)

    def _next_shard(self) -> Shard | None:
        try:
            shard = next(self._shards, None)
        except OpalError as error:
            # those before it are answered first
            self._errors.append(error)
            shard = None
        if shard is None:
            self._ended = True
        else:
            self._taken = shard.first + len(shard)
        return shard
