"""The worker processes of a run on this machine, replaced when they die."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from opal_deploy.errors import OpalError, StoppedEarly
from opal_deploy.logs import Log
from opal_deploy.parallel.chunk import Chunk
from opal_deploy.parallel.scheduler import Done, Worker, WorkerPool
from opal_deploy.run.run import RunOptions
from opal_deploy.timing import StageTimes
from opal_deploy.workers.process import WorkerCrashed, WorkerProcess
from opal_deploy.workers.worker import Data, WorkerConfig

# a process that cannot open the model any more is given up after so many attempts
_MAX_STARTS = 3
_EXIT_SECONDS = 10.0


class ProcessWorker(Worker):
    """A worker process of `ChunkTask` as its parent sees it; its key is the number of its configuration in the pool.

    `answer` is the pickle that the process is expected to send next, if any.
    """

    def __init__(self, number: int, place: str, config: WorkerConfig) -> None:
        """Start the process and have it open the model; raise StoppedEarly if it cannot be started."""
        super().__init__("A worker process", place, str(number))
        self.process = WorkerProcess(config)
        # one request after the other
        self._thread = ThreadPoolExecutor(1, "worker process")
        self._sent: list[Future[Data]] = []
        self.answer: Future[Data] | None = self._thread.submit(self._start)

    def begin(self, options: RunOptions) -> None:
        """Make the process, which has opened the model, ready for chunks."""
        self.is_open = True
        self._send("begin", options)

    def submit(self, chunk: Chunk) -> None:
        """See `Worker.submit`."""
        self.chunks[chunk.first] = chunk
        self._send("submit", chunk.to_bytes())

    def expect(self, method: str) -> None:
        """Ask for an answer."""
        self.answer = self._thread.submit(self._call, method)

    def receive(self, seconds: float | None = None) -> Any:
        """Return the answer that was asked for, once it is there.

        Raises:
            WorkerCrashed: the process ended. StoppedEarly: it was not started. TimeoutError: `seconds` passed.
            RuntimeError: an internal error.
        """
        assert self.answer is not None  # it was asked for
        wait([self.answer], seconds)
        # an earlier request's error is the cause of this answer's
        while self._sent and self._sent[0].done():
            self._sent.pop(0).result()
        data, self.answer = self.answer.result(0), None
        return pickle.loads(data)  # noqa: S301 (a worker of this run wrote it)

    def kill(self) -> None:
        """See `Worker.kill`; its own worker processes end with it."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End the process, which has nothing to do."""
        self._thread.shutdown(cancel_futures=True)
        self.process.close()

    def _send(self, method: str, argument: object) -> None:
        self._sent.append(self._thread.submit(self._call, method, argument))

    def _start(self) -> Data:
        self.process.wait_until_ready()
        return self._call("open")

    def _call(self, *request: object) -> Data:
        ((data,),), _ = self.process.call([request], lambda _, parts: parts)
        return data


class ProcessWorkerPool(WorkerPool[ProcessWorker]):
    """Starts and replaces worker processes, and collects their results."""

    def __init__(self, configs: Sequence[tuple[str, WorkerConfig]], print_message: Log) -> None:
        """Start nothing yet; `configs`: for each process its place, see `Worker.place`, and its configuration."""
        super().__init__(print_message)
        self._configs = tuple(configs)
        self._options: RunOptions | None = None

    def open(self) -> list[tuple[str, int]]:
        """Start all processes, and wait until they have opened the model.

        Returns:
            What `ChunkTask.open` returns, for each process.

        Raises:
            OpalError: one of them could not. StoppedEarly: one of them ended.
        """
        for number in range(len(self._configs)):
            self._start(number)
        opened: list[tuple[str, int]] = []
        for worker in self.workers:
            try:
                answer = worker.receive()
            except WorkerCrashed as crash:
                raise StoppedEarly(
                    f"a worker process {crash} while it opened the model; use fewer --processes"
                ) from None
            if isinstance(answer, OpalError):
                raise answer
            opened.append(answer)
        return opened

    def begin(self, options: RunOptions) -> None:
        """Make the processes of `open`, and all later ones, ready for the chunks of a run."""
        self._options = options
        for worker in self.workers:
            worker.begin(options)

    def maintain(self) -> None:
        """See `WorkerPool.maintain`."""
        running = {worker.key for worker in self.workers}
        for number in range(len(self._configs)):
            if str(number) not in running and self._failures[str(number)] < _MAX_STARTS:
                self._start(number)
        if not self.workers:
            raise StoppedEarly(f"worker processes fail: {self._last_failure}; fix this, then run again")

    def wait(self, seconds: float) -> list[Done]:
        """See `WorkerPool.wait`."""
        for worker in self.workers:
            if worker.chunks and worker.answer is None:
                worker.expect("collect")
        ready = wait([w.answer for w in self.workers if w.answer], seconds, FIRST_COMPLETED).done
        done: list[Done] = []
        for worker in list(self.workers):
            if worker.answer in ready:
                done += self._receive(worker)
            elif not ready and not worker.process.is_running():
                # it had nothing to answer, or a process that it forked holds its pipes open
                done += self._bury_ended(worker, worker.process.describe_end())
        return done

    def _receive(self, worker: ProcessWorker) -> list[Done]:
        try:
            answer = worker.receive()
        except WorkerCrashed as crash:
            return self._bury_ended(worker, str(crash))
        except StoppedEarly as error:
            answer = error
        if isinstance(answer, OpalError):
            self._count_failure(worker, str(answer))
            return self._bury(worker, f"cannot open the model: {answer}")
        if not worker.is_open:
            assert self._options is not None  # it replaces one of `open`
            worker.begin(self._options)
            return []
        return self._finish(worker, *answer)

    def close(self) -> list[StageTimes]:
        """End all processes, idle ones gracefully; return the idle ones' times."""
        idle = [worker for worker in self.workers if worker.is_open and not worker.chunks]
        times: list[StageTimes] = []
        for worker in idle:
            worker.expect("finish")
        for worker in idle:
            with contextlib.suppress(WorkerCrashed, TimeoutError):
                times.append(worker.receive(_EXIT_SECONDS))
                worker.process.close_stdin()
        for worker in self.workers:
            if worker.answer or worker.chunks:
                worker.kill()
            else:
                worker.close()
        self.workers = []
        return times

    def _start(self, number: int) -> None:
        self.workers.append(ProcessWorker(number, *self._configs[number]))

    def _bury_ended(self, worker: ProcessWorker, ending: str) -> list[Done]:
        if not worker.is_open:
            self._count_failure(worker, f"the process {ending} while it opened the model")
        return self._bury(worker, ending)
