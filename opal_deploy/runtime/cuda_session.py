"""A session on an ONNX file in ONNX Runtime on an NVIDIA GPU. Never run on hardware when this was written.

Inputs and outputs are device memory of ours (`runtime.pipeline`), bound once; ONNX Runtime queues its kernels on our
stream and waits for nothing, so that the thread that submits a batch is free while the GPU computes it. TF32 is off.

A convolution of ONNX Runtime since 1.20 keeps the cuDNN plan of the last shape only and makes another when the shape
changes, which takes longer than the computation (its issue 23006: 15 times as long). So batches are padded to a few
sizes, and each size has a session of its own, whose shapes never change.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.errors import UsageError
from opal_deploy.runtime.cuda import Cuda, Stream
from opal_deploy.runtime.cuda_libraries import load_cuda_libraries
from opal_deploy.runtime.cuda_options import CudaOptions
from opal_deploy.runtime.onnx_session import CPU, CUDA, OnnxSession, translate_errors
from opal_deploy.runtime.pipeline import INPUT, BufferSet, Pipeline, TensorSpec, tensor_specs
from opal_deploy.runtime.pipeline_session import PipelineSession
from opal_deploy.runtime.verification import verify_test_vectors

BATCH_SIZES = (1, 8, 64, 256)
# where bound memory lies, in ONNX Runtime's words
_DEVICE_TYPE = "cuda"


class OnnxKernels:
    """The `Kernels` of an ONNX file: one session of ONNX Runtime for each batch size, made when it first occurs."""

    def __init__(self, load: Callable[[], Any], specs: dict[str, TensorSpec], index: int) -> None:
        """Load the first session, so that a graph that does not load shows now.

        Args:
            load: returns another session on the pipeline's stream.
            specs: of the graph's tensors.
            index: of the device.
        """
        self._load, self._specs, self._index = load, specs, index
        self._sizes = list(BATCH_SIZES)
        self._unused: list[Any] = [load()]
        self._sessions: dict[int, Any] = {}
        # binding and run options, by the number of the set of buffers
        self._bindings: dict[int, tuple[Any, Any]] = {}

    @property
    def max_rows(self) -> int:
        """See `Kernels.max_rows`."""
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
            if buffers.number not in self._bindings:
                self._bindings[buffers.number] = self._bind(buffers, rows)
            binding, options = self._bindings[buffers.number]
            self._sessions[rows].run_with_iobinding(binding, options)

    def close(self) -> None:
        """See `Kernels.close`."""
        self._bindings.clear()
        self._sessions.clear()
        self._unused.clear()

    def _bind(self, buffers: BufferSet, rows: int) -> tuple[Any, Any]:
        import onnxruntime

        if rows not in self._sessions:
            self._sessions[rows] = self._unused.pop() if self._unused else self._load()
        binding = self._sessions[rows].io_binding()
        for name, address in buffers.device.items():
            shape, dtype = self._specs[name]
            bind = binding.bind_input if name == INPUT else binding.bind_output
            bind(name, _DEVICE_TYPE, self._index, dtype, (rows, *shape), address)
        options = onnxruntime.RunOptions()
        # the pipeline waits for an event behind the copies of the outputs instead
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        # a CUDA graph, if there are any, belongs to the addresses that it was recorded with
        options.add_run_config_entry("gpu_graph_id", str(buffers.number))
        return binding, options


class CudaOnnxSession(PipelineSession, OnnxSession):
    """An exported graph in ONNX Runtime on a GPU; `OnnxSession(path, device="cuda")` makes one."""

    batch_invariant = False

    def __init__(self, path: Path, *, cuda_options: CudaOptions | None = None, **options: Any) -> None:
        """Load a file of `opal-deploy export`; see `OnnxSession`.

        Raises:
            VerificationError: with these options, the file's own test vectors are not reproduced.
        """
        self._cuda_options = cuda_options or CudaOptions()
        super().__init__(path, **options)
        if str(self._cuda_options):
            self.description += f", {self._cuda_options}"
            if self.metadata.test_vectors:
                verify_test_vectors(self, str(path))

    def _start(self, index: int) -> None:
        load_cuda_libraries()
        cuda = Cuda(index, "gpu")
        self.device, self._index = f"cuda:{index}", index
        stream = cuda.create_stream()
        self._provider_options = {
            "device_id": str(index),
            "use_tf32": "0",
            "user_compute_stream": str(int(stream)),
            **self._cuda_options.provider_options(),
        }
        self._kernels = OnnxKernels(self._load_on_gpu, tensor_specs(self.metadata), index)
        self._pipeline = Pipeline(cuda, self.metadata, self._kernels, stream)

    def _where(self) -> str:
        return f"CUDA device {self._index}"

    def _load_on_gpu(self) -> Any:
        session = self._load([(CUDA, self._provider_options), CPU])
        providers = session.get_providers()
        if CUDA not in providers:
            raise UsageError(
                f"ONNX Runtime could not start on CUDA device {self._index} and fell back to {providers[0]}; "
                "see `opal-deploy doctor`, or use --device cpu"
            )
        return session

    def add_batch_size(self, size: int) -> None:
        """See `PaddingSession.add_batch_size`."""
        self._kernels.add_size(size)

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Run float32 [N, 3, H0, W0], already normalised; only for a graph whose input is float32."""
        return self._loaded.run(np.asarray(images))
