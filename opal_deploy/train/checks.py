"""Checks of a run before torch is imported and images are read, which takes seconds to minutes. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from opal_deploy.artifact.files import model_kind
from opal_deploy.datasets.background import list_background
from opal_deploy.errors import UsageError, require
from opal_deploy.model.network_names import check_weights
from opal_deploy.train.recipe import OUTSIDE, TrainOptions
from opal_deploy.train.run_directory import TrainRunDirectory


def check_run(options: TrainOptions, run_dir: TrainRunDirectory, *, overwrite: bool, resume: bool) -> None:
    """Check options, the files that they name and the run directory; changes nothing.

    Raises:
        UsageError: an option is impossible, a file is missing, or the directory holds a run or cannot be written.
        MissingExtra: a package is not installed.
    """
    require("matplotlib", "train", "training")
    if options.tensorboard:
        require("tensorboard", "tensorboard", "--tensorboard")
    options.check()
    if resume and overwrite:
        raise UsageError("--resume continues a run, --overwrite replaces it: give only one of them")
    if not resume and not overwrite:
        run_dir.check_free()
    run_dir.check_writable()
    if resume and run_dir.is_finished:
        return  # a finished run trains nothing, and the files may be gone
    if options.start_from is not None:
        _check_start(Path(options.start_from))
    elif options.weights is not None:
        check_weights(options.backbone, options.weights)
    if options.background is not None:
        list_background(options.background)
    if options.keep_off not in (None, OUTSIDE):
        read_keep_off(options.keep_off)


def read_keep_off(name: str) -> bytes:
    """Return the content of the file of `--keep-off`; UsageError if it cannot be read."""
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UsageError(
            f"--keep-off {name}: cannot be read ({error.strerror}); expected a COCO file or {OUTSIDE}"
        ) from None


def _check_start(path: Path) -> None:
    if model_kind(path) != "checkpoint":
        raise UsageError(f"--start-from {path}: only checkpoints can be trained; give the .pt file that it came from")
    if not path.is_file():
        raise UsageError(f"--start-from {path}: no such checkpoint")
