"""The public `run_inference`, which `opal-deploy infer` calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from opal_deploy.options import StrPath, keywords
from opal_deploy.predict.setup import LoadedModel
from opal_deploy.run.directory import InferenceRun
from opal_deploy.run.infer import infer
from opal_deploy.run.options import InferOptions

if TYPE_CHECKING:
    from opal_deploy.api.model import Model

__all__ = ["InferenceRun", "run_inference"]


@keywords(InferOptions)
def run_inference(
    images: StrPath | Sequence[StrPath], model: StrPath | Model | None, options: InferOptions
) -> InferenceRun:
    """Classify images and explain the predictions, and write a run directory, as `opal-deploy infer` does.

    The run directory holds results.jsonl with one record per image, and summary.json. Prints nothing. A run that ended
    early, by an exception, KeyboardInterrupt or a killed process, resumes when the same call is made again. A complete
    run is returned without computing it again.

    Args:
        images: folders (with subfolders), files, globs, tar and zip archives, or URLs of them (s3://, gs://, az://);
            `-` or `@FILE` for a list; with `every` also videos.
        model: an exported model, a checkpoint, or what `load` returned; None: the one that the command finds.
        options: see the keywords.

    Raises:
        UsageError: an input or an option is wrong, or `out` holds another run.
        ArtifactError: the model does not exist or is damaged.
        StoppedEarly: the disk is full, a device was lost, or more than `max_errors` images failed.
        MissingExtra: an extra is not installed. KeyboardInterrupt: the run was interrupted.
    """
    texts = [os.fspath(image) for image in ([images] if isinstance(images, str | os.PathLike) else images)]
    if not hasattr(model, "sessions"):
        return infer(texts, model, options)
    # an open model is a path, too
    opened, path = cast("Model", model), Path(cast("Model", model))
    fingerprint = {"file": path.name, "sha256": opened.sha256 or ""}
    return infer(texts, LoadedModel(path, opened.sessions, fingerprint, opened.metadata), options)
