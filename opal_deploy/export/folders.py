"""Folders that other libraries load: the model, with the files around it that they expect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import UsageError

# our own model file in such a folder
OWN = "opal.onnx"


def check_folder(option: str, folder: Path, marker: str, *, overwrite: bool) -> None:
    """Raise UsageError unless a folder can be written; `marker` is a file that an earlier export left."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option} {folder}: found a file; expected a folder to write")
    if (folder / marker).exists() and not overwrite:
        raise UsageError(f"{option} {folder}: holds a model; choose another folder or pass --overwrite")


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write text files by name, and return their paths."""
    for name, text in texts.items():
        with atomic_write(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
