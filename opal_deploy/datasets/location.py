"""The folder of a model's training data: the model keeps the folder's name, its run directory the path."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opal_deploy.artifact.files import read_json

# of a training run: paths on this machine, which neither checkpoints nor exports carry
PATHS = "paths.json"


def find_root(training: Mapping[str, Any], model: Path | None = None) -> Path | None:
    """Return the folder of a model's data set; None if it is not on this machine.

    Args:
        training: `training` of a checkpoint or metadata; earlier versions stored the whole path there.
        model: the model's file, next to which its run's `paths.json` may lie.
    """
    data = training.get("data")
    name = data.get("root") if isinstance(data, dict) else None
    if not isinstance(name, str):
        return None
    stored: object = None
    if model is not None:
        with contextlib.suppress(OSError, ValueError):
            document = read_json(model.parent / PATHS)
            stored = document.get("data") if isinstance(document, dict) else None
    for root in (stored, name):
        with contextlib.suppress(OSError, ValueError):
            if isinstance(root, str) and Path(root).name == Path(name).name and Path(root).is_dir():
                return Path(root)
    return None
