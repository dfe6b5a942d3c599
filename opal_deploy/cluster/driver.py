"""The Ray driver: the process that is connected to the cluster, with the pool of actors and the scheduler.

It is a separate process because Ray ends the driver's process (by `_exit`, without an exception) when the cluster's
head or the machine's raylet is gone. `process.DriverProcess` is the parent's side.

Messages are pickled pairs of a kind and a value. The parent sends no kind: the address and `--ray-cpus`, a `Job`, and
one answer to each "next". The driver sends

    log        a line for the user
    opened     an `OpenCluster`
    next       asks for a chunk: the answer is its bytes, None after the last one, or the OpalError of the inputs
    records    a `ChunkResult`, in the order of the images, and the `ClusterProgress`
    done       after the last records
    error      the OpalError that ended the run
    bug        the traceback of any other exception
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

from opal_deploy.cluster.actor import ActorConfig
from opal_deploy.cluster.connection import ClusterProgress, OpenCluster, open_cluster
from opal_deploy.errors import OpalError
from opal_deploy.parallel.chunk import Chunk
from opal_deploy.parallel.scheduler import Scheduler

if TYPE_CHECKING:
    from opal_deploy.cluster.pool import ActorPool

# for actors and Ray to end in good order after the parent ended
_END_SECONDS = 20.0


@dataclass(frozen=True)
class Job:
    """The part of a run that the driver needs.

    Attributes:
        config: of the actors, without the model's files.
        files: the model's files, bytes by name.
        first: number of the first image in the run, from 0.
        size, batch: maximum images per chunk, and images per forward pass.
    """

    config: ActorConfig
    files: dict[str, bytes]
    first: int
    size: int
    batch: int


class Parent:
    """The calling process; the driver ends with it, or when it closes the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._received: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gone = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle_signal)
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def send(self, kind: str, value: object = None) -> None:
        """Send a message; without effect after the parent's end."""
        with suppress(OSError):
            self._connection.send((kind, value))

    def receive(self) -> Any:
        """Wait for the parent's next message."""
        return self._received.get()

    def read_chunks(self) -> Iterator[Chunk]:
        """Ask for chunks until there are no more; raise the OpalError of the inputs."""
        while True:
            self.send("next")
            answer = self.receive()
            if answer is None:
                return
            if isinstance(answer, OpalError):
                raise answer
            yield Chunk.from_bytes(answer)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._received.put(self._connection.recv())
        self._gone = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(_END_SECONDS)
        os._exit(1)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """End this process if the parent ended; leave signals that all processes of a job get to the parent."""
        if self._gone:
            self._gone = False
            raise SystemExit(1)


def main(descriptor: int) -> None:
    """Compute the job that arrives at a connected socket."""
    parent = Parent(Connection(descriptor))
    address, cpus = parent.receive()
    try:
        with open_cluster(address, cpus, partial(parent.send, "log")) as plan:
            # `open_cluster` sets variables that Ray reads when it is imported
            import ray

            from opal_deploy.cluster.pool import ActorPool

            parent.send("opened", OpenCluster(ray.__version__, ray.get_runtime_context().gcs_address, plan))
            job = parent.receive()
            pool = ActorPool(plan, replace(job.config, files=ray.put(job.files)), partial(parent.send, "log"))
            try:
                _compute(parent, pool, job)
            finally:
                pool.close()
            parent.send("done")
            # closes the connection to the cluster in good order when the parent closes this one
            parent.receive()
    except OpalError as error:
        parent.send("error", error)
    except Exception:  # an internal error, which the calling process raises
        parent.send("bug", traceback.format_exc())


def _compute(parent: Parent, pool: ActorPool, job: Job) -> None:
    scheduler = Scheduler(
        pool,
        parent.read_chunks(),
        first=job.first,
        size=job.size,
        batch=job.batch,
        model_sha256=job.config.options.inference.model_sha256,
    )
    for result in scheduler.run():
        nodes = [node for _, node in sorted(pool.statistics.items())]
        parent.send("records", (result, ClusterProgress(nodes, pool.num_opened, scheduler.num_retried)))
