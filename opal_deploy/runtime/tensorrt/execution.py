"""Batches through a loaded engine: its buffers on host and device, its streams, and CUDA graphs of its kernels.

A batch goes through two sets of buffers in turn, so that the images of the next part are copied to the device on a
stream of their own while the engine computes the last part. Host buffers are pinned.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import StoppedEarly
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import BatchTimes
from opal_deploy.runtime.tensorrt.cuda import Cuda, Event, Graph

INPUT = "images"
TensorSpec = tuple[tuple[int, ...], np.dtype[Any]]


def tensor_specs(metadata: Metadata) -> dict[str, TensorSpec]:
    """Return the shape of one image's part, and the dtype, of every input and output that the metadata promises."""
    height, width = metadata.input_size
    channels = metadata.num_prototypes
    shapes = {
        "logits": (metadata.num_classes,),
        "argmax": (channels,),
        "scores": (channels,),
        "attention": (channels, *metadata.grid),
    }
    specs: dict[str, TensorSpec] = {INPUT: ((height, width, 3), np.dtype(np.uint8))}
    if metadata.input_kind == "float32":
        specs[INPUT] = (3, height, width), np.dtype(np.float32)
    for name in metadata.outputs:
        specs[name] = shapes[name], np.dtype(np.int32 if name == "argmax" else np.float32)
    return specs


@dataclass
class RecordedGraph:
    """A CUDA graph of one batch size on one set of buffers, and the context that must outlive it unchanged."""

    batch: int
    context: Any
    graph: Graph


@dataclass
class BufferSet:
    """The memory of one batch in flight.

    Attributes:
        device: addresses on the device, by tensor.
        host: pinned arrays, by tensor.
        copied: the event after which the images are on the device.
        done: the event after which the outputs are on the host.
        images: how many images are in flight.
        recorded: the kernels of one batch size as a CUDA graph.
    """

    device: dict[str, int]
    host: dict[str, NDArray[Any]]
    copied: Event
    done: Event
    images: int = 0
    recorded: RecordedGraph | None = None


class EngineExecutor:
    """Runs batches of any size on one engine and one GPU, from one thread at a time.

    Attributes:
        record_graphs: whether the kernels of the next batch's size are recorded and launched as one from then on.
    """

    def __init__(
        self,
        cuda: Cuda,
        engine: Any,
        context: Any,
        metadata: Metadata,
        batch: BatchRange,
        read_error: Callable[[], str],
    ) -> None:
        """Allocate streams and two sets of buffers for the largest batch.

        Args:
            cuda: the GPU.
            engine: a deserialised `ICudaEngine`.
            context: an execution context of the engine.
            metadata: of the model; names, shapes and dtypes of the tensors are built from it.
            batch: the batch sizes that the engine takes.
            read_error: returns the library's reason for a failure.

        Raises:
            OutOfMemory: the buffers do not fit.
        """
        self.record_graphs = False
        self._cuda, self._engine, self._context = cuda, engine, context
        self._metadata, self._batch, self._read_error = metadata, batch, read_error
        self._specs = tensor_specs(metadata)
        self._copy_stream, self._compute_stream = cuda.create_stream(), cuda.create_stream()
        self._buffers = [self._allocate(), self._allocate()]

    def run(self, images: NDArray[Any]) -> Outputs:
        """Return the outputs for N images in the engine's input layout, or uint8 [N, H0, W0, 3] for any engine.

        Raises:
            StoppedEarly: the engine or the device failed.
        """
        self._cuda.make_current()
        parts: list[Outputs] = []
        in_flight: deque[BufferSet] = deque()
        with self._wait_on_failure():
            for number, part in enumerate(self._split(images)):
                buffers = self._buffers[number % len(self._buffers)]
                if buffers in in_flight:
                    parts.append(self._collect(in_flight.popleft()))
                self._start(buffers, part)
                in_flight.append(buffers)
            while in_flight:
                parts.append(self._collect(in_flight.popleft()))
        return parts[0] if len(parts) == 1 else Outputs.concatenate(parts)

    def run_staged(self, images: NDArray[Any]) -> tuple[Outputs, BatchTimes]:
        """Return the outputs and the time of each stage, on one stream, in which nothing overlaps.

        Raises:
            StoppedEarly: the engine or the device failed.
        """
        self._cuda.make_current()
        events = tuple(self._cuda.create_timed_event() for _ in range(4))
        parts: list[Outputs] = []
        seconds = [0.0, 0.0, 0.0]
        buffers, stream = self._buffers[0], self._compute_stream
        try:
            with self._wait_on_failure():
                for part in self._split(images):
                    batch = self._fill(buffers, part)
                    self._cuda.record(events[0], stream)
                    self._cuda.copy_to_device(buffers.device[INPUT], buffers.host[INPUT][:batch], stream)
                    self._cuda.record(events[1], stream)
                    self._execute(buffers, batch)
                    self._cuda.record(events[2], stream)
                    self._copy_outputs(buffers, batch)
                    self._cuda.record(events[3], stream)
                    self._cuda.record(buffers.done, stream)
                    parts.append(self._collect(buffers))
                    for index, (before, after) in enumerate(itertools.pairwise(events)):
                        seconds[index] += self._cuda.elapsed_seconds(before, after)
        finally:
            self._cuda.destroy(events=events)
        return Outputs.concatenate(parts), BatchTimes(*seconds)

    def close(self) -> None:
        """Free device and pinned memory, streams, events and graphs."""
        for buffers in self._buffers:
            for address in buffers.device.values():
                self._cuda.free(address)
            for array in buffers.host.values():
                self._cuda.free_pinned(array)
            graphs = (buffers.recorded.graph,) if buffers.recorded is not None else ()
            buffers.recorded = None
            self._cuda.destroy(events=(buffers.copied, buffers.done), graphs=graphs)
        if self._buffers:
            self._cuda.destroy(streams=(self._copy_stream, self._compute_stream))
        self._buffers = []
        self._context = self._engine = None

    @contextlib.contextmanager
    def _wait_on_failure(self) -> Iterator[None]:
        """Let nothing of a failed batch go on writing into the buffers."""
        try:
            yield
        except StoppedEarly:
            with contextlib.suppress(StoppedEarly):
                self._cuda.synchronize_stream(self._compute_stream)
            raise

    def _split(self, images: NDArray[Any]) -> Iterator[NDArray[Any]]:
        size = self._batch.max
        return (images[start : start + size] for start in range(0, len(images), size))

    def _allocate(self) -> BufferSet:
        device, host = {}, {}
        for name, (shape, dtype) in self._specs.items():
            host[name] = self._cuda.allocate_pinned((self._batch.max, *shape), dtype)
            device[name] = self._cuda.allocate(host[name].nbytes)
        return BufferSet(device, host, self._cuda.create_event(), self._cuda.create_event())

    def _start(self, buffers: BufferSet, images: NDArray[Any]) -> None:
        """Queue copies and kernels for one part."""
        batch = self._fill(buffers, images)
        self._cuda.copy_to_device(buffers.device[INPUT], buffers.host[INPUT][:batch], self._copy_stream)
        self._cuda.record(buffers.copied, self._copy_stream)
        self._cuda.wait_for_event(self._compute_stream, buffers.copied)
        self._execute(buffers, batch)
        self._copy_outputs(buffers, batch)
        self._cuda.record(buffers.done, self._compute_stream)

    def _fill(self, buffers: BufferSet, images: NDArray[Any]) -> int:
        """Put images into the pinned buffer; return the batch size to run, which the engine may need to be larger."""
        batch = max(len(images), self._batch.min)
        pinned = buffers.host[INPUT]
        if images.dtype == np.uint8 and self._metadata.input_kind == "float32":
            pinned[: len(images)] = normalise(images, self._metadata.mean, self._metadata.std)
        else:
            pinned[: len(images)] = images
        # padded with the last image, whose extra outputs are dropped
        pinned[len(images) : batch] = pinned[len(images) - 1]
        buffers.images = len(images)
        return batch

    def _copy_outputs(self, buffers: BufferSet, batch: int) -> None:
        for name in self._metadata.outputs:
            self._cuda.copy_to_host(buffers.host[name][:batch], buffers.device[name], self._compute_stream)

    def _collect(self, buffers: BufferSet) -> Outputs:
        self._cuda.synchronize_event(buffers.done)
        # copies, since the buffers are used again
        outputs = {name: buffers.host[name][: buffers.images].copy() for name in self._metadata.outputs}
        return Outputs(outputs["logits"], outputs.get("argmax"), outputs.get("scores"), outputs.get("attention"))

    def _execute(self, buffers: BufferSet, batch: int) -> None:
        if self.record_graphs and buffers.recorded is None:
            buffers.recorded = self._record_graph(buffers, batch)
        if buffers.recorded is not None and buffers.recorded.batch == batch:
            self._cuda.launch_graph(buffers.recorded.graph, self._compute_stream)
            return
        self._bind(self._context, buffers, batch)
        self._enqueue(self._context, batch)

    def _record_graph(self, buffers: BufferSet, batch: int) -> RecordedGraph | None:
        """Record the kernels of the first batch's size on one set of buffers; other sizes run without a graph.

        A graph is valid only while its context keeps the shape and the addresses that it was recorded with, so each has
        a context of its own. Where there is no memory for that, nothing is recorded.
        """
        context = self._engine.create_execution_context()
        if context is None:
            self.record_graphs = False
            return None
        self._bind(context, buffers, batch)
        # run once first: the library then prepares what must not happen while recording
        self._enqueue(context, batch)
        self._cuda.synchronize_stream(self._compute_stream)
        self._cuda.begin_capture(self._compute_stream)
        try:
            self._enqueue(context, batch)
        finally:
            graph = self._cuda.end_capture(self._compute_stream)
        return RecordedGraph(batch, context, graph)

    def _bind(self, context: Any, buffers: BufferSet, batch: int) -> None:
        shape, _ = self._specs[INPUT]
        if not context.set_input_shape(INPUT, (batch, *shape)):
            raise StoppedEarly(f"the engine refuses a batch of {batch} ({self._read_error()})")
        for name, address in buffers.device.items():
            context.set_tensor_address(name, address)

    def _enqueue(self, context: Any, batch: int) -> None:
        if not context.execute_async_v3(int(self._compute_stream)):
            raise StoppedEarly(
                f"the engine failed on a batch of {batch} on {self._cuda.gpu.name}: {self._read_error()}; "
                "see `opal-deploy doctor`"
            )
