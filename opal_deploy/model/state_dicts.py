"""State dicts, names to tensors: read from files, and compared by their keys."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opal_deploy.errors import CheckpointError, first_line

# keys of each kind that an error names; the rest is counted
_MAX_KEYS = 3
_PICKLED_OBJECT = re.compile(r"GLOBAL (\S+)")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state dict (names to tensors) from a `.safetensors` file or a weights-only torch file.

    Raises:
        CheckpointError: not a state dict, or one that needs unsafe loading.
    """
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    raw = load_torch_file(path)
    if not isinstance(raw, dict) or not all(isinstance(v, Tensor) for v in raw.values()):
        raise CheckpointError(f"{path}: expected a state dict (names to tensors), found {type(raw).__name__}")
    return raw


def load_torch_file(path: Path) -> Any:
    """Read a file with `torch.load(weights_only=True)`; there is no fallback to unsafe loading.

    Raises:
        CheckpointError: the file is damaged, or holds objects that only unsafe loading accepts.
    """
    import pickle

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about formats that are refused next
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # the class or function that the file imports; other reasons are pickle's own codes
        found = _PICKLED_OBJECT.search(str(error))
        if found is None:
            raise CheckpointError(f"{path}: damaged, or not a PyTorch file; copy or save it again") from None
        raise CheckpointError(
            f"{path}: refused, since it holds a Python object ({found[1]}), and loading that may run any code; save "
            "only its tensors where it was made: torch.save(model.state_dict(), 'weights.pth')"
        ) from None
    except Exception as error:  # damaged bytes make torch's readers fail in any way: IndexError, struct.error, ...
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: a TorchScript archive, which is a program; save only its tensors: "
                f"torch.save(torch.jit.load({path.name!r}).state_dict(), 'weights.pth')"
            ) from None
        raise CheckpointError(
            f"{path}: not a readable PyTorch file ({first_line(error)}); copy or save it again"
        ) from None


def describe_key_errors(
    expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], ignored: Collection[str] = ()
) -> str:
    """Return one line about the missing, unexpected and mismatched keys of a state dict; empty if it fits.

    BatchNorm's step counters may be missing: exporters often drop them, and inference ignores them.

    Args:
        expected, found: shapes by key.
        ignored: keys that are not unexpected.
    """
    errors = {
        "missing": [key for key in expected.keys() - found.keys() if not is_counter(key)],
        "unexpected": list(found.keys() - expected.keys() - set(ignored)),
        "of another shape": [
            f"{key} {list(found[key])} instead of {list(expected[key])}"
            for key in expected.keys() & found.keys()
            if found[key] != expected[key]
        ],
    }
    return "; ".join(
        f"{len(keys)} {kind}: {', '.join(sorted(keys)[:_MAX_KEYS])}{', ...' if len(keys) > _MAX_KEYS else ''}"
        for kind, keys in errors.items()
        if keys
    )


def get_shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of a state dict by key."""
    return {key: value.shape for key, value in state.items()}


def is_counter(key: str) -> bool:
    """Return whether a key is one of BatchNorm's step counters."""
    return key.endswith("num_batches_tracked")
