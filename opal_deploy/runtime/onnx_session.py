"""Sessions on an ONNX file in ONNX Runtime, on the CPU or an NVIDIA GPU.

On the CPU a session uses as many threads as the process may (its affinity, not the machine's count). TensorRT's
provider is not used: ONNX Runtime 1.31 links TensorRT 10.

The session on a GPU was never run on hardware when this was written. Inputs and outputs are device memory of the
pipeline (`runtime.pipeline`), bound once; ONNX Runtime queues its kernels on the pipeline's stream and waits for
nothing, so that the thread that submits a batch is free while the GPU computes it. TF32 is off.

Since ONNX Runtime 1.20 a convolution keeps the cuDNN plan of the last shape only, and making another takes longer than
the computation (its issue 23006: 15 times as long). So batches are padded to a few sizes, and each size has its own
session, whose shapes never change.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, FloatArray, Outputs, TensorSpec, check_tensors, tensor_specs
from opal_deploy.errors import ArtifactError, OpalError, OutOfMemory, StoppedEarly, UsageError, first_line, require
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.cuda import Cuda, CudaOptions, Graph, Stream, diagnose_gpu, load_cuda_libraries
from opal_deploy.runtime.devices import available_cpus, find_gpu_problem, parse_device, read_driver
from opal_deploy.runtime.pipeline import BufferSet, PipelineSession
from opal_deploy.runtime.session import BatchTimes, ImageBatch, check_batch
from opal_deploy.runtime.verification import verify_test_vectors

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
# ONNX Runtime has no error class for full memory: parts of the messages of its arena, CUDA, cuDNN and C++
_OUT_OF_MEMORY = (
    "failed to allocate memory",
    "available memory of",
    "out of memory",
    "alloc_failed",
    "bad_alloc",
    "bad allocation",
)
# a part of a batch is executed as the next larger one of these
BATCH_SIZES = (1, 8, 16, 32, 64, 256)
# a session allocates in its first runs, which a CUDA graph must not
_RUNS_BEFORE_GRAPH = 2
# ONNX Runtime's number of the severity
_ERROR = 3
# of an exported graph's inputs and outputs
_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(uint8)": np.dtype(np.uint8), "tensor(int32)": np.dtype(np.int32), "tensor(float)": np.dtype(np.float32),
}  # fmt: skip
# where bound memory lies, in ONNX Runtime's words
_DEVICE_TYPE = "cuda"


class OnnxSession:
    """An exported graph in ONNX Runtime; on a GPU, `OnnxSession(...)` is a `CudaOnnxSession`.

    Attributes:
        device: `cpu` or `cuda:N`.
        threads: threads of the CPU provider.
        batch_invariant: whether an image's scores and cells are bit-identical in batches of any size. The CPU's kernels
            take each image by itself; a GPU's are chosen by batch size. Logits may differ by 1e-7.
    """

    device = "cpu"
    batch_invariant = True

    def __new__(cls, path: Path, *, device: str = "auto", **options: Any) -> OnnxSession:
        """Choose the class by the device."""
        if cls is OnnxSession and _runs_on_cuda(device):
            return super().__new__(CudaOnnxSession)
        return super().__new__(cls)

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        check_digest: bool = True,
        cuda_options: CudaOptions | None = None,
    ) -> None:
        """Load a file of `opal-deploy export`.

        Args:
            path: the ONNX file.
            device: `cpu`, `cuda`, `cuda:1`, or `auto`: the GPU if ONNX Runtime can use one.
            threads: threads of the CPU provider; None: as many as this process may use.
            check_digest: compare the file with its own digest first.
            cuda_options: options of the CUDA provider; the CPU ignores them.

        Raises:
            ArtifactError: not an exported file, damaged, or refused by ONNX Runtime.
            MissingExtra: onnxruntime is not installed, or on a GPU cuda-bindings.
            UsageError: the requested GPU cannot be used.
        """
        require("onnxruntime", "cpu", "running an ONNX model")
        self.metadata: Metadata = onnx_file.read_metadata(path)
        if check_digest:
            onnx_file.check_digest(path, self.metadata)
        self._path = path
        self.threads = threads or available_cpus()
        self._load_on_device(parse_device(device)[1])
        import onnxruntime

        self.description = f"ONNX Runtime {onnxruntime.__version__} on {self._where()}, {self.metadata.precision}"
        if device == "auto" and self.device == "cpu":
            self.description += _explain_unused_gpu()

    def _load_on_device(self, index: int) -> None:
        """Load the graph on the device of this number."""
        self._session = self._load([CPU])

    def _where(self) -> str:
        return f"CPU, {self.threads} threads"

    def _load(self, providers: list[Any]) -> Any:
        """Return ONNX Runtime's session on the first of the providers.

        Raises:
            ArtifactError, UsageError: ONNX Runtime refuses the graph.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERROR
        # waiting threads must leave the cores to those that decode the next images
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if providers[0] != CPU:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        elif self.metadata.precision == "int8":
            # on processors without VNNI the fused int8 kernels add up in 16 bits and saturate; plain quantise and
            # dequantise nodes around float32 operations give the results of exact int8 arithmetic everywhere
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            # its own fallback to the CPU prints on stdout, where records go
            session = onnxruntime.InferenceSession(str(self._path), options, providers=providers, enable_fallback=0)
            tensors = {
                each.name: (tuple(each.shape[1:]), _DTYPES.get(each.type, np.dtype(object)))
                for each in (*session.get_inputs(), *session.get_outputs())
            }
            check_tensors(self.metadata, tensors)
            return session
        except ArtifactError as error:
            raise ArtifactError(f"{self._path}: {error}; export it again") from None
        except Exception as error:  # ONNX Runtime exports no base class of its exceptions
            if self.metadata.precision == "bf16":
                raise UsageError(
                    f"{self._path}: ONNX Runtime has no bfloat16 convolutions here; build an engine from it "
                    f"(opal-deploy export {self._path.name} --trt), or run the fp32 or fp16 file"
                ) from None
            reason = _find_reason(error)
            if _is_out_of_memory(error):
                raise OutOfMemory(f"{self._path}: no room for it ({reason}); free memory there") from None
            if providers[0] != CPU:
                advice = find_gpu_problem() or "see `opal-deploy doctor`, or use --device cpu"
                raise UsageError(
                    f"{self._path}: ONNX Runtime cannot load it on {self._where()} ({reason}); {advice}"
                ) from None
            raise ArtifactError(f"{self._path}: ONNX Runtime refuses it ({reason}); export it again") from None

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        return self.run_normalised(self.prepare_input(images))

    def run_staged(self, images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        """See `StagedSession.run_staged`; normalisation by numpy is in none of the stages."""
        feed = self.prepare_input(images)
        start = time.perf_counter()
        outputs = self.run_normalised(feed)
        return outputs, BatchTimes(None, time.perf_counter() - start, None)

    def run_normalised(self, images: np.ndarray[Any, Any]) -> Outputs:
        """Run the graph's own input, see `prepare_input`."""
        with translate_errors(len(images)):
            arrays = self._session.run(list(self.metadata.outputs), {INPUT: images})
        return Outputs.from_arrays(dict(zip(self.metadata.outputs, arrays, strict=True)))

    def prepare_input(self, images: ImageBatch) -> np.ndarray[Any, Any]:
        """Return the graph's input for images: the images, or float32 [N, 3, H0, W0] normalised."""
        check_batch(images, self.metadata)
        if self.metadata.input_kind == "float32":
            return normalise(images, self.metadata.mean, self.metadata.std)
        return np.ascontiguousarray(images)


@dataclass
class _BoundBuffers:
    """A set of buffers bound to the session of its size, and the CUDA graph of the session's kernels on it."""

    binding: Any
    options: Any
    runs: int = 0
    graph: Graph | None = None


class OnnxKernels:
    """The `Kernels` of an ONNX file: one ONNX Runtime session per batch size, made when it first occurs.

    With `record_graphs` the kernels of each set of buffers are launched as one CUDA graph. ONNX Runtime's own graphs
    would not do: each thread records them anew, and no other thread may allocate while one is recorded.
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
    """An exported graph in ONNX Runtime on a GPU; `OnnxSession(path, device="cuda")` makes one."""

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

    def _load_on_device(self, index: int) -> None:
        load_cuda_libraries()
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

        # each session would warn of a plug-in that this build does not have
        onnxruntime.set_default_logger_severity(_ERROR)
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


@contextlib.contextmanager
def translate_errors(batch: int) -> Iterator[None]:
    """Turn whatever ONNX Runtime raises for a batch of `batch` images into OutOfMemory or StoppedEarly."""
    try:
        yield
    except OpalError:
        raise
    except Exception as error:  # ONNX Runtime exports no base class of its exceptions
        message = f"ONNX Runtime failed on a batch of {batch} ({_find_reason(error)})"
        if _is_out_of_memory(error):
            raise OutOfMemory(f"{message}; use a smaller --batch") from None
        raise StoppedEarly(f"{message}; see `opal-deploy doctor`") from None


def _find_reason(error: Exception) -> str:
    """Return the readable part of an error: CUDA's words, or the first line."""
    words = re.search(r"CU[A-Z]+ failure \d+: [^;\n]+", str(error))
    return words[0].strip() if words else first_line(error)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in _OUT_OF_MEMORY)


def cuda_is_usable() -> bool:
    """Return whether ONNX Runtime is installed with its CUDA provider and CUDA runs on a GPU here."""
    return _has_cuda_provider() and not any(diagnose_gpu(read_driver()))


def _explain_unused_gpu() -> str:
    """Return why a GPU of this machine is not used, for the end of a description; empty where there is none."""
    driver = read_driver()
    if not driver.gpus or not _has_cuda_provider():
        return ""
    problem, advice = diagnose_gpu(driver)
    return f" (the GPU is not used: {problem}; {advice})"


def _has_cuda_provider() -> bool:
    try:
        import onnxruntime
    except ImportError:
        return False
    return CUDA in onnxruntime.get_available_providers()


def _runs_on_cuda(device: str) -> bool:
    """Return whether a device name means a GPU here.

    Raises:
        UsageError: not a device name, or without a GPU or an onnxruntime that can use it.
        MissingExtra: onnxruntime is not installed.
    """
    kind, _ = parse_device(device)
    if kind == "cpu" or (kind == "auto" and not cuda_is_usable()):
        return False
    if _has_cuda_provider():
        return True
    # no package helps a machine without a driver
    if problem := find_gpu_problem():
        raise UsageError(f"device {device}: {problem}")
    require("onnxruntime", "gpu", "running an ONNX model on a GPU", pip_name="onnxruntime-gpu")
    raise UsageError(
        f"device {device}: this onnxruntime has no CUDA provider; pip uninstall onnxruntime, then pip install "
        "'opal-deploy[gpu]'"
    )
