"""Files that wait for a GPU: handed out in batches, with a limit on what their bytes take."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from opal_deploy.pipeline.decoding.prepare import Prepared, Request
from opal_deploy.preprocess.gpu import Jpeg

# of all files that wait or are being decoded; one larger file alone is always taken
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Job:
    """A file, and who waits for its picture."""

    request: Request
    file: Jpeg
    sha256: str | None
    future: Future[Prepared]


class WaitingFiles:
    """A queue between readers and GPUs; every method may be called from any thread."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        """Add a file; waits while others take up the room. Once it is closed the file is dropped."""
        size = len(job.file.data)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._bytes or self._bytes + size <= self._most_bytes)
            if self._closed:
                job.future.cancel()
                return
            self._bytes += size
            self._jobs.append(job)
            self._changed.notify_all()

    def take(self, most_files: int, most_pixels: int) -> list[Job]:
        """What waits, up to the limits but at least one; waits for it; empty once it is closed.

        Whoever takes files calls `done` for them.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._jobs)
            if self._closed:
                return []
            jobs = [self._jobs.popleft()]
            pixels = jobs[0].file.pixels
            while self._jobs and len(jobs) < most_files and pixels + self._jobs[0].file.pixels <= most_pixels:
                pixels += self._jobs[0].file.pixels
                jobs.append(self._jobs.popleft())
            return jobs

    def done(self, jobs: list[Job]) -> None:
        """The files' bytes are needed no longer."""
        with self._changed:
            self._bytes -= sum(len(job.file.data) for job in jobs)
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what waits; whoever waits for room or files goes on."""
        with self._changed:
            self._closed = True
            for job in self._jobs:
                job.future.cancel()
            self._jobs.clear()
            self._changed.notify_all()
