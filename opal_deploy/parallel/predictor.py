"""The work of every worker: the executor of one machine, which predicts the chunks of a run.

It keeps its decode and drawing processes from one chunk to the next. Two chunks are in flight at a time, each in its
own thread, so that the images of one are decoded while the last batches of the other are predicted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from opal_deploy.errors import OpalError
from opal_deploy.options import RuntimeName
from opal_deploy.parallel.chunk import IN_FLIGHT, Chunk, ChunkResult
from opal_deploy.predict.decoder_pool import DecoderPool
from opal_deploy.predict.executor import predict_batches, release_each
from opal_deploy.records.record import Record
from opal_deploy.run.drawing import Drawer
from opal_deploy.run.run import RunOptions
from opal_deploy.run.sheets import with_attention
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import Session, pinned
from opal_deploy.timing import NO_OP_TIMER, StageTimer


@dataclass(frozen=True)
class SessionOptions:
    """How a worker opens the model.

    Attributes:
        device: as for `open_sessions`.
        threads: CPU threads of the runtime.
        runtime, cuda_graphs: as for `open_sessions`.
        heatmap: the outputs have attention maps.
    """

    device: str
    threads: int
    runtime: RuntimeName
    cuda_graphs: bool
    heatmap: bool

    def open(self, model: Path) -> list[Session]:
        """Open the model; raises as `open_sessions`, and UsageError if it has no attention maps to show."""
        sessions = open_sessions(
            model, device=self.device, threads=self.threads, cuda_graphs=self.cuda_graphs, runtime=self.runtime
        )
        return with_attention(sessions, model.name) if self.heatmap else sessions


class ChunkPredictor:
    """Predicts and draws chunks with the sessions of this process; a context manager."""

    def __init__(self, sessions: Sequence[Session], options: RunOptions, timer: StageTimer = NO_OP_TIMER) -> None:
        """Start nothing yet; `sessions` are of one model, and `timer` receives the times of the stages."""
        self._sessions, self._options, self._timer = sessions, options, timer
        self._inference = options.inference_for_drawing
        self._stack = ExitStack()
        self._messages: list[str] = []
        self._lock = threading.Lock()
        self._decoders: DecoderPool | None = None
        self._drawer: Drawer | None = None

    def __enter__(self) -> Self:
        options = self._options
        if options.draws:
            drawer = Drawer(
                options.drawings_out, options.report, options.sheets, self._inference, thumbnails={}, timer=self._timer
            )
            self._drawer = self._stack.enter_context(drawer)
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def predict(self, chunk: Chunk) -> ChunkResult | OpalError:
        """Return one record per image of a chunk; after an error the predictor must not be used again.

        Called from at most `IN_FLIGHT` threads at a time.
        """
        try:
            records = self._predict(chunk)
        except OpalError as error:
            return error
        with self._lock:
            messages, self._messages = tuple(self._messages), []
        return ChunkResult.build(records, messages)

    def _predict(self, chunk: Chunk) -> list[Record]:
        batches = predict_batches(
            chunk.requests,
            self._sessions,
            self._inference,
            self._timer,
            self._messages.append,
            self._share_decoders,
            first=chunk.first,
        )
        with closing(batches):
            results = release_each(batches)
            if self._drawer is not None:
                return list(self._drawer.draw_all(results, chunk.first))
            return [result.record for result in results]

    def _share_decoders(self, *arguments: Any, slots: int, rows: int) -> AbstractContextManager[DecoderPool]:
        with self._lock:
            if self._decoders is None:
                pool = self._stack.enter_context(DecoderPool(*arguments, slots=IN_FLIGHT * slots, rows=rows))
                for session in self._sessions:
                    # for all chunks: one must not unlock memory that another still uses
                    self._stack.enter_context(pinned(session, pool.pixels))
                self._decoders = pool
            # it stays open after a chunk
            return nullcontext(self._decoders)
