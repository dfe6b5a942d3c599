"""The actors of a run: one for every free place on every living node, replaced when they die or nodes come back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from opal_deploy._version import __version__
from opal_deploy.cluster.actor import ActorConfig, ChunkActor
from opal_deploy.cluster.connection import ActorPlan, Node, NodeStatistics, list_nodes
from opal_deploy.errors import OpalError, StoppedEarly, UsageError, first_line
from opal_deploy.parallel.chunk import IN_FLIGHT, Chunk, ChunkResult
from opal_deploy.parallel.scheduler import Done, Worker, WorkerPool

# a node is given up after so many actors that ended without a result
_MAX_STARTS = 3
# a run without actors and without room for one ends after this time; a node may take long to restart
_PATIENCE_SECONDS = 60.0
_LIST_SECONDS = 1.0
# without an open actor, until a message
_QUIET_SECONDS = 30.0
_CLOSE_SECONDS = 10.0

Ref: TypeAlias = "ray.ObjectRef[Any]"


class Actor(Worker):
    """An actor as the driver sees it; `chunks` has them by the reference to their results.

    Attributes:
        handle, node: Ray's handle, and where the actor runs.
        version: reference to the version there, until the actor opens.
        opening: reference to what `open` returns, until it has opened.
    """

    def __init__(self, handle: Any, node: Node) -> None:
        super().__init__("an actor", node.key, node.key, f"{node.address}: ")
        self.handle, self.node = handle, node
        self.version: Ref | None = handle.get_version.remote()
        self.opening: Ref | None = None

    def submit(self, chunk: Chunk) -> None:
        """See `Worker.submit`."""
        self.chunks[self.handle.predict.remote(chunk.to_bytes())] = chunk

    def kill(self) -> None:
        """See `Worker.kill`."""
        ray.kill(self.handle)


class ActorPool(WorkerPool[Actor]):
    """Starts and replaces actors, and collects their results; used by one thread."""

    def __init__(self, plan: ActorPlan, config: ActorConfig, print_message: Callable[[str], None]) -> None:
        """Start nothing yet."""
        super().__init__(print_message)
        self._plan = plan
        self._config = ray.put(config)
        self._class: Any = ray.remote(ChunkActor)
        self.statistics: dict[str, NodeStatistics] = {}
        self.num_opened = 0
        # when nodes were last listed, and when there was last an actor, and an open one
        self._listed = self._alive = self._open = time.monotonic() - _LIST_SECONDS
        self._nodes: list[Node] = []

    def maintain(self) -> None:
        """Start actors where there is room; raise StoppedEarly if none starts, or there is no room for a minute."""
        now = time.monotonic()
        if now - self._listed >= _LIST_SECONDS:
            self._nodes, self._listed = list_nodes(), now
            for node in self._nodes:
                there = sum(actor.node.key == node.key for actor in self.workers)
                if self._failures[node.key] < _MAX_STARTS:
                    for _ in range(self._plan.count_places(node) - there):
                        self._start(node)
        if any(actor.is_open for actor in self.workers):
            self._open = now
        elif now - self._open > _QUIET_SECONDS:
            self._open = float("inf")
            self._print_message(
                f"Still waiting for an actor: none of {len(self.workers)} has started, or other jobs have the cluster"
            )
        if self.workers:
            self._alive = now
            return
        failing = [self._failures[node.key] >= _MAX_STARTS for node in self._nodes if self._plan.count_places(node)]
        if failing and all(failing):
            raise StoppedEarly(f"actors fail on every node: {self._last_failure}; fix this, then run again")
        if now - self._alive > _PATIENCE_SECONDS:
            raise StoppedEarly(
                f"no actor is left, and none of {len(self._nodes)} nodes has room for one of {self._plan}; "
                "bring nodes back and run again"
            )

    def _start(self, node: Node) -> None:
        place = NodeAffinitySchedulingStrategy(node.key, soft=False)
        handle = self._class.options(
            num_cpus=self._plan.cpus,
            num_gpus=self._plan.gpus,
            max_concurrency=IN_FLIGHT + 1,
            max_restarts=0,
            scheduling_strategy=place,
        ).remote()
        self.workers.append(Actor(handle, node))

    def wait(self, seconds: float) -> list[Done]:
        """See `WorkerPool.wait`; raise UsageError if a node has another version, or cannot open the model."""
        refs = [ref for actor in self.workers for ref in (actor.version, actor.opening, *actor.chunks) if ref]
        if not refs:
            time.sleep(min(seconds, _LIST_SECONDS))
            return []
        ray.wait(refs, num_returns=1, timeout=seconds)
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        done: list[Done] = []
        for actor in list(self.workers):
            if ready & {actor.version, actor.opening}:
                self._continue_opening(actor)
            for ref in [ref for ref in actor.chunks if ref in ready]:
                if ref in actor.chunks:  # the actor did not turn out to be dead meanwhile
                    done += self._collect(actor, ref)
        return done

    def _collect(self, actor: Actor, ref: Ref) -> list[Done]:
        try:
            result: ChunkResult | OpalError = ray.get(ref)
        except RayTaskError:
            raise  # an internal error
        except RayError:
            return self._bury(actor, "was lost")
        if isinstance(result, ChunkResult):
            statistics = self.statistics[actor.node.address]
            statistics.images += len(actor.chunks[ref])
            statistics.seconds = time.monotonic() - statistics.started
        return self._finish(actor, ref, result)

    def _bury(self, worker: Actor, ending: str) -> list[Done]:
        if (statistics := self.statistics.get(worker.node.address)) is not None:
            statistics.lost += 1
        return super()._bury(worker, ending)

    def _count_failure(self, worker: Actor, reason: str) -> None:
        """Count a failure of a node, and give it up after the last one."""
        address = worker.node.address
        super()._count_failure(worker, f"node {address}: {reason}")
        if self._failures[worker.key] == _MAX_STARTS:
            self._print_message(f"{address}: no actor is started there any more ({reason})")

    def _continue_opening(self, actor: Actor) -> None:
        address = actor.node.address
        try:
            if actor.version is not None:
                if (version := ray.get(actor.version)) != __version__:
                    raise UsageError(
                        f"node {address}: it has opal-deploy {version}, and this is {__version__}; install the same "
                        "version on all nodes"
                    )
                actor.version, actor.opening = None, actor.handle.open.remote(self._config)
                return
            assert actor.opening is not None  # it is ready
            opened = ray.get(actor.opening)
        except RayTaskError:
            raise  # an internal error
        except RayError as error:
            if missing := _find_import_error(error):
                raise UsageError(
                    f"node {address}: opal-deploy cannot be imported there ({missing}); install version {__version__} "
                    "with the extra ray on all nodes, in the environment that Ray runs in"
                ) from None
            self._count_failure(actor, f"it ended while it started: {first_line(error)}")
            actor.kill()
            self.workers.remove(actor)
            return
        if isinstance(opened, OpalError):
            raise type_like(opened, f"node {address}: {opened}")
        actor.opening, actor.is_open = None, True
        self.num_opened += 1
        self.statistics.setdefault(address, NodeStatistics(address, opened, time.monotonic()))

    def close(self) -> None:
        """End all actors, gracefully if they are open or open within seconds, since killed actors leave their files."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        opening = [actor.opening for actor in self.workers if actor.opening]
        opened = ray.wait(opening, num_returns=len(opening), timeout=_CLOSE_SECONDS)[0] if opening else []
        idle = [actor for actor in self.workers if (actor.is_open or actor.opening in opened) and not actor.chunks]
        if closing := [actor.handle.close.remote() for actor in idle]:
            ray.wait(closing, num_returns=len(closing), timeout=max(1.0, deadline - time.monotonic()))
        for actor in self.workers:
            actor.kill()
        self.workers = []


def _find_import_error(error: RayError) -> str:
    """Return why an actor's class could not be imported on its node, of Ray's text; empty if that is not the error."""
    text = str(error)
    if "failed to import on the worker" not in text:
        return ""
    found = re.findall(r"^\w*Error: .*$", text, re.MULTILINE)
    return found[-1].strip() if found else "see Ray's log there"


def type_like(error: OpalError, message: str) -> OpalError:
    """Return an error with the exit code of another one, and another message."""
    return (StoppedEarly if isinstance(error, StoppedEarly) else UsageError)(message)
