"""A session on an engine of TensorRT or TensorRT for RTX, on an NVIDIA GPU, without torch.

Files and machine are checked before native code sees the engine. The first time that a machine loads an engine, its
test vectors run before anything else.

TensorRT for RTX compiles an engine where it runs: at every start, unless its runtime cache was kept. The library itself
refuses a cache of another version, GPU or driver. That part was never run on hardware when it was written.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.engine_file import BatchRange, Check, Sidecar, find_passed_check, load_engine, record_check
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, Outputs, TensorSpec, check_tensors, tensor_specs
from opal_deploy.errors import ArtifactError, OpalError, OutOfMemory, StoppedEarly, UsageError, VerificationError
from opal_deploy.runtime import tensorrt
from opal_deploy.runtime.cuda import Cuda, Graph, Stream
from opal_deploy.runtime.devices import parse_device, read_driver
from opal_deploy.runtime.pipeline import BufferSet, PipelineSession
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, attempt, find_incompatibility, first_error, make_logger
from opal_deploy.runtime.verification import verify_test_vectors

_SHA256_BYTES = 32


class EngineSession(PipelineSession):
    """A loaded engine with its sidecar; the description says when this machine checked it."""

    def __init__(self, path: Path, *, device: str = "auto", cuda_graphs: bool = False) -> None:
        """Check the files, then the machine; load the engine; run its test vectors if this machine never did.

        Args:
            path: the engine; its sidecar lies next to it.
            device: `auto`, `cuda` or `cuda:N`.
            cuda_graphs: record the engine's kernels once per batch size and launch them as one.

        Raises:
            ArtifactError: a file is missing, damaged or does not fit this machine.
            UsageError: there is no GPU or no such device, or its memory is too small.
            MissingExtra: a library is not installed.
            VerificationError: the test vectors are not reproduced.
        """
        self._kernel_cache: KernelCache | None = None
        self._kernels_saved = False
        self.sidecar: Sidecar
        self.sidecar, content = load_engine(path)
        self.metadata: Metadata = self.sidecar.metadata
        self._path = path
        self._rebuild = self.sidecar.rebuild_command(path)
        name, version = tensorrt.find_runtime(self.sidecar)
        kind, index = parse_device(device)
        if kind == "cpu":
            raise UsageError(f"{path}: engines run only on NVIDIA GPUs; on the CPU use {self.sidecar.onnx['file']}")
        driver = read_driver()
        if not driver.gpus:
            self._check_compatible(find_incompatibility(self.sidecar, None, driver, None))
        self._cuda = Cuda(index, tensorrt.EXTRAS.get(name, "trt"))
        self._check_compatible(find_incompatibility(self.sidecar, self._cuda.gpu, driver, version))
        self._library = tensorrt.load(name, "running this engine")
        # everything that the outcome of the test vectors depends on
        self._machine = {
            "gpu": self._cuda.gpu.name,
            "compute_capability": list(self._cuda.gpu.compute_capability),
            "driver": driver.version,
            "runtime": f"{name} {self._library.version}",
            "gpu_uuid": self._cuda.uuid,
        }
        self._logger = make_logger(self._library.module)
        self.device = f"cuda:{self._cuda.index} {self._cuda.gpu.name}"
        self.description = f"{self._library.title} on {self._cuda.gpu.name}"
        with self._cuda.activated():
            self._runtime, self._engine = self._deserialize(content)
            kernels, records_itself = self._create_kernels(cuda_graphs)
            self._engine_kernels = kernels
            checked = self._verify_once()
        # the test vectors were one batch size, the first real batch may be another
        self._kernels_saved = False
        # only now, so that no graph of the test vectors' batch is recorded
        kernels.record_graphs = cuda_graphs and not records_itself
        self.description += f", {self.metadata.precision}, {checked}"

    def collect(self, handle: object) -> Outputs:
        """See `PipelinedSession.collect`; compiled kernels are saved after the first batch, whose size others share."""
        outputs = super().collect(handle)
        if self._kernel_cache is not None and not self._kernels_saved:
            self._kernels_saved = True
            self._kernel_cache.save()
        return outputs

    def close(self) -> None:
        """See `PipelineSession.close`; new kernels are saved first."""
        if not self._closed and self._kernel_cache is not None:
            self._kernel_cache.save()
        super().close()
        self._kernel_cache = self._engine = self._runtime = None

    def _check_compatible(self, reason: str) -> None:
        if reason:
            bf16 = self.metadata.precision == "bf16"
            onnx = "the fp32 or fp16 ONNX file" if bf16 else self.sidecar.onnx["file"]
            raise ArtifactError(f"{self._path}: {reason}; run {onnx} instead, or rebuild it: {self._rebuild}")

    def _deserialize(self, content: bytes) -> tuple[Any, Any]:
        """Return the library's runtime and the engine, whose tensors are those that the metadata promises."""
        runtime = self._library.module.Runtime(self._logger)
        engine = attempt(self._logger, runtime.deserialize_cuda_engine, content)
        if engine is None:
            reason = f"{self._library.title} refuses it ({first_error(self._logger)})"
            raise ArtifactError(f"{self._path}: {reason}; rebuild it with: {self._rebuild}")
        self._check_tensors(engine)
        return runtime, engine

    def _create_kernels(self, cuda_graphs: bool) -> tuple[EngineKernels, bool]:
        """Create context and buffers; return the kernels, and whether the library records CUDA graphs by itself."""
        records_itself = self._library.name == TENSORRT_RTX
        configuration = (self._configure_rtx(cuda_graphs),) if records_itself else ()
        context = attempt(self._logger, self._engine.create_execution_context, *configuration)
        if context is None:
            raise self._too_large(first_error(self._logger))
        kernels = EngineKernels(
            self._cuda, self._engine, context, tensor_specs(self.metadata), self.sidecar.batch, self._logger
        )
        self._start_pipeline(self._cuda, kernels, self._cuda.create_stream())
        try:
            self._buffers.reserve(self.sidecar.batch.max)
        except OutOfMemory as error:
            raise self._too_large(str(error)) from None
        return kernels, records_itself

    def _configure_rtx(self, cuda_graphs: bool) -> Any:
        """Return the configuration with which TensorRT for RTX compiles the engine's kernels."""
        module, configuration = self._library.module, self._engine.create_runtime_config()
        # compiled before the first batch of a size, not while it runs, so that all batches have the same last bits
        strategies = module.DynamicShapesKernelSpecializationStrategy
        configuration.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        if cuda_graphs:
            configuration.cuda_graph_strategy = module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        native = configuration.create_runtime_cache()
        if native is not None:
            self._kernel_cache = KernelCache(self._path, str(self.sidecar.engine["sha256"]), native)
            configuration.set_runtime_cache(native)
        return configuration

    def _too_large(self, reason: str) -> UsageError:
        return UsageError(
            f"{self._path}: no room for {self.sidecar.batch.max} images on {self._cuda.gpu.name}: {reason}; free "
            f"memory, or build for fewer: {self._rebuild.replace(str(self.sidecar.batch), '1:8:16')}"
        )

    def _check_tensors(self, engine: Any) -> None:
        """Compare the engine's tensors with the metadata's, by which buffers are allocated."""
        actual: dict[str, TensorSpec] = {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            dtype = np.dtype(self._library.module.nptype(engine.get_tensor_dtype(name)))
            actual[name] = (tuple(engine.get_tensor_shape(name))[1:], dtype)
        try:
            check_tensors(self.metadata, actual)
        except ArtifactError as error:
            raise ArtifactError(f"{self._path}: {error}; rebuild it with: {self._rebuild}") from None

    def _verify_once(self) -> str:
        """Run the test vectors unless this machine passed them before, and keep the outcome next to the engine."""
        sha256 = str(self.sidecar.engine["sha256"])
        earlier = find_passed_check(self._path, sha256, self._machine)
        if earlier is not None:
            return f"checked here {earlier.when[:10]}"
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            report = verify_test_vectors(self, str(self._path)).to_dict()
        except VerificationError as error:
            record_check(self._path, Check(sha256, self._machine, now, False, {"failure": str(error)}))
            raise VerificationError(f"{error}; rebuild it with: {self._rebuild}") from None
        recorded = record_check(self._path, Check(sha256, self._machine, now, True, report))
        return "checked now" if recorded else "checked now (its folder is read-only: checked at every start)"


class EngineKernels:
    """The `Kernels` of a deserialised engine.

    Attributes:
        record_graphs: whether the kernels for the next batch's size are recorded, and launched as one from then on.
    """

    def __init__(
        self, cuda: Cuda, engine: Any, context: Any, specs: dict[str, TensorSpec], batch: BatchRange, logger: Any
    ) -> None:
        """Queue nothing yet; `logger` is the one that the library reports to."""
        self.record_graphs = False
        self._cuda, self._engine, self._context = cuda, engine, context
        self._specs, self._batch, self._logger = specs, batch, logger
        # CUDA graphs by the number of the set of buffers: rows, the context that must outlive the graph, and the graph
        self._recorded: dict[int, tuple[int, Any, Graph]] = {}

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
        if recorded is not None and recorded[0] == rows:
            self._cuda.launch_graph(recorded[2], stream)
            return
        self._bind(self._context, buffers, rows)
        self._execute(self._context, rows, stream)

    def release_memory(self) -> None:
        """See `Kernels.release_memory`; graphs and their contexts are freed, and no more are recorded."""
        self.record_graphs = False
        self._cuda.destroy(graphs=tuple(graph for _, _, graph in self._recorded.values()))
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
        self._recorded[buffers.number] = rows, context, graph

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
        """Read the kernels that an earlier start kept next to an engine into `native`, an empty `IRuntimeCache`."""
        self._engine_sha256, self._native = engine_sha256.encode(), native
        self._path, self._kept = engine.with_name(engine.name + ".kernels"), b""
        content = b""
        with contextlib.suppress(OSError):
            content = self._path.read_bytes()
        kernels = content[_SHA256_BYTES:]
        # native code sees only complete files for this very engine
        if kernels and content[:_SHA256_BYTES] == self._digest(kernels) and native.deserialize(kernels):
            self._kept = kernels

    def save(self) -> None:
        """Write the kernels if they differ from those read or written last."""
        with contextlib.suppress(OpalError, OSError):
            kernels = bytes(self._native.serialize() or b"")
            if not kernels or kernels == self._kept:
                return
            self._kept = kernels
            with atomic_write(self._path) as temporary:
                temporary.write_bytes(self._digest(kernels) + kernels)

    def _digest(self, kernels: bytes) -> bytes:
        return hashlib.sha256(self._engine_sha256 + kernels).digest()
