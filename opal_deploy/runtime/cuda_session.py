"""Sessions on an ONNX file in ONNX Runtime on an NVIDIA GPU.

Inputs and outputs are device memory of the pipeline (`runtime.pipeline`), bound once; ONNX Runtime queues its kernels
on the pipeline's stream and waits for nothing, so that the thread that submits a batch is free while the GPU computes
it. TF32 is off.

Since ONNX Runtime 1.20 a convolution keeps the cuDNN plan of the last shape only, and making another takes longer than
the computation (its issue 23006: 15 times as long). So batches are padded to a few sizes, and each size has its own
session, whose shapes never change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.outputs import INPUT, FloatArray, Outputs, TensorSpec, tensor_specs
from opal_deploy.errors import UsageError
from opal_deploy.runtime.buffers import BufferSet
from opal_deploy.runtime.cuda import Cuda, Graph, Stream, load_cuda_libraries, number_gpu
from opal_deploy.runtime.cuda_options import CudaOptions
from opal_deploy.runtime.onnx_session import CPU, CUDA, OnnxSession, runs_on_cuda, translate_errors
from opal_deploy.runtime.pipeline import PipelineSession
from opal_deploy.runtime.verification import verify_test_vectors

# a part of a batch is executed as the next larger one of these
BATCH_SIZES = (1, 8, 16, 32, 64, 256)
# a session allocates in its first runs, which a CUDA graph must not
_RUNS_BEFORE_GRAPH = 2
_FATAL_SEVERITY = 4
# where bound memory lies, in ONNX Runtime's words
_DEVICE_TYPE = "cuda"


@dataclass
class _BoundBuffers:
    """A set of buffers bound to the session of its size, and the CUDA graph of the session's kernels on it."""

    binding: Any
    options: Any
    runs: int = 0
    graph: Graph | None = None


class OnnxKernels:
    """The `Kernels` of an ONNX file: one ONNX Runtime session per batch size, made when it first occurs.

    With `record_graphs` the kernels of each set of buffers are launched as one CUDA graph. ONNX Runtime's own graphs do
    not fit: each thread records them anew, and no other thread may allocate while one is recorded.
    """

    def __init__(
        self, cuda: Cuda, load: Callable[[], Any], specs: dict[str, TensorSpec], *, record_graphs: bool = False
    ) -> None:
        """Load the first session, so that a graph that does not load fails now; `load` returns one per call."""
        self._cuda, self._load, self._specs, self._record_graphs = cuda, load, specs, record_graphs
        self._sizes = list(BATCH_SIZES)
        self._unused: list[Any] = [load()]
        self._sessions: dict[int, Any] = {}
        # by the number of the set of buffers
        self._bound: dict[int, _BoundBuffers] = {}

    @property
    def max_rows(self) -> int:
        return self._sizes[-1]

    def add_size(self, size: int) -> None:
        """Execute batches of this size as they are."""
        self._sizes = sorted({*self._sizes, size})

    def rows(self, images: int) -> int:
        """See `Kernels.rows`: the next larger size."""
        return next(size for size in self._sizes if size >= images)

    def capacity(self, rows: int) -> int:
        """See `Kernels.capacity`; each size has buffers of its own, which stay bound."""
        return rows

    def enqueue(self, buffers: BufferSet, rows: int, stream: Stream) -> None:
        """See `Kernels.enqueue`; the stream is the one that the sessions were loaded with."""
        with translate_errors(rows):
            if buffers.number not in self._bound:
                self._bound[buffers.number] = self._bind(buffers, rows)
            bound, session = self._bound[buffers.number], self._sessions[rows]
            if self._record_graphs and bound.graph is None and bound.runs >= _RUNS_BEFORE_GRAPH:
                bound.graph = self._cuda.record_graph(
                    stream, lambda: session.run_with_iobinding(bound.binding, bound.options)
                )
            if bound.graph is not None:
                self._cuda.launch_graph(bound.graph, stream)
            else:
                session.run_with_iobinding(bound.binding, bound.options)
                bound.runs += 1

    def release_memory(self) -> None:
        """See `Kernels.release_memory`: a session keeps all memory that it ever took, even where a run failed."""
        graphs = tuple(bound.graph for bound in self._bound.values() if bound.graph is not None)
        self._cuda.destroy(graphs=graphs)
        self._bound.clear()
        self._sessions.clear()
        self._unused.clear()

    def close(self) -> None:
        self.release_memory()

    def _bind(self, buffers: BufferSet, rows: int) -> _BoundBuffers:
        import onnxruntime

        if rows not in self._sessions:
            self._sessions[rows] = self._unused.pop() if self._unused else self._load()
        binding = self._sessions[rows].io_binding()
        for name, address in buffers.device.items():
            shape, dtype = self._specs[name]
            bind = binding.bind_input if name == INPUT else binding.bind_output
            bind(name, _DEVICE_TYPE, self._cuda.index, dtype, (rows, *shape), address)
        options = onnxruntime.RunOptions()
        # the pipeline waits for an event after the copies of the outputs instead
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return _BoundBuffers(binding, options)


class CudaOnnxSession(PipelineSession, OnnxSession):
    """An exported graph in ONNX Runtime on a GPU."""

    batch_invariant = False

    def __init__(self, path: Path, *, cuda_options: CudaOptions | None = None, **options: Any) -> None:
        """Load a file of `opal-deploy export`; see `OnnxSession`.

        Raises:
            VerificationError: with these options the file does not reproduce its own test vectors.
        """
        self._cuda_options = cuda_options or CudaOptions()
        super().__init__(path, **options)
        if str(self._cuda_options):
            self.description += f", {self._cuda_options}"
            if self.metadata.test_vectors:
                verify_test_vectors(self, str(path))

    def _load_on_device(self, device: str) -> None:
        load_cuda_libraries()
        index = number_gpu(device)
        cuda = Cuda(index, "gpu")
        self.device, self._index = f"cuda:{index}", index
        with cuda.activated():
            stream = cuda.create_stream()
            self._provider_options = {
                "device_id": str(index),
                "use_tf32": "0",
                "user_compute_stream": str(int(stream)),
                # by default a full arena doubles, and half of it may stay unused
                "arena_extend_strategy": "kSameAsRequested",
                **self._cuda_options.provider_options(self.metadata.precision),
            }
            self._sizes = OnnxKernels(
                cuda, self._load_on_gpu, tensor_specs(self.metadata), record_graphs=self._cuda_options.enable_cuda_graph
            )
            self._start_pipeline(cuda, self._sizes, stream)

    def _where(self) -> str:
        return f"CUDA device {self._index}"

    def _load_on_gpu(self) -> Any:
        import onnxruntime

        # for NHWC, cuDNN is asked to fuse each convolution with its activation; where it has no such kernel, that is
        # logged as an error (52 times for a ResNet-50 on an H100) and both run one after the other. Failures raise.
        onnxruntime.set_default_logger_severity(_FATAL_SEVERITY)
        session = self._load([(CUDA, self._provider_options), CPU])
        providers = session.get_providers()
        if CUDA not in providers:
            raise UsageError(
                f"ONNX Runtime could not start on CUDA device {self._index} and fell back to {providers[0]}; "
                "see `opal-deploy doctor`, or use --device cpu"
            )
        elsewhere = [part for part in session.get_provider_graph_assignment_info() if part.ep_name != CUDA]
        if elsewhere and self._cuda_options.enable_cuda_graph:
            operators = ", ".join(sorted({node.op_type for part in elsewhere for node in part.get_nodes()}))
            raise UsageError(
                f"{self._path}: enable_cuda_graph=1 needs all nodes on the GPU, and ONNX Runtime computes {operators} "
                "on the CPU; export it again, or leave the option out"
            )
        return session

    def add_batch_size(self, size: int) -> None:
        """See `PaddingSession.add_batch_size`."""
        self._sizes.add_size(size)

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Run float32 [N, 3, H0, W0], already normalised; only for a graph whose input is float32."""
        return self._run_batch(np.asarray(images))


def open_onnx_session(
    path: Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    check_digest: bool = True,
    cuda_options: CudaOptions | None = None,
) -> OnnxSession:
    """Load a file of `opal-deploy export` on a device.

    Args:
        path: the ONNX file.
        device: `cpu`, `cuda`, `cuda:1`, or `auto`: the GPU if ONNX Runtime can use one.
        threads, check_digest, cuda_options: see `CudaOnnxSession`.

    Errors are those of `OnnxSession`.
    """
    kind = CudaOnnxSession if runs_on_cuda(device) else OnnxSession
    return kind(path, device=device, threads=threads, check_digest=check_digest, cuda_options=cuda_options)
