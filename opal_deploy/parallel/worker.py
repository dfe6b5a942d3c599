"""The main function of a worker process, which predicts chunks until its parent ends it.

Messages are pickles. The parent sends a `WorkerConfig`, the options of the run, and chunks; a message without bytes
ends the process. The process sends `Opened`, for each chunk the number of its first image and its result, and at its
end its `StageTimes`; or an OpalError if it cannot open the model, and the traceback of any other error.
"""

from __future__ import annotations

import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from PIL import Image

from opal_deploy.errors import OpalError
from opal_deploy.parallel.chunk import IN_FLIGHT, Chunk
from opal_deploy.parallel.predictor import ChunkPredictor
from opal_deploy.predict.executor import fewer_collections
from opal_deploy.run.run import RunOptions
from opal_deploy.runtime.devices import default_batch
from opal_deploy.runtime.session import Session
from opal_deploy.timing import StageTimer
from opal_deploy.workers.worker import end_with_the_parent


@dataclass(frozen=True)
class WorkerConfig:
    """The settings with which a process opens the model.

    Attributes:
        open_sessions: opens it; pickled.
        batch: images per forward pass; None: the device's default.
        pillow_limit: the parent's `Image.MAX_IMAGE_PIXELS`.
    """

    open_sessions: Callable[[], Sequence[Session]]
    batch: int | None
    pillow_limit: int | None


@dataclass(frozen=True)
class Opened:
    """A process has opened the model: the sessions' descriptions, and the images per forward pass."""

    description: str
    batch: int


def main(descriptor: int) -> None:
    """Run the process; `descriptor`: its end of the connection to its parent."""
    end_with_the_parent(descriptor)
    # a service manager sends it to all processes, and the parent ends this one in good order
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = _Worker(Connection(descriptor))
    try:
        with fewer_collections():
            worker.run()
    except EOFError:
        # the parent has ended
        pass
    except BaseException:
        worker.send(traceback.format_exc())


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._connection.send_bytes(data)

    def run(self) -> None:
        config: WorkerConfig = self._receive()
        Image.MAX_IMAGE_PIXELS = config.pillow_limit
        try:
            sessions = config.open_sessions()
            batch = config.batch or default_batch(sessions[0])
        except OpalError as error:
            self.send(error)
            return
        self.send(Opened("; ".join(session.description for session in sessions), batch))
        options: RunOptions = self._receive()
        timer = StageTimer()
        with ChunkPredictor(sessions, options, timer) as predictor, ThreadPoolExecutor(IN_FLIGHT) as threads:
            while data := self._connection.recv_bytes():
                threads.submit(self._predict, predictor, data)
        self.send(timer.read())

    def _predict(self, predictor: ChunkPredictor, data: bytes) -> None:
        try:
            chunk = Chunk.from_bytes(data)
            self.send((chunk.first, predictor.predict(chunk)))
        except BaseException:
            # the parent reports it, and ends this process
            self.send(traceback.format_exc())

    def _receive(self) -> Any:
        return pickle.loads(self._connection.recv_bytes())  # noqa: S301 (the parent wrote it)
