"""The Ray driver's process as its parent sees it: start, send a job, receive records, stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from opal_deploy.cluster.connection import LOCAL, ClusterProgress, OpenCluster, is_reachable, no_connection
from opal_deploy.errors import OpalError, StoppedEarly, require
from opal_deploy.logs import Log
from opal_deploy.records.record import Record
from opal_deploy.workers.process import describe_exit_code, interpreter_flags

if TYPE_CHECKING:
    from opal_deploy.cluster.driver import Job
    from opal_deploy.parallel.chunk import Chunk

_EXIT_SECONDS = 30.0
# Ray lets its workers import from the folder of the driver's program
_CODE = (
    "import json, sys; sys.path[:], sys.argv[:1], descriptor = json.loads(sys.argv[1]); "
    "from opal_deploy.cluster.driver import main; main(descriptor)"
)


class DriverProcess:
    """A Ray driver for one run.

    Attributes:
        cluster: Ray's version and the size of the actors.
        progress: the nodes' work so far.
    """

    def __init__(self, address: str, cpus: int | None, log: Log) -> None:
        """Start the process and connect it, see `connection.connect`; raises what that and `plan_actors` raise."""
        require("ray", "ray", "--ray")
        self._address, self._log = address, log
        self._head = ""
        self.progress = ClusterProgress()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        with theirs:
            self._process = self._start(theirs.fileno())
        try:
            self._send((address, cpus))
            self.cluster: OpenCluster = self._receive()[1]
        except BaseException:
            self.close()
            raise
        self._head = self.cluster.head

    def _start(self, descriptor: int) -> subprocess.Popen[bytes]:
        arguments = json.dumps([sys.path, sys.argv[:1], descriptor])
        try:
            return subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-c", _CODE, arguments],
                stdin=subprocess.DEVNULL,
                # Ray prints pages about dead nodes and processes
                stdout=self._output,
                stderr=self._output,
                # Ctrl-C is for this process, which then ends the run in good order
                start_new_session=True,
                pass_fds=(descriptor,),
            )
        except OSError as error:
            self._connection.close()
            self._output.close()
            raise StoppedEarly(f"--ray {self._address}: its driver cannot be started ({error.strerror})") from None

    def compute(self, job: Job, chunks: Iterator[Chunk]) -> Iterator[list[Record]]:
        """Yield the records of one chunk after the other.

        Raises:
            StoppedEarly: the connection to the cluster was lost, or no actor can go on; all before were yielded.
            OpalError: a node cannot take part, or `chunks` raised it.
        """
        self._send(job)
        while True:
            kind, value = self._receive()
            if kind == "done":
                return
            if kind == "next":
                self._send(_next_chunk(chunks))
            else:
                result, self.progress = value
                yield result.load()

    def close(self) -> None:
        """End the process and with it all actors, in good order if it is healthy."""
        self._connection.close()
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # what a driver that was killed left of the Ray on this machine that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._output.close()

    def _send(self, message: object) -> None:
        # if the process ended, `_receive` finds out
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def _receive(self) -> tuple[str, Any]:
        """Return the next message that is not for the user."""
        while True:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError):
                raise self._describe_end() from None
            if kind == "error":
                raise value
            if kind == "bug":
                raise RuntimeError(f"in the Ray driver: {value}")
            if kind != "log":
                return kind, value
            self._log(value)

    def _describe_end(self) -> OpalError:
        """Return the error of a driver that ended without one."""
        ending = describe_exit_code(self._process.wait())
        if not self._head:
            return no_connection(self._address, f"Ray's driver {ending}: {self._read_last_line()}")
        if self._address != LOCAL and not is_reachable(self._head):
            lost = f"the cluster's head at {self._head} is gone; start it again"
        else:
            lost = f"Ray's processes on this machine ended (the driver {ending})"
            lost += "" if self._address == LOCAL else "; start Ray here again"
        return StoppedEarly(f"--ray {self._address}: {lost}")

    def _read_last_line(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")


def _next_chunk(chunks: Iterator[Chunk]) -> bytes | OpalError | None:
    try:
        chunk = next(chunks, None)
    except OpalError as error:
        # the driver raises it again after all records before it
        return error
    return None if chunk is None else chunk.to_bytes()


@contextmanager
def open_driver(address: str, cpus: int | None, log: Log) -> Iterator[DriverProcess]:
    """Yield a driver that is connected to the cluster while the block runs, see `DriverProcess`."""
    driver = DriverProcess(address, cpus, log)
    try:
        yield driver
    finally:
        driver.close()
