"""Which model and which engine: by an explicit path, or from what lies in the working directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.errors import ArtifactError, UsageError, require
from opal_deploy.runtime.session import Session

ONNX_SUFFIX = ".onnx"
CHECKPOINT_SUFFIXES = (".pt", ".pth")


@dataclass(frozen=True)
class Choice:
    """A model found without being named: which, why, and why not the others."""

    path: Path
    reason: str


def open_sessions(path: Path, *, device: str = "auto", threads: int | None = None) -> list[Session]:
    """One session a device of `device`: `auto`, `cpu`, `cuda`, `cuda:1`, or numbers such as `0` or `0,1`.

    Raises:
        ArtifactError: no such model, not ours, or damaged. MissingExtra: its engine is not installed.
        UsageError: a device that is not there.
    """
    return [_open(path, name, threads) for name in _devices(device)]


def _open(path: Path, device: str, threads: int | None) -> Session:
    if not path.exists():
        raise ArtifactError(f"{path}: no such model; expected an ONNX file of `opal-deploy export`, or a checkpoint")
    if path.is_dir():
        raise ArtifactError(f"{path}: a folder; give the model's file")
    if path.suffix in CHECKPOINT_SUFFIXES:
        require("torch", "train", "running a checkpoint")
        from opal_deploy.runtime.torch_session import TorchSession

        return TorchSession(path, device=device, threads=threads)
    if path.suffix != ONNX_SUFFIX:
        raise ArtifactError(
            f"{path}: not a model that this version runs; expected .onnx (from `opal-deploy export`) or .pt"
        )
    from opal_deploy.runtime.onnx_session import OnnxSession

    return OnnxSession(path, device=device, threads=threads)


def _devices(text: str) -> list[str]:
    if text.split(":")[0] in ("auto", "cpu", "cuda"):
        return [text]
    numbers = text.split(",")
    if not all(number.isdigit() for number in numbers) or len(set(numbers)) != len(numbers):
        raise UsageError(f"device {text!r}: expected auto, cpu, cuda, cuda:N, or numbers such as 0 or 0,1")
    return [f"cuda:{number}" for number in numbers]


def find_model(folder: Path, *, gpu: bool) -> Choice:
    """The best of a folder's exported models, if they all stem from one checkpoint.

    Args:
        folder: looked at without its subfolders.
        gpu: whether this machine can run ONNX Runtime on a GPU; half precision pays only there.

    Raises:
        UsageError: none, or several of different checkpoints.
    """
    found, others = _exported(folder)
    if not found:
        raise UsageError(_nothing_found(folder, others))
    origins = {metadata.source.get("sha256") or path.name for path, metadata in found}
    if len(origins) > 1:
        listed = ", ".join(f"{path.name} (of {metadata.source.get('file', 'unknown')})" for path, metadata in found)
        raise UsageError(f"several models here, of different checkpoints: {listed}; choose one with --model")
    wanted = "fp16" if gpu else "fp32"
    # stable: the wanted precision first, then by name
    ranked = sorted(found, key=lambda entry: (entry[1].precision != wanted, entry[0].name))
    path, metadata = ranked[0]
    where = "a GPU is usable" if gpu else "no usable GPU"
    rest = "; ".join(f"not {p.name} ({m.precision})" for p, m in ranked[1:])
    reason = f"{metadata.precision}, {where}" + (f"; {rest}" if rest else "")
    return Choice(path, reason)


def _exported(folder: Path) -> tuple[list[tuple[Path, Metadata]], list[str]]:
    """Our ONNX files in a folder, and what else looks like a model."""
    found, others = [], []
    for path in sorted(folder.glob("*.onnx")):
        try:
            found.append((path, onnx_file.read_metadata(path)))
        except ArtifactError:
            others.append(f"{path.name} is not one of ours, or damaged")
    return found, others


def _nothing_found(folder: Path, others: list[str]) -> str:
    where = "the working directory" if folder == Path() else str(folder)
    checkpoints = sorted(p.name for p in folder.iterdir() if p.suffix in CHECKPOINT_SUFFIXES)
    hint = "give one with --model"
    if checkpoints:
        hint = f"export one first: opal-deploy export {checkpoints[0]}"
    seen = f" ({'; '.join(others)})" if others else ""
    return f"no exported model in {where}{seen}; {hint}"
