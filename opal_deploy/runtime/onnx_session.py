"""A session on an ONNX file in ONNX Runtime, on the CPU or an NVIDIA GPU.

On the CPU it uses as many threads as the process may (its affinity, not the machine's count). On a GPU it uses the CUDA
provider with TF32 off, and binds inputs and outputs so that one copy goes each way. TensorRT's provider is not used:
ONNX Runtime 1.31 links TensorRT 10.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.errors import ArtifactError, OutOfMemory, StoppedEarly, UsageError, first_line, require
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.devices import available_cpus, parse_device
from opal_deploy.runtime.nvml import read_driver
from opal_deploy.runtime.session import BatchTimes, ImageBatch, check_batch

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


class OnnxSession:
    """An exported graph in ONNX Runtime.

    Attributes:
        metadata: from the file.
        description: engine, device, threads, precision.
        device: `cpu` or `cuda:N`.
        threads: of the CPU provider.
        batch_invariant: whether an image's outputs are the same to the last bit in a batch of any size. The CPU's
            kernels take each image by itself; a GPU's are chosen by the batch size.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        check_digest: bool = True,
    ) -> None:
        """Load a file of `opal-deploy export`.

        Args:
            path: of the ONNX file.
            device: `cpu`, `cuda`, `cuda:1`, or `auto`: the GPU if ONNX Runtime can use one.
            threads: of the CPU provider; None: as many as this process may use.
            check_digest: compare the file with its own digest first.

        Raises:
            ArtifactError: not a file of ours, damaged, or refused by ONNX Runtime.
            MissingExtra: onnxruntime is not installed.
            UsageError: the requested GPU cannot be used.
        """
        require("onnxruntime", "cpu", "running an ONNX model")
        self.metadata: Metadata = onnx_file.read_metadata(path)
        if check_digest:
            onnx_file.check_digest(path, self.metadata)
        import onnxruntime

        self._device_id = _cuda_device(onnxruntime, device)
        self.device = "cpu" if self._device_id is None else f"cuda:{self._device_id}"
        self.batch_invariant = self._device_id is None
        self.threads = threads or available_cpus()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # waiting threads must not burn the cores that decode the next images
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self._device_id is None and self.metadata.precision == "int8":
            # the fused int8 kernels add up in 16 bits on processors without VNNI, and saturate; plain quantise and
            # dequantise nodes around float32 operations give every processor the results of exact int8 arithmetic
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        providers: list[Any] = [CPU]
        if self._device_id is not None:
            _load_cuda_libraries(onnxruntime)
            providers = [(CUDA, {"device_id": self._device_id, "use_tf32": 0}), CPU]
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # ONNX Runtime exports no base class of its exceptions
            if self.metadata.precision == "bf16":
                raise UsageError(
                    f"{path}: ONNX Runtime has no bfloat16 convolutions here; build an engine from it "
                    f"(opal-deploy export {path.name} --trt), or run the fp32 or fp16 file"
                ) from None
            raise ArtifactError(f"{path}: ONNX Runtime refuses it ({first_line(error)}); export it again") from None
        providers = self._session.get_providers()
        if self._device_id is not None and CUDA not in providers:
            raise UsageError(
                f"ONNX Runtime could not start on CUDA device {self._device_id} and fell back to {providers[0]}; "
                "see `opal-deploy doctor`, or use --device cpu"
            )
        where = "CPU" if self._device_id is None else f"CUDA device {self._device_id}"
        threads_note = f", {self.threads} threads" if self._device_id is None else ""
        version = onnxruntime.__version__
        self.description = f"ONNX Runtime {version} on {where}{threads_note}, {self.metadata.precision}"

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        return self._run(self.prepare_input(images))

    def run_staged(self, images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        """See `StagedSession.run_staged`; normalisation by numpy is in none of the stages."""
        feed = self.prepare_input(images)
        with self._translate_errors(len(feed)):
            if self._device_id is None:
                start = time.perf_counter()
                values = self._run_cpu(feed, self.metadata.outputs)
                return self._outputs(values), BatchTimes(None, time.perf_counter() - start, None)
            return self._run_cuda_staged(feed, self.metadata.outputs)

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Run float32 [N, 3, H0, W0], already normalised; only for a graph whose input is float32."""
        return self._run(images)

    def _run(self, feed: np.ndarray[Any, Any]) -> Outputs:
        names = self.metadata.outputs
        with self._translate_errors(len(feed)):
            return self._outputs(self._run_cpu(feed, names) if self._device_id is None else self._run_cuda(feed, names))

    def _outputs(self, values: list[Any]) -> Outputs:
        outputs = dict(zip(self.metadata.outputs, values, strict=True))
        return Outputs(outputs["logits"], outputs.get("argmax"), outputs.get("scores"), outputs.get("attention"))

    @contextlib.contextmanager
    def _translate_errors(self, batch: int) -> Iterator[None]:
        """Turn whatever ONNX Runtime raises into OutOfMemory or StoppedEarly."""
        try:
            yield
        except Exception as error:  # ONNX Runtime exports no base class of its exceptions
            message = f"ONNX Runtime failed on a batch of {batch} ({first_line(error)})"
            if isinstance(error, MemoryError) or any(word in str(error).lower() for word in _OUT_OF_MEMORY):
                raise OutOfMemory(f"{message}; use a smaller --batch") from None
            raise StoppedEarly(f"{message}; see `opal-deploy doctor`") from None

    def prepare_input(self, images: ImageBatch) -> np.ndarray[Any, Any]:
        """Return the graph's input for images: the images, or float32 [N, 3, H0, W0] normalised."""
        check_batch(images, self.metadata)
        if self.metadata.input_kind == "float32":
            return normalise(images, self.metadata.mean, self.metadata.std)
        return np.ascontiguousarray(images)

    def _run_cpu(self, feed: np.ndarray[Any, Any], names: tuple[str, ...]) -> list[Any]:
        return list(self._session.run(list(names), {"images": feed}))

    def _run_cuda(self, feed: np.ndarray[Any, Any], names: tuple[str, ...]) -> list[Any]:
        binding = self._session.io_binding()
        binding.bind_cpu_input("images", feed)
        for name in names:
            binding.bind_output(name, "cuda", self._device_id)
        self._session.run_with_iobinding(binding)
        return list(binding.copy_outputs_to_cpu())

    def _run_cuda_staged(self, feed: np.ndarray[Any, Any], names: tuple[str, ...]) -> tuple[Outputs, BatchTimes]:
        """Run like `_run_cuda`, but wait for every stage."""
        import onnxruntime

        times = [time.perf_counter()]
        images = onnxruntime.OrtValue.ortvalue_from_numpy(feed, "cuda", self._device_id)
        binding = self._session.io_binding()
        binding.bind_ortvalue_input("images", images)
        for name in names:
            binding.bind_output(name, "cuda", self._device_id)
        binding.synchronize_inputs()
        times.append(time.perf_counter())
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append(time.perf_counter())
        values = list(binding.copy_outputs_to_cpu())
        times.append(time.perf_counter())
        return self._outputs(values), BatchTimes(*(after - before for before, after in itertools.pairwise(times)))


def cuda_is_usable() -> bool:
    """Return whether ONNX Runtime is installed with its CUDA provider and there is an NVIDIA GPU."""
    try:
        import onnxruntime
    except ImportError:
        return False
    return CUDA in onnxruntime.get_available_providers() and bool(read_driver().gpus)


def _cuda_device(onnxruntime: Any, device: str) -> int | None:
    """Return the CUDA device's number, or None for the CPU."""
    kind, index = parse_device(device)
    if kind == "cpu" or (kind == "auto" and not cuda_is_usable()):
        return None
    if CUDA not in onnxruntime.get_available_providers():
        raise UsageError(
            "device cuda: this onnxruntime has no CUDA provider; pip uninstall onnxruntime, then "
            "pip install 'opal-deploy[gpu]'"
        )
    return index


def _load_cuda_libraries(onnxruntime: Any) -> None:
    # the gpu extra's CUDA libraries live in site-packages, where the loader does not look by itself
    preload = getattr(onnxruntime, "preload_dlls", None)
    if preload is not None:
        preload()
