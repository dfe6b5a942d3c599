"""A worker process as its parent sees it: start, send a request, read the response, stop.

Python's own process pools do not fit: a worker that crashes breaks the whole `ProcessPoolExecutor`, neither it nor
`multiprocessing.Pool` can stop one task that takes too long, and both unpickle what a worker sends.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

import numpy as np
import orjson

from opal_deploy.errors import StoppedEarly
from opal_deploy.preprocess.decode import no_claim
from opal_deploy.timing import NO_OP_TIMER, StageTimer
from opal_deploy.workers.worker import (
    LENGTH,
    POSITION,
    READY,
    Data,
    WorkerConfig,
    create_shared_memory,
    map_shared_memory,
)

T = TypeVar("T")
# builds a request's result from the task's response: JSON, and bytes
Reader: TypeAlias = Callable[[dict[str, Any], Sequence[Data]], T]
# from its start until it takes requests; a machine that is loaded or reads its packages over a network takes its time
_START_SECONDS = 120.0
_EXIT_SECONDS = 2.0
# a response fits into the pipe, so that the worker need not wait until it is read; some systems keep their 64 KiB
_PIPE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 20

# not `-m`, and no module of multiprocessing: both would import the caller's main module, or write next to it
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(int(sys.argv[2]))"


class WorkerCrashed(Exception):
    """The process ended during the request at `position` in its group; the message completes "the worker ..."."""

    def __init__(self, ending: str, position: int = 0) -> None:
        super().__init__(ending)
        self.position = position


class WorkerTimeout(Exception):
    """The process was killed because the request at `position` in its group took too long."""

    def __init__(self, position: int = 0) -> None:
        super().__init__(position)
        self.position = position


class WorkerProcess:
    """A process that answers one group of requests at a time, for one thread at a time."""

    def __init__(self, config: WorkerConfig, files: Sequence[int] = ()) -> None:
        """Start the process, which inherits the descriptors `files`; raise StoppedEarly if it cannot be started."""
        self._config = config
        self._timeout: float | None = None
        self._deadline: float | None = None
        # of the request that the deadline is for
        self._seen_position, self._group_size = 0, 0
        # the position of the request that took too long
        self._overdue: int | None = None
        self._lock = threading.Lock()
        with ExitStack() as stack:
            try:
                self._stderr = None if config.predicts else stack.enter_context(tempfile.TemporaryFile())
                self._start(files)
            except (OSError, MemoryError) as error:
                raise self._start_error(getattr(error, "strerror", None) or str(error)) from None
            # it is closed by `wait_until_ready` or `close`
            stack.pop_all()
        self._stdin = cast(BinaryIO, self._process.stdin)
        self._stdout = cast(BinaryIO, self._process.stdout)
        _enlarge_pipe(self._stdout)

    def _start(self, files: Sequence[int]) -> None:
        # numpy's libraries need only one thread
        threads = dict.fromkeys(["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"], "1")
        descriptor = create_shared_memory(POSITION.size)
        try:
            self._position = map_shared_memory(descriptor, POSITION.size)
            self._process = start_python(
                "opal_deploy.workers.worker",
                descriptor,
                files,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env=None if self._config.predicts else os.environ | threads,
            )
        finally:
            os.close(descriptor)

    def wait_until_ready(self) -> None:
        """Send the configuration and wait until the process takes requests; raise StoppedEarly if that fails."""
        self._group_size, self._deadline = 1, time.monotonic() + _START_SECONDS
        ready: bytes | None = b""
        with contextlib.suppress(OSError):
            self._send(pickle.dumps(self._config))
            ready = self._stdout.read(len(READY))
        with self._stderr or contextlib.nullcontext():
            if ready != READY:
                raise self._start_error(self._read_last_line() or f"it {self.describe_end()}")
        self._deadline = None

    def _read_last_line(self) -> str:
        """Wait for the end of a process that did not start, and return the last line that it printed."""
        self.describe_end()
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def _start_error(self, reason: str) -> StoppedEarly:
        advice = "use fewer --processes" if self._config.predicts else "--no-isolate needs no worker processes"
        return StoppedEarly(f"a worker process cannot be started: {reason}; {advice}")

    def is_running(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def call(
        self,
        requests: Sequence[object],
        read: Reader[T],
        *,
        timeout: float | None = None,
        claim: Callable[[int], None] = no_claim,
        timer: StageTimer = NO_OP_TIMER,
    ) -> tuple[list[T], bool]:
        """Have a group of requests answered.

        Args:
            requests: are pickled for the task.
            read: builds a request's result, see `Reader`. If it raises an ArithmeticError, LookupError, TypeError or
                ValueError, the process counts as crashed.
            timeout: seconds per request, and for reading the rest after the last one; None: no limit.
            claim: waits until so many pixels may be decoded; called when the task claims them.
            timer: receives the times of the task's stages.

        Returns:
            The results in order, and whether the process can be used again.

        Raises:
            WorkerCrashed, WorkerTimeout: there is no response, and the process cannot be used again.
            RuntimeError: the task raised an exception.
        """
        header = self._request(pickle.dumps(requests, pickle.HIGHEST_PROTOCOL), len(requests), timeout)
        try:
            while "claim" in header:
                header = self._grant(partial(claim, int(header["claim"])))
            results: list[T] = []
            for _, response in zip(requests, header["responses"], strict=True):
                if "traceback" in response:
                    raise RuntimeError(f"in a worker process: {response['traceback']}")
                results.append(read(response, [self._read_bytes(int(size)) for size in response["sizes"]]))
            for stage, wall, cpu, calls in header["times"]:
                timer.add(stage, wall, cpu, calls)
            return results, self._finish_response() and not header["retire"]
        except (ArithmeticError, LookupError, TypeError, ValueError):
            # a malicious file may have taken over the process
            raise WorkerCrashed("sent an answer that makes no sense") from None

    def _request(self, message: bytes, size: int, timeout: float | None) -> dict[str, Any]:
        """Send a pickled list of `size` requests and return the header of the response; raises as `call`."""
        POSITION.pack_into(self._position, 0, 0)
        with self._lock:
            self._timeout, self._seen_position, self._group_size = timeout, 0, size
            self._deadline = None if timeout is None else time.monotonic() + timeout
        return self._exchange(message)

    def _grant(self, claim: Callable[[], None]) -> dict[str, Any]:
        """Wait for `claim`, with the time limit paused, and return the response's next header; raises as `call`."""
        with self._lock:
            remaining = None if self._deadline is None else self._deadline - time.monotonic()
            self._deadline = None
        claim()
        if remaining is not None:
            with self._lock:
                self._deadline = time.monotonic() + remaining
        return self._exchange(b"")

    def _exchange(self, message: bytes) -> dict[str, Any]:
        """Send a message and return the header of the response."""
        try:
            self._send(message)
        except OSError:
            raise self._failure() from None
        (size,) = LENGTH.unpack(self._read_bytes(LENGTH.size))
        if size > _MAX_HEADER_BYTES:
            raise WorkerCrashed("sent an answer that makes no sense", self._read_position())
        try:
            response: dict[str, Any] = orjson.loads(self._read_bytes(size))
        except ValueError:
            raise WorkerCrashed("sent an answer that makes no sense", self._read_position()) from None
        return response

    def _read_bytes(self, size: int) -> memoryview:
        """Return the next bytes of the response; raises as `call`."""
        try:
            # not filled with zeros first
            data = np.empty(size, np.uint8).data
        except MemoryError:
            # so much that only a process that was taken over claims to send it
            raise WorkerCrashed("sent an answer that makes no sense", self._read_position()) from None
        target = data
        while target:
            count = self._stdout.readinto(target)  # type: ignore[attr-defined]
            if not count:
                raise self._failure()
            target = target[count:]
        return data

    def _finish_response(self) -> bool:
        """End the time limit; return False if it has just passed and the process was killed."""
        with self._lock:
            self._deadline = None
            return self._overdue is None

    def extend_limit(self, seconds: float) -> None:
        """Give the request in flight more time."""
        with self._lock:
            if self._deadline is not None:
                self._deadline += seconds

    def kill_if_overdue(self, now: float) -> None:
        """Kill the process if its request takes too long; the waiting thread gets a WorkerTimeout."""
        with self._lock:
            if self._deadline is None:
                return
            position = self._read_position()
            if not self._seen_position <= position < self._group_size:
                # a decoder overwrote it, so the request is unknown: treated as a crash, which is retried
                self._deadline = None
                self.kill()
            elif position > self._seen_position and self._timeout is not None:
                self._seen_position, self._deadline = position, now + self._timeout
            elif now > self._deadline:
                self._deadline, self._overdue = None, position
                self.kill()

    def close_stdin(self) -> None:
        """Close the process's stdin, so that it ends."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self) -> None:
        """End the process; kill it if it does not end soon."""
        self.close_stdin()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        # processes that it started
        self.kill()
        self._stdout.close()
        if self._stderr is not None:
            self._stderr.close()

    def _send(self, message: bytes) -> None:
        for part in (LENGTH.pack(len(message)), message):
            data = memoryview(part)
            while data:
                data = data[self._stdin.write(data) :]

    def _failure(self) -> WorkerCrashed | WorkerTimeout:
        ending = self.describe_end()
        with self._lock:
            if self._overdue is not None:
                return WorkerTimeout(self._overdue)
            return WorkerCrashed(ending, self._read_position())

    def kill(self) -> None:
        """Kill the process and its children, which may hold its pipes open; a call in flight raises WorkerCrashed."""
        if not hasattr(os, "killpg"):
            self._process.kill()
            return
        # it leads a process group, whose number stays in use as long as any process is in it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read_position(self) -> int:
        (position,) = POSITION.unpack_from(self._position)
        return int(position)

    def describe_end(self) -> str:
        """Return how the process ended (or is ending), completing "the worker ..."."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
            return "stopped answering"
        return describe_exit_code(code)


def start_python(module: str, descriptor: int, files: Sequence[int] = (), **options: Any) -> subprocess.Popen[bytes]:
    """Start a Python process that calls `main(descriptor)` of a module.

    Args:
        module: its full name.
        descriptor, files: descriptors that the process inherits, under the same numbers.
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        [sys.executable, *interpreter_flags(), "-c", _CODE.format(module), json.dumps(sys.path), str(descriptor)],
        # Ctrl-C goes to all foreground processes, and would end this one while it starts
        start_new_session=True,
        pass_fds=(descriptor, *files),
        **options,
    )


def describe_exit_code(code: int) -> str:
    """Return how a process ended, completing "it ..."; `code` is negative for a signal, as `subprocess` has it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def interpreter_flags() -> list[str]:
    """Return this interpreter's flags for file names; -P: import nothing from the current folder."""
    return ["-P", *(["-X", "utf8"] if sys.flags.utf8_mode else [])]


def _enlarge_pipe(pipe: BinaryIO) -> None:
    try:
        import fcntl

        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # type: ignore[attr-defined,unused-ignore]
    except (ImportError, AttributeError, OSError):
        # not Linux, or the user's share of pipe memory is used up
        pass
