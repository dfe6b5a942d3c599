"""A compiled checkpoint on an NVIDIA GPU. Never run on hardware when this was written.

Batches travel through `runtime.pipeline`, as those of every session on a GPU do: page-locked memory, a stream for the
copies, three batches in flight. PyTorch computes on the pipeline's own stream, reading and writing its device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from opal_deploy.artifact.metadata import Precision
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.compiled_session import CompiledSession, Program, choose_size
from opal_deploy.runtime.cuda import Cuda, Stream
from opal_deploy.runtime.pipeline import INPUT, BufferSet, Pipeline, TensorSpec, tensor_specs
from opal_deploy.runtime.pipeline_session import PipelineSession
from opal_deploy.runtime.session import ImageBatch
from opal_deploy.runtime.torch_session import translate_error


class RecordedProgram:
    """A program whose kernels are launched as one CUDA graph, so that Python launches none of them.

    Recorded here, not by torch.compile's own CUDA graphs: those belong to the thread that compiled, and sessions run in
    another.
    """

    def __init__(self, program: Program, images: Tensor) -> None:
        """Record the kernels that run for images of this shape; the program was run before."""
        self._images = images.clone()
        self._graph = torch.cuda.CUDAGraph()
        # of errors that other threads may make meanwhile, none is this recording's
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = program(self._images)

    def __call__(self, images: Tensor) -> tuple[Tensor, ...]:
        """Queue copy and kernels; the outputs are overwritten by the next call."""
        self._images.copy_(images)
        self._graph.replay()
        return self._outputs


class ProgramKernels:
    """The `Kernels` of compiled programs, one for each batch size."""

    def __init__(self, programs: dict[int, Program], specs: dict[str, TensorSpec], index: int) -> None:
        """Queue nothing yet.

        Args:
            programs: by batch size; more may be added later.
            specs: of the graph's tensors.
            index: of the device.
        """
        self._programs, self._specs, self._index = programs, specs, index

    @property
    def max_rows(self) -> int:
        """See `Kernels.max_rows`."""
        return max(self._programs)

    def rows(self, images: int) -> int:
        """See `Kernels.rows`."""
        return choose_size(self._programs, images)

    def capacity(self, rows: int) -> int:
        """See `Kernels.capacity`."""
        return rows

    def enqueue(self, buffers: BufferSet, rows: int, stream: Stream) -> None:
        """See `Kernels.enqueue`."""
        program, device = self._programs[rows], dict(buffers.device)

        def compute() -> None:
            # made in inference mode as those that were compiled for: other tensors would be compiled for anew
            with torch.inference_mode():
                tensors = {name: self._view(address, rows, name) for name, address in device.items()}
                outputs = program(tensors.pop(INPUT))
                for tensor, output in zip(tensors.values(), outputs, strict=True):
                    tensor.copy_(output)

        try:
            self._queue(compute, stream)
        except RuntimeError as error:
            raise translate_error(error, rows) from None

    def close(self) -> None:
        """See `Kernels.close`."""
        self._programs.clear()

    def _queue(self, work: Callable[[], None], stream: Stream) -> None:
        ours = torch.cuda.ExternalStream(int(stream), device=self._index)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(ours):
            work()

    def _view(self, address: int, rows: int, name: str) -> Tensor:
        """Return a tensor over device memory of a batch."""
        shape, dtype = self._specs[name]
        interface = {"shape": (rows, *shape), "typestr": dtype.str, "data": (address, False), "version": 3}
        holder = type("DeviceMemory", (), {"__cuda_array_interface__": interface})()
        tensor: Tensor = torch.as_tensor(holder, device=f"cuda:{self._index}")
        return tensor


class CudaCompiledSession(PipelineSession, CompiledSession):
    """A compiled checkpoint on a GPU, float16 unless told otherwise; `open_compiled_session` makes one."""

    default_precision: Precision = "fp16"

    def __init__(
        self,
        source: Path | Checkpoint,
        *,
        device: str = "cuda",
        threads: int | None = None,
        precision: Precision | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        """Load a checkpoint; see `CompiledSession`.

        Args:
            source, device, threads, precision: see there.
            cuda_graphs: launch all kernels of a batch as one CUDA graph, recorded once for each batch size.

        Raises:
            MissingExtra: cuda-bindings is not installed, which PyTorch brings for GPUs.
        """
        super().__init__(source, device=device, threads=threads, precision=precision)
        self._cuda_graphs = cuda_graphs
        index = self._device.index or 0
        cuda = Cuda(index, "gpu")
        kernels = ProgramKernels(self._programs, tensor_specs(self.metadata), index)
        self._pipeline = Pipeline(cuda, self.metadata, kernels, cuda.create_stream())
        if cuda_graphs:
            self.description += ", CUDA graphs"

    def _prepare(self, images: ImageBatch) -> None:
        super()._prepare(images)
        self._ensure_size(len(images))

    def _compile(self, size: int) -> Program:
        with self._translate_compile_errors(size), torch.cuda.device(self._device):
            images = self._warm_up(size)
            if not self._cuda_graphs:
                return self._graph
            with torch.inference_mode():
                return RecordedProgram(self._graph, images)
