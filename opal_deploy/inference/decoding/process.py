"""One decode worker's process as its parent sees it: started, asked, timed, ended."""

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
from typing import Any, BinaryIO, cast

from opal_deploy.errors import StoppedEarly
from opal_deploy.inference.decoding.worker import LENGTH, READY, WorkerConfig

# from its start until it can decode; a machine that is loaded or reads its packages over a network takes its time
_START_SECONDS = 120.0
_END_SECONDS = 2.0
# an answer fits into the pipe, so that the child need not wait until it is taken; systems that refuse keep their 64 KiB
_PIPE_BYTES = 1 << 20
_LONGEST_HEADER = 1 << 20

# not `-m`, and no module of multiprocessing: both would import the caller's main module, or write beside it
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from opal_deploy.inference.decoding.worker import main; main()"
)


class Crashed(Exception):
    """The process ended in the middle of a picture; the text says how, completing "its decoder ..."."""


class TimedOut(Exception):
    """The process was ended because a picture took too long."""


class DecodeProcess:
    """A process that prepares one picture at a time. Used by one thread at a time; any may call `stop_if_overdue`."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            StoppedEarly: it cannot be started.
        """
        self._deadline: float | None = None
        self._overdue = False
        self._lock = threading.Lock()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `prepare` or `end`)
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-c", _CODE, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                bufsize=0,
                # one thread is all that it needs of numpy's libraries
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                # Ctrl-C goes to everybody in the terminal's foreground, and would end it while it starts
                start_new_session=True,
            )
        except OSError as error:
            self._complaints.close()
            raise _cannot_start(error.strerror or str(error)) from None
        self._requests = cast(BinaryIO, self._process.stdin)
        self._answers = cast(BinaryIO, self._process.stdout)
        _widen(self._answers)

    def prepare(self, config: WorkerConfig) -> None:
        """Wait until it can be asked. Raises StoppedEarly: it never could."""
        self._deadline = time.monotonic() + _START_SECONDS
        ready: bytes | None = b""
        with contextlib.suppress(OSError):
            self._send(pickle.dumps(config))
            ready = self._answers.read(len(READY))
        with self._complaints:
            if ready != READY:
                how = self._how_it_ended()
                self._complaints.seek(0)
                lines = self._complaints.read().decode(errors="replace").split("\n")
                raise _cannot_start(next((line for line in reversed(lines) if line.strip()), f"it {how}"))
        self._deadline = None

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def ask(self, message: bytes, seconds: float | None) -> dict[str, Any]:
        """Send a request and return its answer's header; what follows is taken with `read_into`, then `answered`.

        Args:
            message: what `process` unpickles. seconds: until `answered` has to be called.

        Raises:
            Crashed, TimedOut: there will be no answer, here or from `read_into`; the process is of no more use.
        """
        if seconds is not None:
            self._deadline = time.monotonic() + seconds
        try:
            self._send(message)
        except OSError:
            raise self._failure() from None
        header = bytearray(LENGTH.size)
        self.read_into(memoryview(header))
        (size,) = LENGTH.unpack(header)
        if size > _LONGEST_HEADER:
            raise Crashed("sent an answer that makes no sense")
        header = bytearray(size)
        self.read_into(memoryview(header))
        try:
            answer: dict[str, Any] = json.loads(header)
        except ValueError:
            raise Crashed("sent an answer that makes no sense") from None
        return answer

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with what the answer holds next. Raises as `ask`."""
        while target:
            count = self._answers.readinto(target)  # type: ignore[attr-defined]
            if not count:
                raise self._failure()
            target = target[count:]

    def answered(self) -> bool:
        """Nothing is asked any more; False if its time was up in the same moment, and it is of no more use."""
        with self._lock:
            self._deadline = None
            return not self._overdue

    def stop_if_overdue(self, now: float) -> None:
        """End it if what it was asked takes too long; whoever waits for it is told."""
        with self._lock:
            if self._deadline is not None and now > self._deadline:
                self._deadline, self._overdue = None, True
                self._process.kill()

    def hang_up(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(OSError):
            self._requests.close()

    def end(self) -> None:
        """End it, at once if it does not end by itself."""
        self.hang_up()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._complaints.close()

    def _send(self, message: bytes) -> None:
        data = memoryview(LENGTH.pack(len(message)) + message)
        while data:
            data = data[self._requests.write(data) :]

    def _failure(self) -> Crashed | TimedOut:
        how = self._how_it_ended()
        with self._lock:
            return TimedOut() if self._overdue else Crashed(how)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return "stopped answering"
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"


def _flags() -> list[str]:
    """As this interpreter was started, as far as names of files depend on it; -P: no module of the current folder."""
    return ["-P", *(["-X", "utf8"] if sys.flags.utf8_mode else [])]


def _widen(pipe: BinaryIO) -> None:
    try:
        import fcntl

        fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # type: ignore[attr-defined,unused-ignore]
    except (ImportError, AttributeError, OSError):
        # not Linux, or the user's share of pipe memory is used up
        pass


def _cannot_start(reason: str) -> StoppedEarly:
    return StoppedEarly(f"a decode worker cannot be started: {reason}; --no-isolate decodes without worker processes")
