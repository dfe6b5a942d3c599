"""A pool of worker processes in which a crash or a hang costs one call, and memory that they share.

`multiprocessing.Pool` loses the call of a worker that dies, a dead worker breaks a whole `ProcessPoolExecutor`, and
neither can end a call that takes too long. Here each process has a connection of its own, so that it is killed and
replaced alone. Processes start from a fresh interpreter that never imports the caller's main module, run functions of
this package only, and end with the caller, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, Self, TypeVar

from opal_deploy.errors import OpalError, StoppedEarly
from opal_deploy.timing import StageTime, StageTimer

P = ParamSpec("P")
T = TypeVar("T")

# from its start until it takes calls: a loaded machine, or one that reads packages over a network, takes its time
_START_SECONDS = 120.0
_EXIT_SECONDS = 2.0
# the libraries of a worker need one thread each
_ENVIRONMENT = dict.fromkeys(["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"], "1")
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from opal_deploy.worker_pool import main; main()"


class WorkerCrashed(Exception):
    """The process ended during the call; the message completes "its process ..."."""


class WorkerTimeout(Exception):
    """The process was killed because the call exceeded the time limit."""


class WorkerPool:
    """At most `workers` processes, started when a call needs one; every method may be called from any thread.

    Args:
        workers: maximum number of processes.
        timeout: seconds per call; None: no limit.
        files: file descriptors that the processes inherit under the same numbers.
    """

    def __init__(self, workers: int, timeout: float | None = None, files: Sequence[int] = ()) -> None:
        self._timeout, self._files = timeout, tuple(files)
        # the process used last comes first, so that a short run starts few; None: to be started
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._workers = workers
        self._busy: set[_Process] = set()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a function of this package, called in a process; wait until one is free.

        Raises:
            WorkerCrashed: the process ended during the call. WorkerTimeout: the call took too long.
            StoppedEarly: no process can be started.
            Exception: whatever the function raised.
        """
        process = self._idle.get()
        try:
            # a process that ended between two calls is no call's fault
            if process is None or process.popen.poll() is not None:
                process = _start_process(self._files)
            self._busy.add(process)
            succeeded, result = process.call((function, args, kwargs), self._timeout)
        except BaseException:
            if process is not None:
                self._busy.discard(process)
                process.close()
            process = None
            raise
        finally:
            if process is not None:
                self._busy.discard(process)
            self._idle.put(process)
        if succeeded:
            return result  # type: ignore[no-any-return]
        raise result

    def call_timed(self, timer: StageTimer, function: Callable[..., T], *args: object) -> T:
        """Call a function as `call` does, with a timer of its process before `args`; add its times to `timer`.

        A call whose process crashes is repeated once: the system may have ended the process for lack of memory.
        """
        try:
            result, stages = self.call(_call_timed, function, args, enabled=timer.enabled)
        except WorkerCrashed:
            result, stages = self.call(_call_timed, function, args, enabled=timer.enabled)
        timer.add(stages)
        return result

    def interrupt(self) -> None:
        """Send SIGTERM to the processes that run calls; a function may handle it, else its process ends."""
        for process in list(self._busy):
            process.popen.terminate()

    def close(self) -> None:
        """Wait for the calls in flight, and end the processes."""
        processes = [self._idle.get() for _ in range(self._workers)]
        for process in processes:
            if process is not None:
                process.close()
            self._idle.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _call_timed(
    function: Callable[..., T], args: Sequence[object], *, enabled: bool
) -> tuple[T, tuple[StageTime, ...]]:
    timer = StageTimer(enabled=enabled)
    return function(timer, *args), timer.read().stages


class _Process:
    """A worker process, for one call at a time."""

    def __init__(self, files: Sequence[int]) -> None:
        """Start a process that imports nothing from the current folder; raise OSError or MemoryError if that fails."""
        flags = ["-P", *(["-X", "utf8"] if sys.flags.utf8_mode else [])]
        self._connection, worker_end = Pipe()
        with worker_end, tempfile.TemporaryFile() as errors:
            self.popen = subprocess.Popen(
                [sys.executable, *flags, "-c", _CODE, json.dumps(sys.path), str(worker_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(worker_end.fileno(), *files),
                env=os.environ | _ENVIRONMENT,
                # Ctrl-C goes to all foreground processes, and is the caller's to handle
                start_new_session=True,
            )
            worker_end.close()
            try:
                self._receive(_START_SECONDS)
            except (WorkerCrashed, WorkerTimeout) as failure:
                self.close()
                errors.seek(0)
                lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
                raise OSError(0, lines[-1] if lines else f"it {failure}") from None

    def call(self, request: object, timeout: float | None) -> tuple[bool, Any]:
        """Return whether the function succeeded, and its result or exception; raise WorkerCrashed or WorkerTimeout."""
        try:
            self._connection.send(request)
        except OSError:
            raise WorkerCrashed(self._describe_end()) from None
        return self._receive(timeout)  # type: ignore[no-any-return]

    def _receive(self, timeout: float | None) -> Any:
        try:
            if not self._connection.poll(timeout):
                raise WorkerTimeout(f"took more than {timeout:g} s")
            return self._connection.recv()
        except (EOFError, OSError):
            raise WorkerCrashed(self._describe_end()) from None

    def _describe_end(self) -> str:
        """Return how the process ended, completing "it ..."."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_EXIT_SECONDS)
        code, names = self.popen.returncode or 0, {-number: number.name for number in signal.Signals}
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {names.get(code, f'signal {-code}')}"

    def close(self) -> None:
        """End the process and all that it started."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


def _start_process(files: Sequence[int]) -> _Process:
    try:
        return _Process(files)
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StoppedEarly(
            f"a worker process cannot be started: {reason}; --no-isolate needs no worker processes"
        ) from None


def main() -> None:
    """Run a worker process: answer calls until the caller closes the connection."""
    connection = Connection(int(sys.argv[2]))
    # a copy of this process, made by a library, must not keep the connection open after its end
    os.register_at_fork(after_in_child=connection.close)
    _end_with_the_caller(connection.fileno())
    connection.send(None)
    # from here on, drop what libraries print about odd files
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, object] = True, function(*args, **kwargs)
        except Exception as error:
            ours = isinstance(error, OpalError | MemoryError)
            answer = False, error.with_traceback(None) if ours else RuntimeError(traceback.format_exc())
        connection.send(answer)


def _end_with_the_caller(descriptor: int) -> None:
    """End this process and what it started when the other end of the connection closes, whatever runs meanwhile."""

    def watch() -> None:
        hangup = select.poll()
        hangup.register(descriptor, 0)
        hangup.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def create_shared_memory(size: int) -> int:
    """Return the descriptor of `size` bytes of zeros, for `files` and `map_shared_memory`; raise StoppedEarly.

    Pages are allocated when they are first written. Not `multiprocessing.shared_memory`, whose /dev/shm has 64 MB in a
    container: a batch that does not fit there ends the process with SIGBUS.
    """
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("opal-deploy")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
    except OSError as error:
        raise StoppedEarly(
            f"{-(-size >> 20)} MiB of memory to share with worker processes cannot be had ({error.strerror or error}); "
            "see ulimit -f and ulimit -n, use a smaller --batch, or --no-isolate"
        ) from None
    return descriptor


def map_shared_memory(descriptor: int, size: int) -> mmap.mmap:
    """Return the memory of `create_shared_memory`; raise MemoryError if it does not fit."""
    try:
        return mmap.mmap(descriptor, size)
    except OSError as error:
        raise MemoryError(f"{-(-size >> 20)} MiB cannot be mapped ({error.strerror})") from None
