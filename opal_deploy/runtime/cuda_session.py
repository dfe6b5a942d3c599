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
from pathlib import Path
from typing import Any

from opal_deploy.artifact.outputs import INPUT, TensorSpec, tensor_specs
from opal_deploy.errors import UsageError
from opal_deploy.runtime.cuda import Cuda, Stream, load_cuda_libraries
from opal_deploy.runtime.devices import parse_device
from opal_deploy.runtime.onnx_session import CPU, CUDA, OnnxSession, runs_on_cuda, translate_errors
from opal_deploy.runtime.pipeline import BufferSet, PipelineSession

# a part of a batch is executed as the next larger one of these
BATCH_SIZES = (1, 8, 16, 32, 64, 256)
_FATAL_SEVERITY = 4
# where bound memory lies, in ONNX Runtime's words
_DEVICE_TYPE = "cuda"


class OnnxKernels:
    """The `Kernels` of an ONNX file: one ONNX Runtime session per batch size, made when it first occurs."""

    def __init__(self, cuda: Cuda, load: Callable[[], Any], specs: dict[str, TensorSpec]) -> None:
        """Load the first session, so that a graph that does not load fails now; `load` returns one per call."""
        self._cuda, self._load, self._specs = cuda, load, specs
        self._sizes = list(BATCH_SIZES)
        self._unused: list[Any] = [load()]
        self._sessions: dict[int, Any] = {}
        # a set of buffers bound to the session of its size, by the set's number: binding and options of a run
        self._bound: dict[int, tuple[Any, Any]] = {}

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
            self._sessions[rows].run_with_iobinding(*self._bound[buffers.number])

    def release_memory(self) -> None:
        """See `Kernels.release_memory`: a session keeps all memory that it ever took, even where a run failed."""
        self._bound.clear()
        self._sessions.clear()
        self._unused.clear()

    close = release_memory

    def _bind(self, buffers: BufferSet, rows: int) -> tuple[Any, Any]:
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
        return binding, options


class CudaOnnxSession(PipelineSession, OnnxSession):
    """An exported graph in ONNX Runtime on a GPU."""

    batch_invariant = False

    def _load_on_device(self, device: str) -> None:
        load_cuda_libraries()
        _, index = parse_device(device)
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
                # tensor cores compute in NHWC: in half precision, NCHW costs two transpositions a layer
                "prefer_nhwc": str(int(self.metadata.precision == "fp16")),
                "cudnn_conv_algo_search": "EXHAUSTIVE",
            }
            self._sizes = OnnxKernels(cuda, self._load_on_gpu, tensor_specs(self.metadata))
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
            raise UsageError(f"ONNX Runtime does not start on CUDA device {self._index}; see `opal-deploy doctor`")
        return session

    def add_batch_size(self, size: int) -> None:
        """See `PaddingSession.add_batch_size`."""
        self._sizes.add_size(size)


def open_onnx_session(
    path: Path, *, device: str = "auto", threads: int | None = None, check_digest: bool = True
) -> OnnxSession:
    """Load a file of `opal-deploy export` on a device.

    `device` is `cpu`, `cuda`, `cuda:1`, or `auto`: the GPU if ONNX Runtime can use one. The other arguments and the
    errors are those of `OnnxSession`.
    """
    kind = CudaOnnxSession if runs_on_cuda(device) else OnnxSession
    return kind(path, device=device, threads=threads, check_digest=check_digest)
