"""The models to measure: checkpoints, ONNX files, engines and built networks, loaded in a runtime and described."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.files import compute_sha256, model_kind
from opal_deploy.bench.measurement import Target, head_name
from opal_deploy.bench.options import PipelineOptions, Precision, Runtime, SweepOptions
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.devices import parse_device
from opal_deploy.runtime.engine_session import EngineSession
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import PinningSession, Session

if TYPE_CHECKING:
    from opal_deploy.bench.networks import NamedNetwork


@dataclass(frozen=True)
class TimedModel:
    """A model ready to be timed; `threads` on the CPU, None on a GPU."""

    session: Session
    target: Target
    threads: int | None

    def describe_timing(self, depth: int) -> str:
        """Return the description of the timed region, with `depth` batches in flight, for `Measurement.timed`."""
        metadata, memory = self.session.metadata, "host memory"
        if isinstance(self.session, PinningSession):
            memory = "page-locked host memory"
        what = "one call of the session" if depth == 1 else f"batches with {depth} in flight, each"
        where = "by numpy on the host" if metadata.input_kind == "float32" else "in the graph"
        return (
            f"{what}: from a uint8 batch [N, H0, W0, 3] in {memory}, normalised {where}, to "
            f"{', '.join(metadata.outputs)} in host memory; no decoding, resizing or drawing"
        )


def list_setups(options: SweepOptions) -> list[SweepOptions]:
    """Return the options once for every runtime and precision; of several runtimes each keeps what it knows."""
    runtimes: tuple[Runtime, ...] = options.runtime or ("onnxruntime",)
    precisions: list[tuple[Precision, ...]] = [(precision,) for precision in options.precision] or [()]
    setups = []
    for runtime, precision in itertools.product(runtimes, precisions):
        graphs = options.cuda_graphs and (runtime in ("compile", "tensorrt") or len(runtimes) == 1)
        setups.append(replace(options, runtime=(runtime,), precision=precision, cuda_graphs=graphs))
    return setups


def load_model(source: Path | NamedNetwork, setup: SweepOptions) -> TimedModel:
    """Load a checkpoint, an ONNX file, an engine or a built network, in one of `list_setups`.

    Raises UsageError for another file, a setup that does not fit, or a device or runtime that is missing.
    """
    if not isinstance(source, Path):
        return _load_network(source, setup)
    kind = model_kind(source)
    if kind is None or not source.is_file():
        raise ArtifactError(f"{source}: no such model; expected a checkpoint (.pt), an ONNX file or an engine")
    if kind == "checkpoint":
        require("torch", "export", "timing a checkpoint")
        from opal_deploy.bench.networks import load_checkpoint_network

        return _load_network(load_checkpoint_network(source), setup)
    model = _open_file(source, source, setup)
    if setup.precision and setup.precision[0] != model.target.precision:
        wanted = f"its precision is {model.target.precision}, not {setup.precision[0]}"
        raise UsageError(f"{source}: {wanted}; export it in that precision, or give the checkpoint")
    return model


def load_for_inference(path: Path, options: PipelineOptions) -> TimedModel:
    """Load a model as `infer` does, on one device; raises what `runtime.select.open_sessions` raises."""
    parse_device(options.device)
    (session,) = open_sessions(
        path, device=options.device, threads=options.threads, cuda_graphs=options.cuda_graphs, runtime=options.runtime
    )
    recorded = "CUDA graphs" * (options.cuda_graphs and isinstance(session, EngineSession))
    return _describe(path, session, recorded, cuda_graphs=options.cuda_graphs)


def _load_network(network: NamedNetwork, setup: SweepOptions) -> TimedModel:
    runtime, precision = setup.runtime[0], (setup.precision or ("fp32",))[0]
    from opal_deploy.bench.networks import TorchGraphSession, write_model

    if runtime in ("eager", "compile"):
        session = TorchGraphSession(network.checkpoint, setup, precision)
        return _describe(network, session, session.options, cuda_graphs=setup.cuda_graphs)
    if runtime == "onnxruntime" and precision in ("bf16", "int8"):
        raise UsageError(f"ONNX Runtime in {precision} is timed from a file: export it, and give that file")
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as folder:
        return _open_file(write_model(network, precision, Path(folder), engine=runtime == "tensorrt"), network, setup)


def _open_file(path: Path, source: Path | NamedNetwork, setup: SweepOptions) -> TimedModel:
    session: Session
    if model_kind(path) == "engine":
        session = EngineSession(path, device=setup.device, cuda_graphs=setup.cuda_graphs)
        used = "CUDA graphs" * setup.cuda_graphs
    else:
        require("onnxruntime", "cpu", "timing an ONNX model")
        session, used = open_onnx_session(path, device=setup.device, threads=setup.threads), ""
    return _describe(source, session, used, cuda_graphs=setup.cuda_graphs)


def _describe(source: Path | NamedNetwork, session: Session, used: str, *, cuda_graphs: bool) -> TimedModel:
    """Return a session that uses the options `used`, described; UsageError if it ignores one that was given."""
    device, metadata, words = session.device.partition(" ")[0], session.metadata, session.description.split()
    runtime = "openvino" if words[0] == "OpenVINO" else f"torch {'compile' if words[2] == 'compile' else 'eager'}"
    if isinstance(session, EngineSession):
        runtime = str(session.sidecar.builder["name"])
    elif isinstance(session, OnnxSession):
        runtime = "onnxruntime"
    if cuda_graphs and "CUDA graphs" not in used:
        raise UsageError("--cuda-graphs applies only to engines, and to compile on a GPU")
    target = Target(
        source.name, metadata.backbone, head_name(metadata.head), runtime, session.description, device,
        getattr(session, "precision", metadata.precision),
        "float32 NCHW" if metadata.input_kind == "float32" else "uint8 NHWC",
        metadata.input_size, metadata.num_classes, metadata.prototypes_per_class,
        compute_sha256(source) if isinstance(source, Path) else source.sha256, used,
    )  # fmt: skip
    return TimedModel(session, target, getattr(session, "threads", None) if device == "cpu" else None)
