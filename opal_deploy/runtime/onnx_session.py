"""Sessions on an ONNX file in ONNX Runtime: on the CPU, and the base of GPU sessions (`runtime.cuda_session`).

On the CPU, a session uses one thread per CPU of the process's affinity. TensorRT's provider is not used: ONNX Runtime
1.31 links TensorRT 10.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, Outputs, check_tensors
from opal_deploy.errors import (
    ArtifactError,
    OpalError,
    OutOfMemory,
    StoppedEarly,
    UsageError,
    first_line,
    install_command,
    require,
)
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.cuda import diagnose_gpu
from opal_deploy.runtime.devices import available_cpus, find_gpu_problem, has_vnni, parse_device, read_driver
from opal_deploy.runtime.session import ImageBatch, Session, check_batch

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
# ONNX Runtime's number of the severity; its errors are raised too
_FATAL = 4
# larger results are computed at each run, not folded while a graph is loaded
_FOLDED_BYTES = 1 << 30
# of an exported graph's inputs and outputs
_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(uint8)": np.dtype(np.uint8), "tensor(int32)": np.dtype(np.int32), "tensor(float)": np.dtype(np.float32),
}  # fmt: skip


class OnnxSession:
    """An exported graph in ONNX Runtime on the CPU; `cuda_session.open_onnx_session` chooses the device.

    Attributes:
        device: `cpu` or `cuda:N`.
        threads: threads of the CPU provider.
        batch_invariant: whether an image's scores and cells are bit-identical in batches of any size. The CPU's kernels
            take each image by itself; a GPU's are chosen by batch size. Logits may differ by 1e-7.
    """

    device = "cpu"
    batch_invariant = True

    def __init__(
        self, path: Path, *, device: str = "auto", threads: int | None = None, check_digest: bool = True
    ) -> None:
        """Load a file of `opal-deploy export`.

        Args:
            path: the ONNX file.
            device: `cpu`, or `auto` where no GPU can be used, which the description then explains.
            threads: threads of the CPU provider; None: as many as this process may use.
            check_digest: compare the file with its own digest first.

        Raises:
            ArtifactError: not an exported file, damaged, or refused by ONNX Runtime.
            MissingExtra: onnxruntime is not installed, or on a GPU cuda-bindings.
            UsageError: the requested GPU cannot be used.
        """
        require("onnxruntime", "cpu", "running an ONNX model")
        self.metadata: Metadata = onnx_file.read_metadata(path)
        if check_digest:
            onnx_file.check_digest(path, self.metadata)
        if type(self) is OnnxSession and device not in ("auto", "cpu"):
            raise ValueError(f"device {device!r}: open_onnx_session opens it")
        self._path = path
        self.threads = threads or available_cpus()
        self._load_on_device(device)
        import onnxruntime

        self.description = f"ONNX Runtime {onnxruntime.__version__} on {self._where()}, {self.metadata.precision}"
        if device == "auto" and self.device == "cpu":
            self.description += _explain_unused_gpu()

    def _load_on_device(self, device: str) -> None:
        """Load the graph on the device of this name."""
        self._session = self._load([CPU])

    def _where(self) -> str:
        return f"CPU, {self.threads} threads"

    def _load(self, providers: list[Any]) -> Any:
        """Return ONNX Runtime's session on the first of the providers; ArtifactError or UsageError if it refuses."""
        import onnxruntime

        options = session_options(self.threads, on_cpu=providers[0] == CPU)
        # waiting threads must leave the cores to the threads that decode the next images
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if providers[0] == CPU and self.metadata.int8_activations == "uint8":
            # without VNNI, kernels of uint8 and int8 add up in 16 bits and saturate; those of uint8 and uint8 do not,
            # but take twice as long where there is VNNI
            if not has_vnni():
                options.add_session_config_entry("session.x64quantprecision", "1")
        elif providers[0] == CPU and self.metadata.precision == "int8":
            # the fused kernels are slower than float32 around quantise and dequantise nodes
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            # its own fallback to the CPU prints on stdout, where records go
            session = onnxruntime.InferenceSession(str(self._path), options, providers=providers, enable_fallback=0)
            tensors = {
                tensor.name: (tuple(tensor.shape[1:]), _DTYPES.get(tensor.type, np.dtype(object)))
                for tensor in (*session.get_inputs(), *session.get_outputs())
            }
            check_tensors(self.metadata, tensors)
            return session
        except ArtifactError as error:
            raise ArtifactError(f"{self._path}: {error}; export it again") from None
        except Exception as error:  # ONNX Runtime exports no base class of its exceptions
            if self.metadata.precision == "bf16":
                raise UsageError(
                    f"{self._path}: ONNX Runtime has no bfloat16 convolutions here; run it in OpenVINO "
                    f"({install_command('openvino')}), or build an engine (opal-deploy export {self._path.name} --trt)"
                ) from None
            reason = _find_reason(error)
            if is_out_of_memory(error):
                raise OutOfMemory(f"{self._path}: no room for it ({reason}); free memory there") from None
            if providers[0] != CPU:
                advice = find_gpu_problem() or "see `opal-deploy doctor`, or use --device cpu"
                raise UsageError(f"{self._path}: does not load on {self._where()} ({reason}); {advice}") from None
            raise ArtifactError(f"{self._path}: ONNX Runtime refuses it ({reason}); export it again") from None

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        return self.run_normalised(prepare_input(images, self.metadata))

    def run_normalised(self, images: np.ndarray[Any, Any]) -> Outputs:
        """Run the graph's own input, see `prepare_input`."""
        with translate_errors(len(images)):
            arrays = self._session.run(list(self.metadata.outputs), {INPUT: images})
        return Outputs.from_arrays(dict(zip(self.metadata.outputs, arrays, strict=True)))

    def split(self, is_busy: Callable[[int], bool]) -> list[Session]:
        """See `SplitSession.split`; loads the graph a second time, raising ArtifactError if the file has changed."""
        if self.device != "cpu" or self.threads == 1:
            return [self]
        onnx_file.check_digest(self._path, self.metadata)
        narrow = copy.copy(self)
        narrow.threads = 1
        narrow._session = narrow._load([CPU])
        return [_Core(self, narrow, functools.partial(is_busy, self.threads)) for _ in range(self.threads)]


@dataclass(frozen=True, eq=False)
class _Core:
    """One of a session's cores: runs batches on one thread while `is_busy`, else on all of `wide`'s.

    Threads that share a batch wait for each other after every layer. ONNX Runtime's sessions run in parallel.
    """

    wide: OnnxSession
    narrow: OnnxSession
    is_busy: Callable[[], bool]
    device = "cpu"
    batch_invariant = True

    @property
    def metadata(self) -> Metadata:
        return self.wide.metadata

    @property
    def description(self) -> str:
        return self.wide.description

    def run(self, images: ImageBatch) -> Outputs:
        return (self.narrow if self.is_busy() else self.wide).run(images)


def session_options(threads: int, *, on_cpu: bool = True) -> Any:
    """Return ONNX Runtime's options of a session; on the CPU it gets no more memory than is available.

    A graph of a few bytes can ask for terabytes, or fill the memory in small steps.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _FATAL
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(_FOLDED_BYTES))
    if on_cpu and _share_limited_arena():
        options.add_session_config_entry("session.use_env_allocators", "1")
    return options


@functools.cache
def _share_limited_arena() -> bool:
    """Limit the memory that this process's sessions on the CPU may use together; return whether that is possible."""
    import onnxruntime

    try:
        (kilobytes,) = re.findall(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text("ascii"))
        kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
        memory = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
        onnxruntime.create_and_register_allocator(memory, onnxruntime.OrtArenaCfg({"max_mem": int(kilobytes) << 10}))
    except Exception:  # no such file outside Linux; ONNX Runtime exports no base class of its exceptions
        return False
    return True


def prepare_input(images: ImageBatch, metadata: Metadata) -> np.ndarray[Any, Any]:
    """Return an exported graph's input for images: the images, or float32 [N, 3, H0, W0] normalised."""
    check_batch(images, metadata)
    if metadata.input_kind == "float32":
        return normalise(images, metadata.mean, metadata.std)
    return np.ascontiguousarray(images)


@contextlib.contextmanager
def translate_errors(batch: int) -> Iterator[None]:
    """Turn whatever ONNX Runtime raises for a batch of `batch` images into OutOfMemory or StoppedEarly."""
    try:
        yield
    except OpalError:
        raise
    except Exception as error:  # ONNX Runtime exports no base class of its exceptions
        message = f"ONNX Runtime failed on a batch of {batch} ({_find_reason(error)})"
        if is_out_of_memory(error):
            raise OutOfMemory(f"{message}; use a smaller --batch") from None
        raise StoppedEarly(f"{message}; see `opal-deploy doctor`") from None


def _find_reason(error: Exception) -> str:
    """Return the readable part of an error: CUDA's words, those of a full memory, or the first line."""
    words = re.search(r"CU[A-Z]+ failure \d+: [^;\n]+|Available memory of .*", str(error))
    return words[0].strip() if words else first_line(error)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a runtime's error says that memory is full."""
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


def runs_on_cuda(device: str) -> bool:
    """Return whether a device name means a GPU here; UsageError for another name, no GPU, or no CUDA provider."""
    kind, _ = parse_device(device)
    if kind == "cpu" or (kind == "auto" and not cuda_is_usable()):
        return False
    if _has_cuda_provider():
        return True
    # no package helps a machine without a driver
    advice = find_gpu_problem() or f"onnxruntime lacks CUDA; {install_command('gpu', instead_of='onnxruntime')}"
    raise UsageError(f"device {device}: {advice}")
