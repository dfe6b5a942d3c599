"""Load a model in a runtime, and describe it for the measurement."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.measurement import Target, head_name
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.options import RuntimeName
from opal_deploy.runtime.cuda_options import CudaOptions
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.select import check_runtime, open_sessions
from opal_deploy.runtime.session import Session

if TYPE_CHECKING:
    from opal_deploy.bench.targets.networks import NamedNetwork

Runtime = Literal["eager", "compile", "onnxruntime", "tensorrt"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
PYTORCH_RUNTIMES = ("eager", "compile")
# those that --cuda-graphs is for
RECORDED = ("compile", "tensorrt")


@dataclass(frozen=True)
class Setup:
    """The runtime, device and precision that run a model.

    Attributes:
        runtime: of a checkpoint or a network; ONNX files and engines have their own.
        device: auto, cpu, cuda or cuda:N.
        threads: on the CPU; None: all that the process may use (PyTorch: as many as it chooses).
        precision: of a checkpoint or a network, None for fp32; ONNX files and engines have their own.
        channels_last: lay PyTorch's convolutions out as NHWC.
        cuda_options: of ONNX Runtime on a GPU.
        cuda_graphs: let the kernels of an engine or of torch.compile be recorded as CUDA graphs.
    """

    runtime: Runtime = "onnxruntime"
    device: str = "auto"
    threads: int | None = None
    precision: str | None = None
    channels_last: bool = False
    cuda_options: CudaOptions = field(default_factory=CudaOptions)
    cuda_graphs: bool = False

    def check_fits(self, *, onnxruntime: bool = False, cuda_graphs: bool = False) -> None:
        """Raise UsageError where an option is another runtime's."""
        if str(self.cuda_options) and not onnxruntime:
            raise UsageError("--ort-option is of ONNX Runtime's CUDA provider, and this does not run there")
        if self.cuda_graphs and not cuda_graphs:
            raise UsageError(
                "--cuda-graphs is of engines and of compile on a GPU; ONNX Runtime has --ort-option enable_cuda_graph=1"
            )


@dataclass(frozen=True)
class LoadedTarget:
    """A model ready to be timed.

    Attributes:
        session: runs the model.
        target: the description for the measurement.
        threads: threads on the CPU; None on a GPU.
    """

    session: Session
    target: Target
    threads: int | None

    @property
    def metadata(self) -> Metadata:
        """The model's metadata."""
        return self.session.metadata

    @property
    def title(self) -> str:
        """Name, runtime, precision, device and threads for a person."""
        target = self.target
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        options = f", {target.options}" if target.options else ""
        runtime = f"{target.runtime} {target.runtime_version}{options}"
        return f"{target.name}: {runtime}, {target.precision}, {target.device}{threads}"

    @property
    def timed(self) -> str:
        """Description of the timed region, for `Measurement.timed`."""
        where = "on the device" if self.target.device != "cpu" else "in the graph"
        memory = "host memory" if self.target.device == "cpu" else "page-locked host memory"
        normalised = f"normalised {where}" if self.metadata.input_kind == "uint8" else "normalised by numpy on the host"
        return (
            f"one call of the session: from a uint8 batch [N, H0, W0, 3] in {memory}, "
            f"{normalised}, to {', '.join(self.metadata.outputs)} in host memory; no decoding, resizing or drawing"
        )


def load_file(path: Path, setup: Setup) -> LoadedTarget:
    """Load a checkpoint, an ONNX file or an engine.

    Raises:
        ArtifactError, CheckpointError: no such model, or not one of ours.
        UsageError: the setup does not fit the model, or a device does not exist.
        MissingExtra: the runtime is not installed.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such model; expected a checkpoint (.pt), or a .onnx or .engine of ours")
    kind = model_kind(path)
    if kind == "checkpoint":
        require("torch", "export", "timing a checkpoint")
        from opal_deploy.bench.targets.networks import load_checkpoint_network

        return load_network(load_checkpoint_network(path), setup)
    if kind is None:
        raise ArtifactError(f"{path}: not a model that can be timed; expected .pt, .onnx or .engine")
    loaded = _load_engine(path, setup) if kind == "engine" else _load_onnx(path, setup)
    if setup.precision not in (None, loaded.target.precision):
        raise UsageError(
            f"{path}: it is {loaded.target.precision}, and --precision asks for {setup.precision}; a file's precision "
            "is its own: export another, or give the checkpoint"
        )
    return loaded


def load_for_inference(
    path: Path,
    *,
    device: str,
    threads: int | None,
    runtime: RuntimeName = "auto",
    cuda_graphs: bool = False,
) -> LoadedTarget:
    """Load a model as `infer` does: a checkpoint in the reference session, or in the compiled one.

    Raises:
        ArtifactError, CheckpointError: no such model, or not one of ours.
        UsageError: a device does not exist, or the runtime does not run such a model or cannot work here.
        MissingExtra: the runtime is not installed.
    """
    setup = Setup(device=device, threads=threads, cuda_graphs=cuda_graphs)
    check_runtime(path, runtime)
    if model_kind(path) != "checkpoint" or not path.is_file():
        return load_file(path, setup)
    compiled = runtime == "compiled"
    (session,) = open_sessions(path, device=device, threads=threads, cuda_graphs=cuda_graphs, runtime=runtime)
    import torch

    from opal_deploy.runtime.torch_session import torch_device

    on_gpu = torch_device(device).type != "cpu"
    setup.check_fits(cuda_graphs=compiled and on_gpu)
    target = _describe(
        session.metadata,
        name=path.name,
        runtime="torch compiled" if compiled else "torch eager",
        version=torch.__version__,
        device=str(torch_device(device)),
        layout=f"uint8 NHWC, normalised on the device; convolutions {'NHWC' if compiled else 'NCHW'}",
        options="CUDA graphs" if cuda_graphs else "",
        sha256=compute_sha256(path),
    )
    return LoadedTarget(session, target, None if on_gpu else torch.get_num_threads())


def load_network(network: NamedNetwork, setup: Setup) -> LoadedTarget:
    """Load a network in the runtime and precision of the setup.

    Raises:
        UsageError: runtime and precision do not go together, or a device does not exist.
        MissingExtra: the runtime is not installed.
    """
    precision = setup.precision or "fp32"
    if setup.channels_last and setup.runtime not in PYTORCH_RUNTIMES:
        raise UsageError(f"--channels-last is PyTorch's; {setup.runtime} chooses its layouts itself")
    if setup.runtime in PYTORCH_RUNTIMES:
        return _load_torch(network, setup, precision)
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        if setup.runtime == "onnxruntime":
            from opal_deploy.bench.targets.networks import write_onnx

            path = Path(folder) / "timed.onnx"
            write_onnx(network, precision, path)
            try:
                return _load_onnx(path, setup, network)
            except ArtifactError:
                raise
            except UsageError:
                if precision != "bf16":
                    raise
                raise UsageError("ONNX Runtime has no bfloat16 convolutions here; choose fp16, or tensorrt") from None
        from opal_deploy.bench.targets.networks import write_engine

        path = write_engine(network.checkpoint, precision, Path(folder), random=network.sha256 is None)
        return _load_engine(path, setup, network)


def _load_torch(network: NamedNetwork, setup: Setup, precision: str) -> LoadedTarget:
    import torch

    from opal_deploy.bench.targets.torch_graph import TorchGraphSession

    session = TorchGraphSession(
        network.checkpoint,
        device=setup.device,
        threads=setup.threads,
        precision=precision,
        channels_last=setup.channels_last,
        compiled=setup.runtime == "compile",
        cuda_graphs=setup.cuda_graphs,
    )
    setup.check_fits(cuda_graphs=session.cuda_graphs)
    target = _describe(
        session.metadata,
        name=network.name,
        runtime=f"torch {setup.runtime}",
        version=torch.__version__,
        device=_with_gpu_name(session.device),
        precision=precision,
        layout=_layout(session.metadata, "NHWC" if setup.channels_last else "NCHW"),
        options=session.compile_options,
        sha256=network.sha256,
    )
    return LoadedTarget(session, target, session.threads)


def _load_onnx(path: Path, setup: Setup, network: NamedNetwork | None = None) -> LoadedTarget:
    require("onnxruntime", "cpu", "timing an ONNX model")
    import onnxruntime

    session = OnnxSession(path, device=setup.device, threads=setup.threads, cuda_options=setup.cuda_options)
    setup.check_fits(onnxruntime=session.device != "cpu")
    target = _describe(
        session.metadata,
        name=network.name if network else path.name,
        runtime="onnxruntime",
        version=onnxruntime.__version__,
        device=_with_gpu_name(session.device),
        layout=_layout(session.metadata, "as ONNX Runtime chooses"),
        options=str(setup.cuda_options),
        sha256=network.sha256 if network else compute_sha256(path),
    )
    return LoadedTarget(session, target, session.threads if session.device == "cpu" else None)


def _load_engine(path: Path, setup: Setup, network: NamedNetwork | None = None) -> LoadedTarget:
    from opal_deploy.runtime.tensorrt.session import EngineSession

    setup.check_fits(cuda_graphs=True)
    session = EngineSession(path, device=setup.device, cuda_graphs=setup.cuda_graphs)
    target = _describe(
        session.metadata,
        name=network.name if network else path.name,
        runtime=str(session.sidecar.builder["name"]),
        version=str(session.sidecar.builder["version"]),
        device=session.device,
        layout=_layout(session.metadata, "as TensorRT chooses"),
        options="CUDA graphs" if setup.cuda_graphs else "",
        sha256=network.sha256 if network else compute_sha256(path),
    )
    return LoadedTarget(session, target, None)


def _layout(metadata: Metadata, convolutions: str) -> str:
    images = "uint8 NHWC" if metadata.input_kind == "uint8" else "float32 NCHW"
    return f"{images}; convolutions {convolutions}"


def _describe(
    metadata: Metadata,
    *,
    name: str,
    runtime: str,
    version: str,
    device: str,
    layout: str,
    sha256: str | None,
    precision: str | None = None,
    options: str = "",
) -> Target:
    return Target(
        name=name,
        backbone=metadata.backbone,
        head=head_name(metadata.head),
        runtime=runtime,
        runtime_version=version,
        device=device,
        precision=precision or metadata.precision,
        layout=layout,
        options=options,
        input_size=metadata.input_size,
        num_classes=metadata.num_classes,
        prototypes_per_class=metadata.prototypes_per_class,
        sha256=sha256,
    )


def _with_gpu_name(device: str) -> str:
    """Return `cuda:0` with the GPU's name behind it, as CUDA counts GPUs; `cpu` stays."""
    if device == "cpu":
        return device
    from opal_deploy.runtime.cuda import visible_driver

    index = int(device.partition(":")[2] or 0)
    gpus = visible_driver().gpus
    return f"{device} {gpus[index].name}" if index < len(gpus) else device
