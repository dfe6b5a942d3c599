"""A session on an engine of TensorRT or TensorRT for RTX, on an NVIDIA GPU, without torch.

Files and machine are checked before native code sees the engine. The first time that a machine loads an engine, its
test vectors run before anything else.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.engine_file import Check, Sidecar, find_passed_check, load_engine, record_check
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs, TensorSpec, check_tensors, tensor_specs
from opal_deploy.errors import ArtifactError, OutOfMemory, UsageError, VerificationError
from opal_deploy.runtime import tensorrt
from opal_deploy.runtime.cuda import Cuda, number_gpu
from opal_deploy.runtime.devices import parse_device, read_driver
from opal_deploy.runtime.engine_kernels import EngineKernels, KernelCache
from opal_deploy.runtime.pipeline import PipelineSession
from opal_deploy.runtime.session import ImageBatch
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, attempt, find_incompatibility, first_error, make_logger
from opal_deploy.runtime.verification import verify_test_vectors


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
        name = str(self.sidecar.builder["name"])
        if parse_device(device)[0] == "cpu":
            raise UsageError(
                f"{path}: engines run only on NVIDIA GPUs; on the CPU use {self.sidecar.onnx['file']} or the fp32 ONNX "
                "file"
            )
        driver = read_driver()
        if not driver.gpus:
            self._check_compatible(find_incompatibility(self.sidecar, None, driver, None))
        self._cuda = Cuda(number_gpu(device), tensorrt.EXTRAS.get(name, "trt"))
        version = tensorrt.installed_version(name)
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

    @property
    def device(self) -> str:
        """`cuda:N` and the GPU's name."""
        return f"cuda:{self._cuda.index} {self._cuda.gpu.name}"

    @property
    def max_batch(self) -> int:
        """The most images that one execution takes; larger batches are taken in parts."""
        return self.sidecar.batch.max

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        outputs = super().run(images)
        self._save_kernels()
        return outputs

    def collect(self, handle: object) -> Outputs:
        """See `PipelinedSession.collect`."""
        outputs = super().collect(handle)
        self._save_kernels()
        return outputs

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Run float32 [N, 3, H0, W0], already normalised; only for an engine whose input is float32."""
        return self._run_batch(images)

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
            raise ArtifactError(
                f"{self._path}: {reason}; run {onnx} instead, or rebuild on the target GPU with: {self._rebuild}"
            )

    def _deserialize(self, content: bytes) -> tuple[Any, Any]:
        """Return the library's runtime and the engine, with its weights and the tensors that the metadata promises."""
        runtime = self._library.module.Runtime(self._logger)
        if self.sidecar.options.get("version_compatible"):
            # such an engine brings its own runtime, which is host code; the user trusts it (docs/howto/tensorrt.md)
            runtime.engine_host_code_allowed = True
        engine = attempt(self._logger, runtime.deserialize_cuda_engine, content)
        if engine is None:
            raise ArtifactError(
                f"{self._path}: {self._library.title} refuses the engine ({first_error(self._logger)}); rebuild it "
                f"with: {self._rebuild}"
            )
        if self.sidecar.options.get("strip_weights"):
            self._refit(engine)
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
            self._reserve(self.max_batch)
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

    def _save_kernels(self) -> None:
        """Save compiled kernels after the first batch, whose size the next ones share."""
        if self._kernel_cache is not None and not self._kernels_saved:
            self._kernels_saved = True
            self._kernel_cache.save()

    def _too_large(self, reason: str) -> UsageError:
        memory = f"{(self._cuda.gpu.memory or 0) / 2**30:.0f} GiB"
        smaller = ":".join(str(max(1, self.max_batch // divisor)) for divisor in (16, 8, 4))
        source = self._path.with_name(str(self.sidecar.onnx["file"]))
        return UsageError(
            f"{self._path}: no room for batches of up to {self.max_batch} on {self._cuda.gpu.name} ({memory}): "
            f"{reason}; free memory there, or build for smaller ones: opal-deploy export {source} --trt --rebuild "
            f"--batch {smaller}"
        )

    def _refit(self, engine: Any) -> None:
        """Restore the weights of an engine that was built without them from its ONNX file."""
        from opal_deploy.artifact import onnx_file

        source = self._path.with_name(str(self.sidecar.onnx["file"]))
        if not source.is_file():
            raise ArtifactError(
                f"{self._path}: built with --strip-weights, and {source.name}, which holds its weights, is not next to "
                "it; copy that file here too"
            )
        metadata = onnx_file.read_metadata(source)
        onnx_file.check_digest(source, metadata)
        if metadata.file_sha256 != self.sidecar.onnx["sha256"]:
            raise ArtifactError(
                f"{self._path}: {source.name} is not the file that it was built from; copy that one here, or rebuild "
                f"with: {self._rebuild}"
            )
        trt = self._library.module
        refitter = trt.Refitter(engine, self._logger)
        parser = trt.OnnxParserRefitter(refitter, self._logger)
        if not (
            attempt(self._logger, parser.refit_from_file, str(source))
            and attempt(self._logger, refitter.refit_cuda_engine)
        ):
            raise ArtifactError(
                f"{self._path}: its weights cannot be put back from {source.name} ({first_error(self._logger)}); "
                f"rebuild with: {self._rebuild}"
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
