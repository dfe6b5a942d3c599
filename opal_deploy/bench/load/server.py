"""`opal-deploy serve` as a process of its own, with the memory of all its processes sampled while it runs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from opal_deploy.errors import StoppedEarly

MODEL_NAME = "model"
# small enough to be broken quickly
LIMITS = ("--max-body", "16", "--upload-timeout", "5", "--request-timeout", "30")
_START_SECONDS, _STOP_SECONDS = 120.0, 90.0


@dataclass
class Server:
    """A server that runs while its block does.

    Attributes:
        model: the file of the model.
        log: gets what the server prints.
        options: of `serve`, beside LIMITS.
        interval: seconds between samples.
        samples: seconds since 1970, and megabytes (10^6 bytes) that are resident in all processes together; memory that
            they share counts in each.
        cpu_seconds: of the server's processes that are still there.
    """

    model: Path
    log: Path
    options: Sequence[str] = ()
    interval: float = 1.0
    samples: list[tuple[float, float]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    seconds_to_start: float = 0.0

    def __enter__(self) -> Self:
        """Start the server, and wait until it listens.

        Raises:
            StoppedEarly: it ended, or took too long.
        """
        command = [sys.executable, "-m", "opal_deploy", "serve", f"{MODEL_NAME}={self.model}", "--port", "0"]
        started = time.monotonic()
        self._stream = self.log.open("wb")
        self._process = subprocess.Popen([*command, *LIMITS, *self.options], stdout=self._stream, stderr=self._stream)
        found = None
        while found is None:
            time.sleep(0.05)
            found = re.search(r"Listening on (http://\S+)", self.log.read_text(errors="replace"))
            if found is None and (self._process.poll() is not None or time.monotonic() - started > _START_SECONDS):
                self._end()
                raise StoppedEarly(f"serve did not start: {self.log.read_text(errors='replace')[-500:].strip()}")
        self.url, self.seconds_to_start = found[1], time.monotonic() - started
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._end()

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def terminate(self) -> float:
        """Send SIGTERM, and return when, in seconds since 1970."""
        self._process.send_signal(signal.SIGTERM)
        return time.time()

    def wait(self) -> tuple[int | None, float]:
        """Wait for the end; return the exit code, None if it did not come in time, and seconds since 1970."""
        try:
            return self._process.wait(_STOP_SECONDS), time.time()
        except subprocess.TimeoutExpired:
            return None, time.time()

    def _watch(self) -> None:
        root = psutil.Process(self._process.pid)
        while not self._done.wait(self.interval):
            resident, cpu = 0, 0.0
            try:
                tree = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in tree:
                try:
                    resident += process.memory_info().rss
                    times = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                cpu += times.user + times.system
            self.samples.append((time.time(), resident / 1e6))
            self.cpu_seconds = max(self.cpu_seconds, cpu)

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._stream.close()
