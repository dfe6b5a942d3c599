"""Open what can be timed, in a runtime, and say exactly what it is."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.measurement import Target, head_name
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.session import Session

if TYPE_CHECKING:
    from opal_deploy.bench.targets.networks import NamedNetwork


Runtime = Literal["eager", "compile", "onnxruntime", "tensorrt"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
PYTORCH = ("eager", "compile")


@dataclass(frozen=True)
class Setup:
    """How to run what is to be timed.

    Attributes:
        runtime: of a checkpoint or a network; files have their own.
        device: auto, cpu, cuda, cuda:N.
        threads: on the CPU; None: all that the process may use (PyTorch: as many as it chooses).
        precision: of a checkpoint or a network; files have their own. None: fp32.
        channels_last: PyTorch only: convolutions laid out as NHWC.
    """

    runtime: Runtime = "onnxruntime"
    device: str = "auto"
    threads: int | None = None
    precision: str | None = None
    channels_last: bool = False


@dataclass(frozen=True)
class LoadedTarget:
    """A model ready to be timed.

    Attributes:
        session: it.
        target: its description for the measurement.
        threads: that it computes with on the CPU; None on a GPU.
    """

    session: Session
    target: Target
    threads: int | None

    @property
    def metadata(self) -> Metadata:
        """The model's."""
        return self.session.metadata

    @property
    def title(self) -> str:
        """For people: what, in what, on what."""
        s = self.target
        threads = f", {self.threads} thread{'s' * (self.threads > 1)}" if self.threads else ""
        return f"{s.name}: {s.runtime} {s.runtime_version}, {s.precision}, {s.device}{threads}"

    @property
    def timed(self) -> str:
        """What is inside the timed region, in words."""
        where = "on the device" if self.target.device != "cpu" else "in the graph"
        normalised = f"normalised {where}" if self.metadata.input_kind == "uint8" else "normalised by numpy on the host"
        return (
            "one call of the session: from a uint8 batch [N, H0, W0, 3] in host memory, "
            f"{normalised}, to {', '.join(self.metadata.outputs)} in host memory; no decoding, resizing or drawing"
        )


def load_file(path: Path, setup: Setup) -> LoadedTarget:
    """A checkpoint, an ONNX file or an engine.

    Raises:
        ArtifactError, CheckpointError: no such model, or not one of ours. UsageError: the setup does not fit it, or a
        device is not there. MissingExtra: its runtime is not installed.
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
    opened = _engine(path, setup) if kind == "engine" else _onnx(path, setup)
    if setup.precision not in (None, opened.target.precision):
        raise UsageError(
            f"{path}: it is {opened.target.precision}, and --precision asks for {setup.precision}; a file's precision "
            "is its own: export another, or give the checkpoint"
        )
    return opened


def load_network(network: NamedNetwork, setup: Setup) -> LoadedTarget:
    """A network in the runtime and precision of the setup.

    Raises:
        UsageError: they do not go together, or a device is not there. MissingExtra: the runtime is not installed.
    """
    precision = setup.precision or "fp32"
    if setup.channels_last and setup.runtime not in PYTORCH:
        raise UsageError(f"--channels-last is PyTorch's; {setup.runtime} chooses its layouts itself")
    if setup.runtime in PYTORCH:
        return _torch(network, setup, precision)
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        if setup.runtime == "onnxruntime":
            from opal_deploy.bench.targets.networks import write_onnx

            path = Path(folder) / "timed.onnx"
            write_onnx(network, precision, path)
            try:
                return _onnx(path, setup, network)
            except ArtifactError:
                raise
            except UsageError:
                if precision != "bf16":
                    raise
                raise UsageError("ONNX Runtime has no bfloat16 convolutions here; choose fp16, or tensorrt") from None
        from opal_deploy.bench.targets.networks import write_engine

        path = write_engine(network.checkpoint, precision, Path(folder), random=network.sha256 is None)
        return _engine(path, setup, network)


def _torch(network: NamedNetwork, setup: Setup, precision: str) -> LoadedTarget:
    import torch

    from opal_deploy.bench.targets.torch_graph import TorchGraphSession

    session = TorchGraphSession(
        network.checkpoint,
        device=setup.device,
        threads=setup.threads,
        precision=precision,
        channels_last=setup.channels_last,
        compiled=setup.runtime == "compile",
    )
    target = _build_target(
        session.metadata,
        name=network.name,
        runtime=f"torch {setup.runtime}",
        version=torch.__version__,
        device=_with_gpu(session.device),
        precision=precision,
        convolutions="NHWC" if setup.channels_last else "NCHW",
        sha256=network.sha256,
    )
    return LoadedTarget(session, target, session.threads)


def _onnx(path: Path, setup: Setup, network: NamedNetwork | None = None) -> LoadedTarget:
    require("onnxruntime", "cpu", "timing an ONNX model")
    import onnxruntime

    session = OnnxSession(path, device=setup.device, threads=setup.threads)
    target = _build_target(
        session.metadata,
        name=network.name if network else path.name,
        runtime="onnxruntime",
        version=onnxruntime.__version__,
        device=_with_gpu(session.device),
        precision=session.metadata.precision,
        convolutions="as ONNX Runtime chooses",
        sha256=network.sha256 if network else compute_sha256(path),
    )
    return LoadedTarget(session, target, session.threads if session.device == "cpu" else None)


def _engine(path: Path, setup: Setup, network: NamedNetwork | None = None) -> LoadedTarget:
    from opal_deploy.runtime.tensorrt.session import EngineSession

    session = EngineSession(path, device=setup.device)
    target = _build_target(
        session.metadata,
        name=network.name if network else path.name,
        runtime=str(session.sidecar.builder["name"]),
        version=str(session.sidecar.builder["version"]),
        device=session.device,
        precision=session.metadata.precision,
        convolutions="as TensorRT chooses",
        sha256=network.sha256 if network else compute_sha256(path),
    )
    return LoadedTarget(session, target, None)


def _build_target(
    metadata: Metadata,
    *,
    name: str,
    runtime: str,
    version: str,
    device: str,
    precision: str,
    convolutions: str,
    sha256: str | None,
) -> Target:
    pictures = "uint8 NHWC" if metadata.input_kind == "uint8" else "float32 NCHW"
    return Target(
        name=name,
        backbone=metadata.backbone,
        head=head_name(metadata.head),
        runtime=runtime,
        runtime_version=version,
        device=device,
        precision=precision,
        layout=f"{pictures}; convolutions {convolutions}",
        input_size=metadata.input_size,
        num_classes=metadata.num_classes,
        prototypes_per_class=metadata.prototypes_per_class,
        sha256=sha256,
    )


def _with_gpu(device: str) -> str:
    """`cuda:0` with the GPU's name, as CUDA counts them."""
    if device == "cpu":
        return device
    from opal_deploy.runtime.tensorrt.cuda import visible_driver

    index = int(device.partition(":")[2] or 0)
    gpus = visible_driver().gpus
    return f"{device} {gpus[index].name}" if index < len(gpus) else device
