"""The models to measure: checkpoints, ONNX files, engines and built networks, loaded in a runtime and described."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.measurement import Target, head_name
from opal_deploy.bench.options import CompareOptions, PipelineOptions, Precision, Runtime, SweepOptions
from opal_deploy.errors import ArtifactError, OpalError, UsageError, require
from opal_deploy.logs import Log
from opal_deploy.runtime.cuda_options import CudaOptions, parse_cuda_options
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.select import check_runtime, open_sessions
from opal_deploy.runtime.session import PipelinedSession, Session

if TYPE_CHECKING:
    from opal_deploy.bench.networks import NamedNetwork

RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
PYTORCH_RUNTIMES = ("eager", "compile")
# the runtimes that --cuda-graphs is for
RECORDED = ("compile", "tensorrt")


@dataclass(frozen=True)
class Setup:
    """How a model runs.

    Attributes:
        runtime: of a checkpoint or a network; ONNX files and engines have their own.
        threads: CPU threads; None: all that the process may use (PyTorch: its own choice).
        precision: of a checkpoint or a network, None for fp32; ONNX files and engines have their own.
        cuda_graphs: record the kernels of an engine or of torch.compile as CUDA graphs.
    """

    runtime: Runtime = "onnxruntime"
    device: str = "auto"
    threads: int | None = None
    precision: Precision | None = None
    channels_last: bool = False
    cuda_options: CudaOptions = field(default_factory=CudaOptions)
    cuda_graphs: bool = False

    def check_fits(self, *, onnxruntime: bool = False, cuda_graphs: bool = False) -> None:
        """Raise UsageError if an option belongs to another runtime."""
        if str(self.cuda_options) and not onnxruntime:
            raise UsageError("--ort-option applies only to ONNX Runtime on a GPU")
        if self.cuda_graphs and not cuda_graphs:
            raise UsageError(
                "--cuda-graphs applies only to engines, and to compile on a GPU; for ONNX Runtime give --ort-option "
                "enable_cuda_graph=1"
            )

    def for_runtime(self, runtime: Runtime) -> Setup:
        """Return these settings for another runtime, without the options that it lacks."""
        return replace(
            self,
            runtime=runtime,
            channels_last=self.channels_last and runtime in PYTORCH_RUNTIMES,
            cuda_options=self.cuda_options if runtime == "onnxruntime" else CudaOptions(),
            cuda_graphs=self.cuda_graphs and runtime in RECORDED,
        )


@dataclass(frozen=True)
class LoadedTarget:
    """A model ready to be timed.

    Attributes:
        threads: threads on the CPU; None on a GPU.
        path: the ONNX file or engine; None for a network that a command built, or a checkpoint's.
        cuda_options: options of ONNX Runtime on a GPU.
    """

    session: Session
    target: Target
    threads: int | None
    path: Path | None = None
    cuda_options: CudaOptions = field(default_factory=CudaOptions)

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
    def depth(self) -> int:
        """Batches that the session takes at a time; 1 for most on a CPU."""
        return self.session.depth if isinstance(self.session, PipelinedSession) else 1

    def describe_timing(self, depth: int) -> str:
        """Return the description of the timed region, with `depth` batches in flight, for `Measurement.timed`."""
        where = "on the device" if self.target.device != "cpu" else "in the graph"
        memory = "host memory" if self.target.device == "cpu" else "page-locked host memory"
        normalised = (
            f"normalised {where}" if self.metadata.input_kind != "float32" else "normalised by numpy on the host"
        )
        calls = "one call of the session" if depth == 1 else f"batches with {depth} in flight, each"
        return (
            f"{calls}: from a uint8 batch [N, H0, W0, 3] in {memory}, "
            f"{normalised}, to {', '.join(self.metadata.outputs)} in host memory; no decoding, resizing or drawing"
        )


def build_setups(options: CompareOptions | SweepOptions) -> list[Setup]:
    """Return every runtime with every precision; an option applies only to the runtimes that have it.

    `bench compare` has one of each.

    Raises:
        UsageError: an unknown --ort-option.
    """
    first = Setup(
        device=options.device,
        threads=options.threads,
        channels_last=options.channels_last,
        cuda_options=parse_cuda_options(options.ort_option),
        cuda_graphs=options.cuda_graphs,
    )
    if isinstance(options, CompareOptions):
        return [replace(first, runtime=options.runtime, precision=options.precision)]
    runtimes: tuple[Runtime, ...] = options.runtime or ("onnxruntime",)
    bases = map(first.for_runtime, runtimes) if len(runtimes) > 1 else [replace(first, runtime=runtimes[0])]
    return [replace(base, precision=precision) for base in bases for precision in options.precision or (None,)]


def load_targets(
    models: Sequence[Path], networks: Iterator[NamedNetwork], setups: Sequence[Setup], log: Log
) -> Iterator[LoadedTarget]:
    """Load every model in every setup, each when needed; report and skip those that cannot run here.

    ONNX files and engines have their own runtime and precision and are loaded once.

    Raises:
        UsageError: there is no model.
        OpalError: no model can run here; the last one's error.
    """
    loaded = None
    for loaded in load_usable(_list_loaders(models, networks, setups), log):
        log(loaded.title)
        yield loaded
    if loaded is None:
        raise UsageError("nothing to time: give --model FILE or --backbone NAME (both repeatable)")


def load_usable(loaders: Iterable[tuple[str, Callable[[], LoadedTarget]]], log: Log) -> Iterator[LoadedTarget]:
    """Yield the results of named loaders, each called when needed; report and skip those that cannot run here.

    Raises:
        OpalError: none can run here; the last one's error.
    """
    # kept back until another model runs: the only model's error is the command's own
    unusable: list[tuple[str, OpalError]] = []
    loaded = None
    for name, load in loaders:
        try:
            loaded = load()
        except OpalError as error:
            unusable.append((name, error))
            continue
        _log_unusable(unusable, log)
        yield loaded
    last = unusable.pop()[1] if loaded is None and unusable else None
    _log_unusable(unusable, log)
    if last is not None:
        raise last


def _log_unusable(unusable: list[tuple[str, OpalError]], log: Log) -> None:
    while unusable:
        name, error = unusable.pop(0)
        log(f"{name}: not usable: {error}")


def _list_loaders(
    models: Sequence[Path], networks: Iterator[NamedNetwork], setups: Sequence[Setup]
) -> Iterator[tuple[str, Callable[[], LoadedTarget]]]:
    for path in models:
        for setup in setups if model_kind(path) == "checkpoint" else setups[:1]:
            yield _loader_name(path.name, setup), partial(load_file, path, setup)
    for network in networks:
        for setup in setups:
            yield _loader_name(network.name, setup), partial(load_network, network, setup)


def _loader_name(name: str, setup: Setup) -> str:
    return f"{name} in {setup.runtime}, {setup.precision or 'fp32'}"


def load_file(path: Path, setup: Setup) -> LoadedTarget:
    """Load a checkpoint, an ONNX file or an engine.

    Raises:
        ArtifactError, CheckpointError: not a model.
        UsageError: the setup does not fit the model, or the device does not exist.
        MissingExtra: the runtime is not installed.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such model; expected a checkpoint (.pt), an ONNX file or an engine")
    kind = model_kind(path)
    if kind == "checkpoint":
        require("torch", "export", "timing a checkpoint")
        from opal_deploy.bench.networks import load_checkpoint_network

        return load_network(load_checkpoint_network(path), setup)
    if kind is None:
        raise ArtifactError(f"{path}: not a model; expected .pt, .onnx or .engine")
    loaded = _load_engine(path, setup) if kind == "engine" else _load_onnx(path, setup)
    if setup.precision not in (None, loaded.target.precision):
        raise UsageError(
            f"{path}: its precision is {loaded.target.precision}, --precision asks for {setup.precision}; export it in "
            "that precision, or give the checkpoint"
        )
    return replace(loaded, path=path, cuda_options=setup.cuda_options)


def load_for_inference(path: Path, options: PipelineOptions) -> LoadedTarget:
    """Load a model as `infer` does: a checkpoint in the reference session.

    Raises:
        ArtifactError, CheckpointError: not a model.
        UsageError: the device does not exist, or the runtime cannot run this model here.
        MissingExtra: the runtime is not installed.
    """
    runtime, device, threads = options.runtime, options.device, options.threads
    setup = Setup(device=device, threads=threads, cuda_graphs=options.cuda_graphs)
    check_runtime(path, runtime)
    if runtime == "openvino" and path.is_file():
        return _load_openvino(path, setup)
    if model_kind(path) != "checkpoint" or not path.is_file():
        return load_file(path, setup)
    setup.check_fits()
    (session,) = open_sessions(path, device=device, threads=threads)
    import torch

    from opal_deploy.runtime.torch_session import torch_device

    used = torch_device(device)
    target = _describe(path, session.metadata, "torch eager", torch.__version__, str(used), "NCHW", "")
    target = replace(target, layout="uint8 NHWC, normalised on the device; convolutions NCHW")
    return LoadedTarget(session, target, torch.get_num_threads() if used.type == "cpu" else None)


def load_network(network: NamedNetwork, setup: Setup) -> LoadedTarget:
    """Load a network in the setup's runtime and precision.

    Raises:
        UsageError: the runtime lacks the precision, or the device does not exist.
        MissingExtra: the runtime is not installed.
    """
    precision = setup.precision or "fp32"
    if setup.channels_last and setup.runtime not in PYTORCH_RUNTIMES:
        raise UsageError(f"--channels-last applies only to eager and compile; {setup.runtime} chooses its own layouts")
    if setup.runtime in PYTORCH_RUNTIMES:
        return _load_torch(network, setup)
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        if setup.runtime == "onnxruntime":
            from opal_deploy.bench.networks import write_onnx

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
        from opal_deploy.bench.networks import write_engine

        path = write_engine(network.checkpoint, precision, Path(folder), random=network.sha256 is None)
        return _load_engine(path, setup, network)


def _load_torch(network: NamedNetwork, setup: Setup) -> LoadedTarget:
    import torch

    from opal_deploy.bench.networks import TorchGraphSession

    session = TorchGraphSession(network.checkpoint, setup)
    setup.check_fits(cuda_graphs=session.cuda_graphs)
    target = _describe(
        network, session.metadata, f"torch {setup.runtime}", torch.__version__, session.device,
        "NHWC" if setup.channels_last else "NCHW", session.compile_options,
    )  # fmt: skip
    return LoadedTarget(session, replace(target, precision=setup.precision or "fp32"), session.threads)


def _load_onnx(path: Path, setup: Setup, network: NamedNetwork | None = None) -> LoadedTarget:
    require("onnxruntime", "cpu", "timing an ONNX model")
    import onnxruntime

    session = open_onnx_session(path, device=setup.device, threads=setup.threads, cuda_options=setup.cuda_options)
    setup.check_fits(onnxruntime=session.device != "cpu")
    target = _describe(
        network or path, session.metadata, "onnxruntime", onnxruntime.__version__, session.device,
        "as ONNX Runtime chooses", str(setup.cuda_options),
    )  # fmt: skip
    return LoadedTarget(session, target, session.threads if session.device == "cpu" else None)


def _load_openvino(path: Path, setup: Setup) -> LoadedTarget:
    from opal_deploy.runtime.openvino_session import OpenvinoSession

    setup.check_fits()
    session = OpenvinoSession(path, device=setup.device, threads=setup.threads)
    target = _describe(path, session.metadata, "openvino", session.version, "cpu", "as OpenVINO chooses", "")
    return LoadedTarget(session, target, session.threads)


def _load_engine(path: Path, setup: Setup, network: NamedNetwork | None = None) -> LoadedTarget:
    from opal_deploy.runtime.engine_session import EngineSession

    setup.check_fits(cuda_graphs=True)
    session = EngineSession(path, device=setup.device, cuda_graphs=setup.cuda_graphs)
    builder = session.sidecar.builder
    target = _describe(
        network or path, session.metadata, str(builder["name"]), str(builder["version"]), session.device,
        "as TensorRT chooses", "CUDA graphs" * setup.cuda_graphs,
    )  # fmt: skip
    return LoadedTarget(session, target, None)


def _describe(
    source: Path | NamedNetwork, metadata: Metadata, runtime: str, version: str, device: str, layout: str, options: str
) -> Target:
    """Return the description of a model; `layout` is the convolutions' layout."""
    images = "float32 NCHW" if metadata.input_kind == "float32" else "uint8 NHWC"
    return Target(
        source.name, metadata.backbone, head_name(metadata.head), runtime, version, _with_gpu_name(device),
        metadata.precision, f"{images}; convolutions {layout}", metadata.input_size, metadata.num_classes,
        metadata.prototypes_per_class, compute_sha256(source) if isinstance(source, Path) else source.sha256, options,
    )  # fmt: skip


def _with_gpu_name(device: str) -> str:
    """Return `cuda:0` followed by the GPU's name, or `cpu`."""
    if device == "cpu" or " " in device:
        return device
    from opal_deploy.runtime.cuda import visible_driver

    gpu = visible_driver().find_gpu(int(device.partition(":")[2] or 0))
    return f"{device} {gpu.name}" if gpu else device
