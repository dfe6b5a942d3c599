"""Selection of the model and the runtime: a given file, or the best model in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import Sidecar, read_sidecar
from opal_deploy.artifact.files import CHECKPOINT_SUFFIXES, ENGINE_SUFFIX, ONNX_SUFFIX, ModelKind, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError, install_command, is_installed, require
from opal_deploy.options import RuntimeName
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.devices import split_devices
from opal_deploy.runtime.engine_session import EngineSession
from opal_deploy.runtime.openvino_session import OpenvinoSession
from opal_deploy.runtime.session import Session


def _open_checkpoint(path: Path, device: str, threads: int | None, _cuda_graphs: bool) -> Session:
    require("torch", "train", "running a checkpoint")
    from opal_deploy.runtime.torch_session import TorchSession

    return TorchSession(path, device=device, threads=threads)


def _read_checkpoint(path: Path) -> Metadata:
    from opal_deploy.model import checkpoint

    return checkpoint.build_metadata(checkpoint.load(path))


@dataclass(frozen=True)
class Runtime:
    """A runtime, for `--runtime`.

    Attributes:
        kind: the kind of model file that it runs.
        file: such a file in words.
        open: opens a session, from path, device, CPU threads (None: all) and whether to record CUDA graphs.
        read_metadata: reads a model's metadata without the runtime.
    """

    kind: ModelKind
    file: str
    open: Callable[[Path, str, int | None, bool], Session]
    read_metadata: Callable[[Path], Metadata]


RUNTIMES: dict[RuntimeName, Runtime] = {
    "onnxruntime": Runtime(
        "onnx", "an ONNX file",
        lambda path, device, threads, _: open_onnx_session(path, device=device, threads=threads),
        onnx_file.read_metadata,
    ),
    "openvino": Runtime(
        "onnx", "an ONNX file",
        lambda path, device, threads, _: OpenvinoSession(path, device=device, threads=threads),
        onnx_file.read_metadata,
    ),
    "tensorrt": Runtime(
        "engine", "an engine",
        lambda path, device, _, graphs: EngineSession(path, device=device, cuda_graphs=graphs),
        lambda path: read_sidecar(path).metadata,
    ),
    "torch": Runtime("checkpoint", "a checkpoint (.pt)", _open_checkpoint, _read_checkpoint),
}  # fmt: skip
# for `auto`: the first of a kind
_BY_KIND = {runtime.kind: runtime for runtime in reversed(RUNTIMES.values())}
_NO_BFLOAT16 = f"bf16 runs in OpenVINO ({install_command('openvino')}) and in engines"


@dataclass(frozen=True)
class ModelChoice:
    """The model that was chosen from a folder, and one line on why this one and not the others."""

    path: Path
    reason: str


def open_sessions(
    path: Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    cuda_graphs: bool = False,
    runtime: RuntimeName = "auto",
) -> list[Session]:
    """Open one session for each device.

    Args:
        path: an ONNX file, an engine or a checkpoint.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, or numbers such as `0` or `0,1`.
        threads: CPU threads; None: as many as this process may use.
        cuda_graphs: let engines record their kernels once per batch size; others ignore it.
        runtime: `auto` decides by the file: ONNX Runtime, but OpenVINO for bf16; TensorRT; PyTorch.

    Raises:
        ArtifactError: the model is missing, not exported by us, or damaged.
        MissingExtra: the runtime is not installed.
        UsageError: a device is missing, or the runtime does not run such a model.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads {threads}: expected at least 1")
    if runtime not in get_args(RuntimeName):
        raise UsageError(f"runtime {runtime!r}: expected one of {', '.join(get_args(RuntimeName))}")
    return [_open(path, name, threads, cuda_graphs, runtime) for name in split_devices(device)]


def _open(path: Path, device: str, threads: int | None, cuda_graphs: bool, runtime: RuntimeName) -> Session:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such model; expected an exported file or a checkpoint")
    check_runtime(path, runtime)
    chosen = _find_runtime(path) if runtime == "auto" else RUNTIMES[runtime]
    if runtime == "auto" and chosen.kind == "onnx" and chosen.read_metadata(path).precision == "bf16":
        chosen = RUNTIMES["openvino"]
    return chosen.open(path, device, threads, cuda_graphs)


def _find_runtime(path: Path) -> Runtime:
    """Return the runtime of a model's file by its suffix, as `auto` does."""
    kind = model_kind(path)
    if kind is None:
        raise ArtifactError(f"{path}: unknown kind of model; expected .onnx or .engine, or a checkpoint (.pt)")
    return _BY_KIND[kind]


def read_model_metadata(path: Path) -> Metadata:
    """Return a model's metadata without opening a runtime; raise ArtifactError for another or a damaged file."""
    return _find_runtime(path).read_metadata(path)


def check_runtime(path: Path, runtime: RuntimeName) -> None:
    """Raise UsageError unless a runtime runs models of this suffix."""
    kind = model_kind(path)
    if kind is not None and runtime != "auto" and kind != RUNTIMES[runtime].kind:
        raise UsageError(f"{path}: --runtime {runtime} runs {RUNTIMES[runtime].file}, not {_BY_KIND[kind].file}")


def find_newest_run(folder: Path, runtime: RuntimeName = "auto") -> Path | None:
    """Return the run with the newest `runs/*/best.*` that the runtime takes, in a working directory of `train`.

    A checkpoint counts only for `torch`: a run that is not exported is chosen if none is. None if there is no run, or
    if a checkpoint, an ONNX file or an engine lies in `folder` itself.
    """
    if any(model_kind(path) is not None for path in folder.iterdir()):
        return None
    models = [path for path in folder.glob("runs/*/best.*") if model_kind(path) is not None]
    newest = sorted(models, key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)
    kinds = ("onnx", "engine") if runtime == "auto" else (RUNTIMES[runtime].kind,)
    chosen = next((path for path in newest if model_kind(path) in kinds), next(iter(newest), None))
    return None if chosen is None else chosen.parent


def find_model(
    folder: Path,
    *,
    gpu: bool,
    check_engine: Callable[[Sidecar], str],
    runtime: RuntimeName = "auto",
    prefix: str = "",
    option: str = "--model",
) -> ModelChoice:
    """Choose the best exported model in a folder that this machine can run, if all come from one checkpoint.

    An engine that runs here comes first, then half precision where ONNX Runtime has a GPU, then float32, then the rest.

    Args:
        folder: the folder; subfolders are not searched.
        gpu: whether this machine can run ONNX Runtime on a GPU; half precision pays only there.
        check_engine: returns, from an engine's sidecar, why it cannot run here; empty if it can.
        runtime: consider only its models; for `torch` the folder's only checkpoint.
        prefix: consider only files whose names begin with this.
        option: the option that names a model instead, for errors.

    Raises:
        UsageError: there is no model, or there are models from several checkpoints.
    """
    # names of files that are being written begin with a dot
    visible = sorted(path for path in folder.glob(f"{prefix}*") if not path.name.startswith(".") and path.is_file())
    checkpoints = [path for path in visible if path.suffix in CHECKPOINT_SUFFIXES]
    if runtime == "torch":
        if len(checkpoints) != 1:
            names = ", ".join(path.name for path in checkpoints) or "none"
            raise UsageError(f"--runtime torch: expected one checkpoint here, found {names}; choose one with {option}")
        return ModelChoice(checkpoints[0], "the only checkpoint here")
    models, others = _list_models(visible, check_engine, runtime)
    if not models:
        where = "the working directory" if folder == Path() else str(folder)
        passed_over = f" ({'; '.join(others)})" if others else ""
        hint = f"export one first: opal-deploy export {checkpoints[0]}" if checkpoints else f"give one with {option}"
        raise UsageError(f"no exported model in {where}{passed_over}; {hint}")
    if len({model.metadata.source.get("sha256") or model.path.name for model in models}) > 1:
        listed = ", ".join(f"{model.path.name} (from {model.metadata.checkpoint_name})" for model in models)
        raise UsageError(f"several models here, from different checkpoints: {listed}; choose one with {option}")
    usable = sorted((model for model in models if not model.incompatibility), key=lambda model: model.rank(gpu=gpu))
    if not usable:
        reasons = "; ".join(f"{model.path.name}: {model.incompatibility}" for model in models)
        raise UsageError(f"none of the models here can run on this machine: {reasons}")
    best, *rest = usable
    where = "a GPU is usable" if gpu or best.engine else "no usable GPU"
    rejected = [f"not {model.path.name} ({model.metadata.precision})" for model in rest]
    rejected += [f"not {model.path.name} ({model.incompatibility})" for model in models if model.incompatibility]
    kind = f"{best.metadata.precision} engine" if best.engine else best.metadata.precision
    return ModelChoice(best.path, "; ".join([f"{kind}, {where}", *rejected]))


@dataclass(frozen=True)
class _Model:
    """A model in a folder; `incompatibility` says why it cannot run here, empty if it can."""

    path: Path
    metadata: Metadata
    engine: bool = False
    incompatibility: str = ""

    def rank(self, *, gpu: bool) -> tuple[bool, int, str]:
        """Return the sort key that puts the best model first, equals by name."""
        order = ("fp16", "fp32", "bf16", "int8") if gpu or self.engine else ("fp32", "fp16", "int8", "bf16")
        return not self.engine, order.index(self.metadata.precision), self.path.name


def _list_models(
    paths: list[Path], check_engine: Callable[[Sidecar], str], runtime: RuntimeName
) -> tuple[list[_Model], list[str]]:
    """Return the exported models that a runtime takes, and one line for every other file that looks like a model."""
    models, others = [], []
    for path in paths:
        if path.suffix not in (ONNX_SUFFIX, ENGINE_SUFFIX):
            continue
        try:
            check_runtime(path, runtime)
            if path.suffix == ENGINE_SUFFIX:
                sidecar = read_sidecar(path)
                models.append(_Model(path, sidecar.metadata, True, check_engine(sidecar)))
                continue
            metadata = onnx_file.read_metadata(path)
        except UsageError as error:
            others.append(str(error))
            continue
        lacking = metadata.precision == "bf16" and (runtime == "onnxruntime" or not is_installed("openvino"))
        models.append(_Model(path, metadata, incompatibility=_NO_BFLOAT16 if lacking else ""))
    return models, others
