"""The contents of a PyTorch checkpoint, read without torch and without running anything in it.

A `.pt` file is a zip archive whose `data.pkl` describes plain values and tensors, whose bytes lie next to it. The
description is unpickled with an allowlist of names, and tensors become their shapes.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.errors import ArtifactError

# a description has kilobytes; anything larger is not a checkpoint
_MAX_DESCRIPTION = 64 * 1024 * 1024


@dataclass(frozen=True)
class TensorInfo:
    """The shape of a tensor that was not loaded."""

    shape: tuple[int, ...]


def read_index(path: Path) -> dict[str, Any]:
    """Return a checkpoint's dictionary with a TensorInfo in place of every tensor.

    Raises:
        ArtifactError: the file is missing, not what torch.save writes, or holds more than tensors and plain values.
    """
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((n for n in archive.namelist() if n.endswith("/data.pkl")), None)
            if name is None or archive.getinfo(name).file_size > _MAX_DESCRIPTION:
                raise ArtifactError(f"{path}: not a PyTorch checkpoint; expected what torch.save writes")
            with archive.open(name) as stream:
                document = _Unpickler(stream).load()
    except ArtifactError:
        raise
    except Exception as error:  # damaged bytes make zipfile and pickle fail in any way
        raise ArtifactError(f"{path}: not what torch.save writes, or refused ({error}); save its state_dict") from None
    if not isinstance(document, dict):
        raise ArtifactError(f"{path}: expected a dictionary, found {type(document).__name__}")
    return document


class _Storage:
    """A stand-in for torch's storage classes."""


def _rebuild_tensor(storage: Any, offset: int, size: tuple[int, ...], *_: Any) -> TensorInfo:
    return TensorInfo(tuple(int(s) for s in size))


_ALLOWED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return _Storage
        if (allowed := _ALLOWED.get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return allowed

    def persistent_load(self, pid: Any) -> None:
        """Load no storage."""
