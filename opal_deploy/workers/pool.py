"""Worker processes that are lent to the threads that need one.

A process is started when it is first needed, and replaced when it has ended, was killed, or has grown too large. All
end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from PIL import Image

from opal_deploy.errors import StoppedEarly
from opal_deploy.preprocess.decode import no_claim
from opal_deploy.timing import NO_OP_TIMER, StageTimer
from opal_deploy.workers.process import Reader, WorkerCrashed, WorkerProcess, WorkerTimeout
from opal_deploy.workers.worker import Task, WorkerConfig

T = TypeVar("T")
# seconds between two checks of the time limits; if a check is later than this, the whole process was stopped
_WATCH_SECONDS, _STOPPED_SECONDS = 0.1, 1.0
# a system short of memory kills processes that did nothing wrong: the second crash is the request's fault, and the run
# ends only where one process after the other does not start
_MAX_ATTEMPTS, _MAX_STARTS = 2, 3


class ProcessPool:
    """A number of worker processes of one task; every method but `close` may be called from any thread."""

    def __init__(
        self,
        workers: int,
        task: Task,
        timeout: float | None,
        timer: StageTimer = NO_OP_TIMER,
        files: Sequence[int] = (),
    ) -> None:
        """Start nothing yet.

        Args:
            workers: maximum number of processes.
            task: answers the requests.
            timeout: seconds per request; None: no limit.
            timer: receives the times of the task's stages, excluding transfers between processes.
            files: descriptors that the processes inherit, under the same numbers.
        """
        self._timeout, self._timer, self._files = timeout, timer, tuple(files)
        self._config = WorkerConfig(task, timed=timer.enabled, pillow_limit=Image.MAX_IMAGE_PIXELS)
        # the last one used comes first, so that a short run starts no more processes than it needs; None: to be started
        self._idle: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._processes: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def call(self, request: object, read: Reader[T], claim: Callable[[int], None] = no_claim) -> T:
        """Have one request answered, see `call_group`; raise WorkerCrashed or WorkerTimeout if that failed."""
        (result,) = self.call_group([request], read, claim)
        if isinstance(result, WorkerCrashed | WorkerTimeout):
            raise result
        return result

    def call_group(
        self, requests: Sequence[object], read: Reader[T], claim: Callable[[int], None] = no_claim
    ) -> list[T | WorkerCrashed | WorkerTimeout]:
        """Have some requests answered by one process; wait while all processes are in use.

        A request whose process ended is tried a second time, since processes are also killed from outside; the other
        requests of its group are answered in any case.

        Args:
            requests, read, claim: see `WorkerProcess.call`.

        Returns:
            The result of each request, in order, or the exception that its process ended with.

        Raises:
            StoppedEarly: no process can be started. RuntimeError: the task raised an exception.
        """
        results: dict[int, T | WorkerCrashed | WorkerTimeout] = {}
        crashes: Counter[int] = Counter()
        groups = [list(range(len(requests)))]
        while groups:
            group = groups.pop(0)
            try:
                results.update(self._call_once({n: requests[n] for n in group}, read, claim))
            except (WorkerCrashed, WorkerTimeout) as failure:
                # a malicious file may have written any number
                culprit = group.pop(min(failure.position, len(group) - 1))
                crashes[culprit] += 1
                if isinstance(failure, WorkerTimeout):
                    results[culprit] = failure
                elif crashes[culprit] == _MAX_ATTEMPTS:
                    results[culprit] = WorkerCrashed(f"{failure}, each of {_MAX_ATTEMPTS} times")
                else:
                    groups.append([culprit])
                if group:
                    groups.insert(0, group)
        return [results[n] for n in range(len(requests))]

    def _call_once(self, requests: dict[int, object], read: Reader[T], claim: Callable[[int], None]) -> dict[int, T]:
        """Return the results of some requests by position."""
        process, reusable = self._idle.get(), False
        try:
            # a process that ended between two requests is not a request's fault
            if process is None or not process.is_running():
                self._close_process(process)
                process = self._start_process()
            results, reusable = process.call(
                list(requests.values()), read, timeout=self._timeout, claim=claim, timer=self._timer
            )
            return dict(zip(requests, results, strict=True))
        finally:
            if not reusable:
                self._close_process(process)
            self._idle.put(process if reusable else None)

    def close(self) -> None:
        """End the processes; no call may be in flight."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        with self._lock:
            processes = list(self._processes)
        # all begin to end before any is waited for
        for process in processes:
            process.close_stdin()
        for process in processes:
            self._close_process(process)

    def _start_process(self) -> WorkerProcess:
        for _ in range(_MAX_STARTS - 1):
            with contextlib.suppress(StoppedEarly):
                return self._start_once()
        return self._start_once()

    def _start_once(self) -> WorkerProcess:
        process = WorkerProcess(self._config, self._files)
        with self._lock:
            self._processes.add(process)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._kill_overdue, name="time-limit", daemon=True)
                self._watcher.start()
        try:
            process.wait_until_ready()
        except BaseException:
            self._close_process(process)
            raise
        return process

    def _close_process(self, process: WorkerProcess | None) -> None:
        if process is not None:
            process.close()
            with self._lock:
                self._processes.discard(process)

    def _kill_overdue(self) -> None:
        checked = time.monotonic()
        while not self._closed.wait(_WATCH_SECONDS):
            now = time.monotonic()
            late, checked = now - checked - _WATCH_SECONDS, now
            with self._lock:
                processes = list(self._processes)
            for process in processes:
                # by Ctrl-Z, a paused container or a cluster's scheduler, which stop the workers, too
                if late > _STOPPED_SECONDS:
                    process.extend_limit(late)
                else:
                    process.kill_if_overdue(now)
