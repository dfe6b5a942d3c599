"""Which model and which engine: by an explicit path, or from what lies in the working directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import Sidecar, read_sidecar
from opal_deploy.artifact.files import CHECKPOINT_SUFFIXES, ENGINE_SUFFIX, ONNX_SUFFIX, model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.runtime.devices import split_devices
from opal_deploy.runtime.session import Session


@dataclass(frozen=True)
class ModelChoice:
    """A model found without being named: which, why, and why not the others."""

    path: Path
    reason: str


def open_sessions(
    path: Path, *, device: str = "auto", threads: int | None = None, cuda_graphs: bool = False
) -> list[Session]:
    """One session a device of `device`: `auto`, `cpu`, `cuda`, `cuda:1`, or numbers such as `0` or `0,1`.

    `cuda_graphs`: engines record their kernels once a batch size; other models take no notice.

    Raises:
        ArtifactError: no such model, not ours, or damaged. MissingExtra: its engine is not installed.
        UsageError: a device that is not there.
    """
    return [_open(path, name, threads, cuda_graphs) for name in split_devices(device)]


def _open(path: Path, device: str, threads: int | None, cuda_graphs: bool) -> Session:
    if not path.exists():
        raise ArtifactError(f"{path}: no such model; expected a file of `opal-deploy export`, or a checkpoint")
    if path.is_dir():
        raise ArtifactError(f"{path}: a folder; give the model's file")
    kind = model_kind(path)
    if kind == "checkpoint":
        require("torch", "train", "running a checkpoint")
        from opal_deploy.runtime.torch_session import TorchSession

        return TorchSession(path, device=device, threads=threads)
    if kind == "engine":
        from opal_deploy.runtime.tensorrt.session import EngineSession

        return EngineSession(path, device=device, cuda_graphs=cuda_graphs)
    if kind != "onnx":
        raise ArtifactError(
            f"{path}: not a model that this version runs; expected .onnx or .engine (from `opal-deploy export`), or .pt"
        )
    from opal_deploy.runtime.onnx_session import OnnxSession

    return OnnxSession(path, device=device, threads=threads)


def find_model(folder: Path, *, gpu: bool, check_engine: Callable[[Sidecar], str]) -> ModelChoice:
    """The best of a folder's exported models that this machine can run, if they all stem from one checkpoint.

    An engine that fits comes first, then half precision where ONNX Runtime has a GPU, then float32, then the rest.

    Args:
        folder: looked at without its subfolders.
        gpu: whether this machine can run ONNX Runtime on a GPU; half precision pays only there.
        check_engine: why an engine cannot run here, by its sidecar; empty if it can.

    Raises:
        UsageError: none, or several of different checkpoints.
    """
    found, others = _exported(folder, check_engine)
    if not found:
        raise UsageError(_nothing_found(folder, others))
    origins = {model.metadata.source.get("sha256") or model.path.name for model in found}
    if len(origins) > 1:
        listed = ", ".join(f"{model.path.name} (of {model.metadata.source.get('file', 'unknown')})" for model in found)
        raise UsageError(f"several models here, of different checkpoints: {listed}; choose one with --model")
    usable = sorted((model for model in found if not model.incompatibility), key=lambda model: model.rank(gpu=gpu))
    if not usable:
        reasons = "; ".join(f"{model.path.name}: {model.incompatibility}" for model in found)
        raise UsageError(f"none of the models here can run on this machine: {reasons}")
    best, *rest = usable
    where = "a GPU is usable" if gpu or best.engine else "no usable GPU"
    passed = [f"not {model.path.name} ({model.metadata.precision})" for model in rest]
    passed += [f"not {model.path.name} ({model.incompatibility})" for model in found if model.incompatibility]
    what = f"{best.metadata.precision} engine" if best.engine else best.metadata.precision
    return ModelChoice(best.path, "; ".join([f"{what}, {where}", *passed]))


@dataclass(frozen=True)
class _Found:
    """One model of a folder; `incompatibility` says why it cannot run here."""

    path: Path
    metadata: Metadata
    engine: bool = False
    incompatibility: str = ""

    def rank(self, *, gpu: bool) -> tuple[bool, int, str]:
        """Sorts the best first; of equals the first by name."""
        wanted = ("fp16", "fp32", "bf16", "int8") if gpu or self.engine else ("fp32", "fp16", "int8", "bf16")
        return not self.engine, wanted.index(self.metadata.precision), self.path.name


def _exported(folder: Path, check_engine: Callable[[Sidecar], str]) -> tuple[list[_Found], list[str]]:
    """Our ONNX files and engines in a folder, and what else looks like a model."""
    found, others = [], []
    # files that are being written begin with a dot
    visible = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
    for path in (path for path in visible if path.suffix == ONNX_SUFFIX):
        try:
            metadata = onnx_file.read_metadata(path)
        except ArtifactError:
            others.append(f"{path.name} is not one of ours, or damaged")
            continue
        incompatibility = (
            "bf16 is for engines: ONNX Runtime has no such convolutions" if metadata.precision == "bf16" else ""
        )
        found.append(_Found(path, metadata, incompatibility=incompatibility))
    for path in (path for path in visible if path.suffix == ENGINE_SUFFIX):
        try:
            sidecar = read_sidecar(path)
        except ArtifactError:
            others.append(f"{path.name} has no sidecar of ours, or a damaged one")
            continue
        found.append(_Found(path, sidecar.metadata, engine=True, incompatibility=check_engine(sidecar)))
    return found, others


def _nothing_found(folder: Path, others: list[str]) -> str:
    where = "the working directory" if folder == Path() else str(folder)
    checkpoints = sorted(p.name for p in folder.iterdir() if p.suffix in CHECKPOINT_SUFFIXES)
    hint = "give one with --model"
    if checkpoints:
        hint = f"export one first: opal-deploy export {checkpoints[0]}"
    seen = f" ({'; '.join(others)})" if others else ""
    return f"no exported model in {where}{seen}; {hint}"
