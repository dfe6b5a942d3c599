"""The kernels of a loaded TensorRT engine, CUDA graphs of them, and their cache on disk.

TensorRT for RTX compiles an engine where it runs: at every start, unless its runtime cache was kept. The library itself
refuses a cache of another version, GPU or driver. This code was never run on hardware when it was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.outputs import INPUT, TensorSpec
from opal_deploy.errors import OpalError, StoppedEarly
from opal_deploy.runtime.buffers import BufferSet
from opal_deploy.runtime.cuda import Cuda, Graph, Stream
from opal_deploy.runtime.tensorrt import attempt, first_error

_SHA256_BYTES = 32


@dataclass
class RecordedGraph:
    """A CUDA graph of one batch size on one set of buffers, with the context that must outlive it unchanged."""

    rows: int
    context: Any
    graph: Graph


class EngineKernels:
    """The `Kernels` of a deserialised engine.

    Attributes:
        record_graphs: whether the kernels for the next batch's size are recorded, and launched as one from then on.
    """

    def __init__(
        self,
        cuda: Cuda,
        engine: Any,
        context: Any,
        specs: dict[str, TensorSpec],
        batch: BatchRange,
        logger: Any,
    ) -> None:
        """Queue nothing yet; `logger` is the one that the library reports to."""
        self.record_graphs = False
        self._cuda, self._engine, self._context = cuda, engine, context
        self._specs, self._batch, self._logger = specs, batch, logger
        # by the number of the set of buffers
        self._recorded: dict[int, RecordedGraph] = {}

    @property
    def max_rows(self) -> int:
        return self._batch.max

    def rows(self, images: int) -> int:
        """See `Kernels.rows`; an engine may need more images than there are."""
        return max(images, self._batch.min)

    def capacity(self, rows: int) -> int:
        """See `Kernels.capacity`; one size of buffers serves every batch."""
        return self._batch.max

    def enqueue(self, buffers: BufferSet, rows: int, stream: Stream) -> None:
        if self.record_graphs and buffers.number not in self._recorded:
            self._record_graph(buffers, rows, stream)
        recorded = self._recorded.get(buffers.number)
        if recorded is not None and recorded.rows == rows:
            self._cuda.launch_graph(recorded.graph, stream)
            return
        self._bind(self._context, buffers, rows)
        self._execute(self._context, rows, stream)

    def release_memory(self) -> None:
        """See `Kernels.release_memory`; graphs and their contexts are freed, and no more are recorded."""
        self.record_graphs = False
        self._cuda.destroy(graphs=tuple(recorded.graph for recorded in self._recorded.values()))
        self._recorded = {}

    def close(self) -> None:
        self.release_memory()
        self._context = self._engine = None

    def _record_graph(self, buffers: BufferSet, rows: int, stream: Stream) -> None:
        """Record the kernels of the first batch's size on one set of buffers; other sizes run without a graph.

        A graph is valid only while its context keeps the shape and the addresses that it was recorded with, so each has
        a context of its own. Where there is no memory for that, nothing is recorded.
        """
        context = self._engine.create_execution_context()
        if context is None:
            self.record_graphs = False
            return
        self._bind(context, buffers, rows)
        # run once first: the library then prepares what must not happen while recording
        self._execute(context, rows, stream)
        self._cuda.synchronize_stream(stream)
        graph = self._cuda.record_graph(stream, lambda: self._execute(context, rows, stream))
        self._recorded[buffers.number] = RecordedGraph(rows, context, graph)

    def _bind(self, context: Any, buffers: BufferSet, rows: int) -> None:
        shape, _ = self._specs[INPUT]
        if not attempt(self._logger, context.set_input_shape, INPUT, (rows, *shape)):
            raise StoppedEarly(f"the engine refuses a batch of {rows} ({first_error(self._logger)})")
        for name, address in buffers.device.items():
            context.set_tensor_address(name, address)

    def _execute(self, context: Any, rows: int, stream: Stream) -> None:
        if not attempt(self._logger, context.execute_async_v3, int(stream)):
            raise StoppedEarly(
                f"the engine failed on a batch of {rows} on {self._cuda.gpu.name}: {first_error(self._logger)}; "
                "see `opal-deploy doctor`"
            )


class KernelCache:
    """The compiled kernels of one engine on disk; a failure only costs time and is never an error."""

    def __init__(self, engine: Path, engine_sha256: str, native: Any) -> None:
        """Read the kernels that an earlier start kept for an engine into `native`, an empty `IRuntimeCache`.

        The file lies next to the engine, or in the user's cache folder where that is read-only.
        """
        self._engine_sha256, self._native = engine_sha256.encode(), native
        # the user's cache folder by the XDG base directory specification
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opal-deploy"
        self._paths = (engine.with_name(engine.name + ".kernels"), cache / f"{engine_sha256}.kernels")
        self._kept = b""
        for path in self._paths:
            content = b""
            with contextlib.suppress(OSError):
                content = path.read_bytes()
            kernels = content[_SHA256_BYTES:]
            # native code sees only complete files for this very engine
            if kernels and content[:_SHA256_BYTES] == self._digest(kernels) and native.deserialize(kernels):
                self._kept = kernels
                return

    def save(self) -> None:
        """Write the kernels if they differ from those read or written last."""
        with contextlib.suppress(OpalError, OSError):
            kernels = bytes(self._native.serialize() or b"")
            if not kernels or kernels == self._kept:
                return
            self._kept = kernels
            try:
                self._write(self._paths[0], kernels)
            except (OpalError, OSError):
                self._paths[1].parent.mkdir(parents=True, exist_ok=True)
                self._write(self._paths[1], kernels)

    def _write(self, path: Path, kernels: bytes) -> None:
        with atomic_write(path) as temporary:
            temporary.write_bytes(self._digest(kernels) + kernels)

    def _digest(self, kernels: bytes) -> bytes:
        return hashlib.sha256(self._engine_sha256 + kernels).digest()
