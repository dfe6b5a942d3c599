"""The worker processes of a run on this machine, replaced when they die."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any

from opal_deploy.errors import OpalError, StoppedEarly
from opal_deploy.logs import Log
from opal_deploy.parallel.chunk import Chunk, ChunkResult
from opal_deploy.parallel.scheduler import Worker, WorkerPool
from opal_deploy.parallel.worker import Opened, WorkerConfig
from opal_deploy.run.run import RunOptions
from opal_deploy.timing import StageTimes
from opal_deploy.workers.process import describe_exit_code, kill_group, start_python

# a process that cannot open the model any more is given up after so many attempts
_MAX_STARTS = 3
_EXIT_SECONDS = 10.0


class ProcessWorker(Worker):
    """A worker process as its parent sees it; `number` is that of its configuration in the pool."""

    def __init__(self, number: int, place: str, config: WorkerConfig) -> None:
        """Start the process; raise StoppedEarly if it cannot be started."""
        self.number, self._place = number, place
        self.chunks: dict[Any, Chunk] = {}
        self._open = False
        try:
            self.connection, theirs = Pipe()
            with theirs:
                self._process = start_python(
                    "opal_deploy.parallel.worker",
                    theirs.fileno(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        except OSError as error:
            raise StoppedEarly(
                f"a worker process cannot be started: {error.strerror or error}; use fewer --processes"
            ) from None
        self.send(pickle.dumps(config))

    @property
    def place(self) -> str:
        """See `Worker.place`."""
        return self._place

    @property
    def is_open(self) -> bool:
        """See `Worker.is_open`."""
        return self._open

    def begin(self, options: bytes) -> None:
        """Make the process, which has opened the model, ready for chunks; `options`: pickle of the RunOptions."""
        self._open = True
        self.send(options)

    def submit(self, chunk: Chunk) -> None:
        """See `Worker.submit`."""
        self.chunks[chunk.first] = chunk
        self.send(chunk.to_bytes())

    def send(self, data: bytes) -> None:
        """Send a message; the end of a process is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(data)

    def receive(self) -> Any:
        """Return the next message; raise EOFError if the process has ended, RuntimeError for a bug of ours."""
        try:
            message = pickle.loads(self.connection.recv_bytes())  # noqa: S301 (a worker of this run wrote it)
        except OSError:
            raise EOFError from None
        if isinstance(message, str):
            raise RuntimeError(f"in a worker process: {message}")
        return message

    def has_ended(self) -> bool:
        """Return whether the process has ended, and nothing that it sent is left to read."""
        return self._process.poll() is not None and not self.connection.poll()

    def describe_end(self) -> str:
        """Return how the process, which has ended or is ending, ended, to complete "the process ..."."""
        try:
            return describe_exit_code(self._process.wait(_EXIT_SECONDS))
        except subprocess.TimeoutExpired:
            return "stopped answering"

    def finish(self) -> StageTimes:
        """Wait until a process that was told to end has ended, and return its times; kill it if it takes too long."""
        times = StageTimes()
        with contextlib.suppress(EOFError):
            while self.connection.poll(_EXIT_SECONDS):
                if isinstance(message := self.receive(), StageTimes):
                    times = message
        self.kill()
        return times

    def kill(self) -> None:
        """End the process at once, if it is still running; its own worker processes end with it."""
        if not self.connection.closed:
            self.connection.close()
            kill_group(self._process)
            self._process.wait()


class ProcessWorkerPool(WorkerPool):
    """Starts and replaces worker processes, and collects their results."""

    def __init__(self, configs: Sequence[tuple[str, WorkerConfig]], print_message: Log) -> None:
        """Start nothing yet; `configs`: for each process its place, see `Worker.place`, and its configuration."""
        self._configs, self._print_message = tuple(configs), print_message
        self._workers: list[ProcessWorker] = []
        self._options = b""
        self.num_lost = 0
        # consecutive failures by the number of the process
        self._failures: Counter[int] = Counter()
        self._last_failure = ""

    @property
    def workers(self) -> Sequence[ProcessWorker]:
        """See `WorkerPool.workers`."""
        return self._workers

    def open(self) -> list[Opened]:
        """Start all processes, and wait until they have opened the model.

        Raises:
            OpalError: one of them could not. StoppedEarly: one of them ended.
        """
        for number in range(len(self._configs)):
            self._start(number)
        opened: list[Opened] = []
        for worker in self._workers:
            try:
                message = worker.receive()
            except EOFError:
                raise StoppedEarly(
                    f"a worker process {worker.describe_end()} while it opened the model; use fewer --processes"
                ) from None
            if isinstance(message, OpalError):
                raise message
            opened.append(message)
        return opened

    def begin(self, options: RunOptions) -> None:
        """Make the processes of `open`, and all later ones, ready for the chunks of a run."""
        self._options = pickle.dumps(options)
        for worker in self._workers:
            worker.begin(self._options)

    def maintain(self) -> None:
        """See `WorkerPool.maintain`."""
        running = {worker.number for worker in self._workers}
        for number in range(len(self._configs)):
            if number not in running and self._failures[number] < _MAX_STARTS:
                self._start(number)
        if not self._workers:
            raise StoppedEarly(f"worker processes fail: {self._last_failure}; fix this, then run again")

    def wait(self, seconds: float) -> list[tuple[Chunk, ChunkResult | OpalError | None]]:
        """See `WorkerPool.wait`."""
        ready = wait([worker.connection for worker in self._workers], seconds)
        done: list[tuple[Chunk, ChunkResult | OpalError | None]] = []
        for worker in list(self._workers):
            if worker.connection in ready:
                done += self._receive(worker)
            elif not ready and worker.has_ended():
                # a process that it forked holds its end of the connection open
                done += self._bury_ended(worker)
        return done

    def _receive(self, worker: ProcessWorker) -> list[tuple[Chunk, ChunkResult | OpalError | None]]:
        try:
            message = worker.receive()
        except EOFError:
            return self._bury_ended(worker)
        if isinstance(message, Opened):
            worker.begin(self._options)
            return []
        if isinstance(message, OpalError):
            self._count_failure(worker, str(message))
            return self._bury(worker, f"cannot open the model: {message}")
        first, result = message
        chunk = worker.chunks.pop(first)
        if isinstance(result, OpalError):
            # a device that was lost may be lost repeatedly
            self._count_failure(worker, str(result))
            return [(chunk.count_death(worker.place), result), *self._bury(worker, f"failed: {result}")]
        self._failures[worker.number] = 0
        for line in result.messages:
            self._print_message(line)
        return [(chunk, result)]

    def close(self) -> list[StageTimes]:
        """End all processes, those that are idle in good order; return the times of these."""
        idle = [worker for worker in self._workers if worker.is_open and not worker.chunks]
        for worker in idle:
            worker.send(b"")
        times = [worker.finish() for worker in idle]
        for worker in self._workers:
            worker.kill()
        self._workers = []
        return times

    def _start(self, number: int) -> None:
        self._workers.append(ProcessWorker(number, *self._configs[number]))

    def _bury_ended(self, worker: ProcessWorker) -> list[tuple[Chunk, ChunkResult | OpalError | None]]:
        ending = worker.describe_end()
        if not worker.is_open:
            self._count_failure(worker, f"the process {ending} while it opened the model")
        return self._bury(worker, ending)

    def _bury(self, worker: ProcessWorker, ending: str) -> list[tuple[Chunk, ChunkResult | OpalError | None]]:
        """Forget a process that ended or cannot go on, and return the chunks that it had."""
        worker.kill()
        self._workers.remove(worker)
        self.num_lost += 1
        again = f"; its {len(worker.chunks)} chunks are tried again" if worker.chunks else ""
        self._print_message(f"A worker process {ending}{again}")
        return [(chunk.count_death(worker.place), None) for chunk in worker.chunks.values()]

    def _count_failure(self, worker: ProcessWorker, reason: str) -> None:
        self._failures[worker.number] += 1
        self._last_failure = reason
