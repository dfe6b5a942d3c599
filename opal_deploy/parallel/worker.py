"""The task of a worker process of `infer --processes`: open the model, and predict chunks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, ClassVar

from opal_deploy.errors import OpalError
from opal_deploy.parallel.chunk import IN_FLIGHT, Chunk, ChunkResult
from opal_deploy.parallel.predictor import ChunkPredictor
from opal_deploy.predict.executor import fewer_collections
from opal_deploy.run.run import RunOptions
from opal_deploy.runtime.devices import default_batch
from opal_deploy.runtime.session import Session
from opal_deploy.timing import StageTimer, StageTimes
from opal_deploy.workers.worker import Response


class ChunkTask:
    """Opens the model once, then predicts chunks, several at a time.

    A request is the name of a method with its arguments. The response is the pickle of what the method returns: this
    process isolates decoders in processes of its own, so that no file can have taken it over.
    """

    # the model stays open: the process is not replaced for having grown
    in_use: ClassVar = True

    def __init__(self, open_sessions: Callable[[], Sequence[Session]], batch: int | None) -> None:
        """Open nothing yet; `batch`: images per forward pass, None for the device's default."""
        self._open_sessions, self._batch = open_sessions, batch

    def __call__(self, request: tuple[Any, ...], timer: StageTimer, claim: Callable[[int], None]) -> Response:
        """Call a method."""
        method, *arguments = request
        return {}, [pickle.dumps(getattr(self, method)(*arguments), pickle.HIGHEST_PROTOCOL)]

    def open(self) -> tuple[str, int] | OpalError:
        """Open the model; return the sessions' descriptions, and the images per forward pass."""
        self._stack, self._timer = ExitStack(), StageTimer()
        self._futures: dict[Future[ChunkResult | OpalError], int] = {}
        self._stack.enter_context(fewer_collections())
        try:
            self._sessions = self._open_sessions()
            batch = self._batch or default_batch(self._sessions[0])
        except OpalError as error:
            return error
        return "; ".join(session.description for session in self._sessions), batch

    def begin(self, options: RunOptions) -> None:
        """Get ready for the chunks of a run."""
        self._predictor = self._stack.enter_context(ChunkPredictor(self._sessions, options, self._timer))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(IN_FLIGHT))

    def submit(self, chunk: bytes) -> None:
        """Begin to predict a chunk."""
        loaded = Chunk.from_bytes(chunk)
        self._futures[self._threads.submit(self._predictor.predict, loaded)] = loaded.first

    def collect(self) -> tuple[int, ChunkResult | OpalError]:
        """Wait until one of the chunks is done; return the number of its first image, and its result."""
        done = wait(self._futures, return_when=FIRST_COMPLETED).done.pop()
        return self._futures.pop(done), done.result()

    def finish(self) -> StageTimes:
        """End everything that `begin` started, and return the times of the run."""
        self._stack.close()
        return self._timer.read()
