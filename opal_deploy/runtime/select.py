"""Selection of the model and the runtime: a given file, or the best model in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import CHECKPOINT_SUFFIXES, ENGINE_SUFFIX, ONNX_SUFFIX, ModelKind, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError, install_command, is_installed, require
from opal_deploy.options import RuntimeName
from opal_deploy.runtime.devices import split_devices
from opal_deploy.runtime.session import Session

if TYPE_CHECKING:
    from opal_deploy.artifact.engine_file import Sidecar


def _open_onnx(path: Path, device: str, threads: int | None, _cuda_graphs: bool) -> Session:
    from opal_deploy.runtime.cuda_session import open_onnx_session

    return open_onnx_session(path, device=device, threads=threads)


def _open_openvino(path: Path, device: str, threads: int | None, _cuda_graphs: bool) -> Session:
    from opal_deploy.runtime.openvino_session import OpenvinoSession

    return OpenvinoSession(path, device=device, threads=threads)


def _open_engine(path: Path, device: str, _threads: int | None, cuda_graphs: bool) -> Session:
    from opal_deploy.runtime.engine_session import EngineSession

    return EngineSession(path, device=device, cuda_graphs=cuda_graphs)


def _read_engine(path: Path) -> Metadata:
    from opal_deploy.artifact.engine_file import read_sidecar

    return read_sidecar(path).metadata


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
    "onnxruntime": Runtime("onnx", "an ONNX file", _open_onnx, onnx_file.read_metadata),
    "openvino": Runtime("onnx", "an ONNX file", _open_openvino, onnx_file.read_metadata),
    "tensorrt": Runtime("engine", "an engine", _open_engine, _read_engine),
    "torch": Runtime("checkpoint", "a checkpoint (.pt)", _open_checkpoint, _read_checkpoint),
}
# for `auto`: the first of a kind
_BY_KIND = {runtime.kind: runtime for runtime in reversed(RUNTIMES.values())}
_NO_BFLOAT16 = f"bf16 runs in OpenVINO ({install_command('openvino')}) and in engines"


@dataclass(frozen=True)
class ModelChoice:
    """The model that was chosen from a folder, and one line on why this one and not the others."""

    path: Path
    reason: str


@dataclass(frozen=True)
class RunChoice:
    """The run whose model is taken, and the newer runs without a model for the runtime, the newest first."""

    folder: Path
    newer: tuple[Path, ...] = ()

    def describe(self) -> str:
        """Return in words which run this is."""
        if not self.newer:
            return "of the newest run in runs"
        names = ", ".join(map(str, self.newer))
        return f"of the newest exported run in runs; newer, but not exported: {names}"


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
    if not path.exists():
        raise ArtifactError(f"{path}: no such model; expected an exported file or a checkpoint")
    if path.is_dir():
        raise ArtifactError(f"{path}: is a folder; give the model's file")
    check_runtime(path, runtime)
    found = _find_runtime(path) if runtime == "auto" else RUNTIMES[runtime]
    if runtime == "auto" and found.kind == "onnx" and found.read_metadata(path).precision == "bf16":
        found = RUNTIMES["openvino"]
    return found.open(path, device, threads, cuda_graphs)


def _find_runtime(path: Path) -> Runtime:
    """Return the runtime of a model's file by its suffix, as `auto` does."""
    kind = model_kind(path)
    if kind is None:
        raise ArtifactError(
            f"{path}: unknown kind of model; expected .onnx or .engine (from `opal-deploy export`), or .pt"
        )
    return _BY_KIND[kind]


def read_model_metadata(path: Path) -> Metadata:
    """Return a model's metadata without opening a runtime; raise ArtifactError for another or a damaged file."""
    return _find_runtime(path).read_metadata(path)


def check_runtime(path: Path, runtime: RuntimeName) -> None:
    """Raise UsageError unless a runtime runs models of this suffix."""
    kind = model_kind(path)
    if kind is not None and runtime != "auto" and kind != RUNTIMES[runtime].kind:
        raise UsageError(
            f"{path}: {_BY_KIND[kind].file}, and --runtime {runtime} runs {RUNTIMES[runtime].file}; give such a model, "
            "or leave out --runtime"
        )


def find_newest_run(folder: Path, runtime: RuntimeName = "auto") -> RunChoice | None:
    """Return the run with the newest `runs/*/best.*` that the runtime takes, in a working directory of `train`.

    A checkpoint counts only for `torch`: a run that is not exported is chosen if none is. None if there is no run, or
    if a checkpoint, an ONNX file or an engine lies in `folder` itself.
    """
    if any(model_kind(path) is not None for path in folder.iterdir()):
        return None
    ages = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/best.*") if model_kind(path) is not None}
    newest = sorted(ages, key=lambda path: (ages[path], path), reverse=True)
    kinds = ("onnx", "engine") if runtime == "auto" else (RUNTIMES[runtime].kind,)
    chosen = next((path for path in newest if model_kind(path) in kinds), next(iter(newest), None))
    if chosen is None:
        return None
    newer = dict.fromkeys(path.parent for path in newest[: newest.index(chosen)] if path.parent != chosen.parent)
    return RunChoice(chosen.parent, tuple(newer))


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
    Where ONNX Runtime has a GPU, an engine of TensorRT for RTX for a GPU that NVIDIA does not list comes last.

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
    if runtime == "torch":
        return _find_checkpoint(folder, prefix, option)
    models, others = _list_models(folder, check_engine, runtime, prefix)
    if runtime != "auto":
        wanted = [model for model in models if model.engine == (RUNTIMES[runtime].kind == "engine")]
        others += [f"--runtime {runtime} does not run {model.path.name}" for model in models if model not in wanted]
        models = wanted
    if not models:
        raise UsageError(_explain_no_model(folder, others, prefix, option))
    origins = {model.metadata.source.get("sha256") or model.path.name for model in models}
    if len(origins) > 1:
        listed = ", ".join(
            f"{model.path.name} (from {model.metadata.source.get('file', 'unknown')})" for model in models
        )
        raise UsageError(f"several models here, from different checkpoints: {listed}; choose one with {option}")
    usable = sorted((model for model in models if not model.incompatibility), key=lambda model: model.rank(gpu=gpu))
    if not usable:
        reasons = "; ".join(f"{model.path.name}: {model.incompatibility}" for model in models)
        raise UsageError(f"none of the models here can run on this machine: {reasons}")
    best, *rest = usable
    where = "a GPU is usable" if gpu or best.engine else "no usable GPU"
    rejected = [f"not {model.path.name} ({model.doubt or model.metadata.precision})" for model in rest]
    rejected += [f"not {model.path.name} ({model.incompatibility})" for model in models if model.incompatibility]
    what = f"{best.metadata.precision} engine" if best.engine else best.metadata.precision
    return ModelChoice(best.path, "; ".join([f"{what}, {where}", *rejected]))


def _find_checkpoint(folder: Path, prefix: str, option: str) -> ModelChoice:
    paths = _list_checkpoints(folder, prefix)
    if len(paths) != 1:
        found = f"several checkpoints here: {', '.join(path.name for path in paths)}" if paths else "no checkpoint here"
        raise UsageError(f"--runtime torch: {found}; choose one with {option}")
    return ModelChoice(paths[0], "the only checkpoint here")


def _list_checkpoints(folder: Path, prefix: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{prefix}*") if path.suffix in CHECKPOINT_SUFFIXES)


@dataclass(frozen=True)
class _Model:
    """A model in a folder; `incompatibility` says why it cannot run here, `doubt` why it may not; else empty."""

    path: Path
    metadata: Metadata
    engine: bool = False
    incompatibility: str = ""
    doubt: str = ""

    def rank(self, *, gpu: bool) -> tuple[int, int, str]:
        """Return the sort key that puts the best model first, equals by name."""
        order = ("fp16", "fp32", "bf16", "int8") if gpu or self.engine else ("fp32", "fp16", "int8", "bf16")
        kind = 1 if not self.engine else 2 if self.doubt and gpu else 0
        return kind, order.index(self.metadata.precision), self.path.name


def _list_models(
    folder: Path, check_engine: Callable[[Sidecar], str], runtime: RuntimeName, prefix: str
) -> tuple[list[_Model], list[str]]:
    """Return the exported models in a folder, and one line for every other file that looks like a model."""
    from opal_deploy.artifact.engine_file import read_sidecar
    from opal_deploy.runtime.tensorrt import find_doubt

    models, others = [], []
    # names of files that are being written begin with a dot
    visible = sorted(path for path in folder.glob(f"{prefix}*") if not path.name.startswith(".") and path.is_file())
    for path in (path for path in visible if path.suffix == ONNX_SUFFIX):
        try:
            metadata = onnx_file.read_metadata(path)
        except ArtifactError:
            others.append(f"{path.name} was not exported by opal-deploy, or is damaged")
            continue
        lacking = metadata.precision == "bf16" and (runtime == "onnxruntime" or not is_installed("openvino"))
        models.append(_Model(path, metadata, incompatibility=_NO_BFLOAT16 if lacking else ""))
    for path in (path for path in visible if path.suffix == ENGINE_SUFFIX):
        try:
            sidecar = read_sidecar(path)
        except ArtifactError:
            others.append(f"{path.name} has no sidecar, or a damaged one")
            continue
        models.append(_Model(path, sidecar.metadata, True, check_engine(sidecar), find_doubt(sidecar)))
    return models, others


def _explain_no_model(folder: Path, others: list[str], prefix: str, option: str) -> str:
    where = "the working directory" if folder == Path() else str(folder)
    checkpoints = _list_checkpoints(folder, prefix)
    hint = f"give one with {option}"
    if checkpoints:
        hint = f"export one first: opal-deploy export {checkpoints[0]}"
    seen = f" ({'; '.join(others)})" if others else ""
    return f"no exported model in {where}{seen}; {hint}"
