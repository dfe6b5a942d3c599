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
from typing import Any, BinaryIO, cast

import orjson

from opal_deploy.errors import StoppedEarly
from opal_deploy.workers.worker import LENGTH, POSITION, READY, WorkerConfig, create_shared_memory, map_shared_memory

# from its start until it takes requests; a machine that is loaded or reads its packages over a network takes its time
_START_SECONDS = 120.0
_EXIT_SECONDS = 2.0
# a response fits into the pipe, so that the worker need not wait until it is read; some systems keep their 64 KiB
_PIPE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 20

# not `-m`, and no module of multiprocessing: both would import the caller's main module, or write beside it
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main(int(sys.argv[2]))"


class WorkerCrashed(Exception):
    """The process ended during the request at `position` in its group; the text completes "the worker ..."."""

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

    def __init__(self, files: Sequence[int] = ()) -> None:
        """Start the process, which inherits the descriptors `files`; raise StoppedEarly if it cannot be started."""
        self._timeout: float | None = None
        self._deadline: float | None = None
        # of the request that the deadline is for
        self._seen_position, self._group_size = 0, 0
        # the position of the request that took too long
        self._overdue: int | None = None
        self._lock = threading.Lock()
        with ExitStack() as stack:
            try:
                self._stderr = stack.enter_context(tempfile.TemporaryFile())
                self._start(files)
            except (OSError, MemoryError) as error:
                raise _start_error(getattr(error, "strerror", None) or str(error)) from None
            # it is closed by `wait_until_ready` or `close`
            stack.pop_all()
        self._stdin = cast(BinaryIO, self._process.stdin)
        self._stdout = cast(BinaryIO, self._process.stdout)
        _enlarge_pipe(self._stdout)

    def _start(self, files: Sequence[int]) -> None:
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
                # numpy's libraries need only one thread
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        finally:
            os.close(descriptor)

    def wait_until_ready(self, config: WorkerConfig) -> None:
        """Send the configuration and wait until requests can be sent; raise StoppedEarly if that fails."""
        self._group_size, self._deadline = 1, time.monotonic() + _START_SECONDS
        ready: bytes | None = b""
        with contextlib.suppress(OSError):
            self._send(pickle.dumps(config))
            ready = self._stdout.read(len(READY))
        with self._stderr:
            if ready != READY:
                ending = self._describe_end()
                self._stderr.seek(0)
                lines = self._stderr.read().decode(errors="replace").split("\n")
                raise _start_error(next((line for line in reversed(lines) if line.strip()), f"it {ending}"))
        self._deadline = None

    def is_running(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def request(self, message: bytes, size: int, timeout: float | None) -> dict[str, Any]:
        """Send a group of requests and return the header of the response.

        The rest of the response is read with `read_into`; `finish_response` ends it.

        Args:
            message: pickle of the list of requests.
            size: number of requests.
            timeout: seconds per request, and after the last one until `finish_response`; None: no limit.

        Raises:
            WorkerCrashed, WorkerTimeout: there is no response, and the process cannot be used again.
        """
        POSITION.pack_into(self._position, 0, 0)
        with self._lock:
            self._timeout, self._seen_position, self._group_size = timeout, 0, size
            self._deadline = None if timeout is None else time.monotonic() + timeout
        return self._exchange(message)

    def grant(self, claim: Callable[[], None]) -> dict[str, Any]:
        """Wait for `claim`, with the time limit paused, and return the response's next header; raises as `request`."""
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
        header = bytearray(LENGTH.size)
        self.read_into(memoryview(header))
        (size,) = LENGTH.unpack(header)
        if size > _MAX_HEADER_BYTES:
            raise WorkerCrashed("sent an answer that makes no sense", self._read_position())
        header = bytearray(size)
        self.read_into(memoryview(header))
        try:
            response: dict[str, Any] = orjson.loads(header)
        except ValueError:
            raise WorkerCrashed("sent an answer that makes no sense", self._read_position()) from None
        return response

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the response; raises as `request`."""
        while target:
            count = self._stdout.readinto(target)  # type: ignore[attr-defined]
            if not count:
                raise self._failure()
            target = target[count:]

    def finish_response(self) -> bool:
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
                self._kill()
            elif position > self._seen_position and self._timeout is not None:
                self._seen_position, self._deadline = position, now + self._timeout
            elif now > self._deadline:
                self._deadline, self._overdue = None, position
                self._kill()

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
            self._kill()
            self._process.wait()
        # processes that it started
        self._kill()
        self._stdout.close()
        self._stderr.close()

    def _send(self, message: bytes) -> None:
        for part in (LENGTH.pack(len(message)), message):
            data = memoryview(part)
            while data:
                data = data[self._stdin.write(data) :]

    def _failure(self) -> WorkerCrashed | WorkerTimeout:
        ending = self._describe_end()
        with self._lock:
            if self._overdue is not None:
                return WorkerTimeout(self._overdue)
            return WorkerCrashed(ending, self._read_position())

    def _kill(self) -> None:
        """Kill the process and its children, which may hold its pipes open."""
        kill_group(self._process)

    def _read_position(self) -> int:
        (position,) = POSITION.unpack_from(self._position)
        return int(position)

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
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


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of `start_python` and the children in its process group."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    # it leads a process group, whose number stays in use as long as any process is in it
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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


def _start_error(reason: str) -> StoppedEarly:
    return StoppedEarly(f"a worker process cannot be started: {reason}; --no-isolate does without worker processes")
