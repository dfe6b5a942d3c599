"""The public `train_model`, which `opal-deploy train` calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.errors import require
from opal_deploy.logs import WarningLine, as_progress
from opal_deploy.options import StrPath, keywords
from opal_deploy.train.balance import balance_warnings
from opal_deploy.train.checks import check_run
from opal_deploy.train.options import TrainRunOptions
from opal_deploy.train.recipe import load_recipe, resolve_recipe
from opal_deploy.train.run_directory import TrainRunDirectory

if TYPE_CHECKING:
    from opal_deploy.train.result import TrainResult


@keywords(TrainRunOptions)
def train_model(data: StrPath, options: TrainRunOptions) -> TrainResult:
    """Train an OPAL network, or a classifier to compare it with, on labelled images.

    Does what `opal-deploy train` does and prints nothing. Omitted options are the recipe's. After a KeyboardInterrupt,
    the same call with `resume=True` continues the run. Where processes are spawned (macOS, Windows), `workers` above 0
    needs the call to be under `if __name__ == "__main__":`.

    Args:
        data: a data set's folder as unpacked, or a folder with one folder per class, optionally below train/ (val/,
            test/). `log` receives each line that the command prints; `progress` receives the images done, all images
            (None while unknown) and a note.

    Returns:
        Checkpoints, metrics by split, and one record per epoch.

    Raises:
        MissingExtra: a package of the extra `train` is not installed.
        UsageError: data or options are impossible, or `out` holds a run. Messages name options as the command does.
        StoppedEarly: the loss is not finite, or disk or memory are full; the run can be resumed.
    """
    for package in ("torch", "torchvision"):
        require(package, "train", "training")
    root, progress = Path(data), as_progress(options.progress)
    out = Path("runs") / root.resolve().name if options.out is None else Path(options.out)
    run_dir = TrainRunDirectory(out)
    # a run goes on as it began, even where the default recipe has changed since
    goes_on = options.resume and options.recipe is None and run_dir.recipe.is_file()
    recipe_name = str(run_dir.recipe) if goes_on else options.recipe_name()
    recipe = resolve_recipe(load_recipe(recipe_name), options.to_sections())
    check_run(recipe.options, run_dir, overwrite=options.overwrite, resume=options.resume)
    from opal_deploy.datasets.registry import read_dataset

    labelled = read_dataset(
        root, recipe.dataset, partition=recipe.partition, skip_missing=recipe.skip_missing, progress=progress
    )
    if not recipe.boxes:
        labelled = labelled.without_crops()
    # takes seconds, since it imports torch: after all that can be refused without
    from opal_deploy.train.loop import fit
    from opal_deploy.train.machine import is_main_process

    # torchrun starts several processes; only one reports
    if is_main_process():
        weighted = recipe.options.class_weights == "balanced"
        for line in [*labelled.warnings, *balance_warnings(labelled, weighted=weighted)]:
            options.log(WarningLine(f"warning: {line}"))
        options.log(f"recipe {recipe_name}; read as {labelled.describe()}")
    return fit(
        labelled, recipe.options, out, overwrite=options.overwrite, resume=options.resume,
        recipe=recipe, progress=progress, log=options.log,
    )  # fmt: skip
