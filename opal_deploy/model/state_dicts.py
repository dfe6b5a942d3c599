"""State dicts, names to tensors: read from files, and compared by their keys."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opal_deploy.errors import CheckpointError, first_line

# keys of each kind that an error names; the rest is counted
_MAX_KEYS = 3
# keys of checkpoints that hold a state dict
_NESTED = ("state_dict", "model_state_dict", "model")
_PICKLED_OBJECT = re.compile(r"GLOBAL (\S+)")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state dict (names to tensors) from a `.safetensors` or a weights-only torch file; else CheckpointError."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    return find_state_dict(load_torch_file(path), str(path))


def find_state_dict(raw: Any, origin: str) -> dict[str, Tensor]:
    """Return the state dict that an object is, or holds as Lightning saves it; else CheckpointError with `origin`."""
    raw = next((raw[key] for key in _NESTED if isinstance(raw, Mapping) and isinstance(raw.get(key), Mapping)), raw)
    if not isinstance(raw, Mapping) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in raw.items()):
        raise CheckpointError(f"{origin}: expected a state dict (names to tensors), found {type(raw).__name__}")
    return dict(raw)


def strip_prefix(state: Mapping[str, Tensor], expected: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors below the one prefix, such as `module.` or `model.`, that makes names the expected ones.

    The state dict is returned as it is if it has an expected name, or if no prefix or several do.
    """
    longest = max(expected, key=len)
    prefixes = {key.removesuffix(longest) for key in state if key.endswith(f".{longest}")}
    if len(prefixes) != 1 or not state.keys().isdisjoint(expected):
        return dict(state)
    prefix = prefixes.pop()
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def load_torch_file(path: Path) -> Any:
    """Read a file with `torch.load(weights_only=True)`; there is no fallback to unsafe loading.

    Raises:
        CheckpointError: the file is damaged, or holds objects that only unsafe loading accepts.
    """
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        # PyTorch does not compare checksums
        if (damaged := archive.testzip()) is not None:
            raise CheckpointError(f"{path}: damaged in {damaged}; copy or train it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about formats that are refused next
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # the class or function that the file imports; other reasons are pickle's own codes
        imported = _PICKLED_OBJECT.search(str(error))
        if imported is None:
            raise CheckpointError(f"{path}: damaged, or not a PyTorch file; copy or save it again") from None
        raise CheckpointError(
            f"{path}: refused, since it holds a Python object ({imported[1]}), and loading that may run any code; save "
            "only its tensors where it was made: torch.save(model.state_dict(), 'weights.pth')"
        ) from None
    except Exception as error:  # damaged bytes make torch's readers fail in any way: IndexError, struct.error, ...
        raise CheckpointError(f"{path}: not a readable PyTorch file ({first_line(error)}); save it again") from None


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


def load_exactly(module: nn.Module, state: Mapping[str, Tensor], problem: str) -> None:
    """Load a state dict with the module's own keys and shapes, as the module's type of number.

    Raises:
        CheckpointError: other keys or shapes; the message begins with `problem` and names every one of them.
    """
    if errors := describe_key_errors(get_shapes(module.state_dict()), get_shapes(state)):
        raise CheckpointError(f"{problem}: {errors}")
    module.load_state_dict(state, strict=False)


def get_shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of a state dict by key."""
    return {key: value.shape for key, value in state.items()}


def is_counter(key: str) -> bool:
    """Return whether a key is one of BatchNorm's step counters."""
    return key.endswith("num_batches_tracked")
