"""The public `train_model`, which `opal-deploy train` calls: all that can be refused without torch, then `loop.fit`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet, split_off_validation
from opal_deploy.errors import require
from opal_deploy.logs import WarningLine, as_progress
from opal_deploy.model.network_names import check_weights
from opal_deploy.options import StrPath, keywords
from opal_deploy.train.options import TrainOptions, load_recipe, resolve, resolve_plain
from opal_deploy.train.run_directory import TrainResult, TrainRunDirectory

# classes are called unbalanced from this ratio of the most to the fewest training images on
_UNBALANCED_RATIO = 3.0


@keywords(TrainOptions, given_only=True)
def train_model(data: StrPath, options: Mapping[str, Any]) -> TrainResult:
    """Train an OPAL network, or a classifier to compare it with, on labelled images.

    Does what `opal-deploy train` does and prints nothing. Omitted options are the recipe's. After a KeyboardInterrupt,
    the same call with `resume=True` continues the run. Where processes are spawned (macOS, Windows), the call has to be
    under `if __name__ == "__main__":`, or needs `workers=0`.

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
    for package in ("torch", "torchvision", "tomli_w", "lightning_fabric", "scipy", "sklearn"):
        pip_name = "scikit-learn" if package == "sklearn" else package.replace("_", "-")
        require(package, "train", "training", pip_name=pip_name)
    root = Path(data)
    run_dir = TrainRunDirectory(Path(options.get("out") or Path("runs") / root.resolve().name))
    recipe = os.fspath(options.get("recipe") or "grounded")
    if options.get("resume") and not options.get("recipe") and run_dir.recipe.is_file():
        # a run goes on as it began, even where the default recipe has changed since
        recipe = str(run_dir.recipe)
    stated = load_recipe(recipe)
    resolved = replace(resolve(stated, options), out=run_dir.root)
    run_dir.check(may_hold_run=resolved.resume or resolved.overwrite)
    if resolved.tensorboard:
        require("tensorboard", "tensorboard", "--tensorboard")
    if resolved.weights_name is not None and resolved.start_from is None:
        check_weights(resolved.backbone, resolved.weights_name)

    def needs_validation(images: DataSet) -> bool:
        new_classes = False
        if resolved.start_from is not None:
            from opal_deploy.model import checkpoint

            new_classes = checkpoint.load(Path(resolved.start_from)).class_names != images.class_names
        return not resolved.validates_out_of_fold(len(images.train), new_classes=new_classes)

    labelled = read_dataset(
        root, resolved.dataset, needs_validation=needs_validation, progress=as_progress(resolved.progress)
    )
    labelled = labelled if resolved.boxes else labelled.without_crops()
    plain = None
    if resolved.compare:
        plain = replace(resolve_plain(stated, options), out=run_dir.plain)
        held_out = labelled if labelled.val else split_off_validation(labelled)
    # takes seconds, since it imports torch: after all that can be refused without
    from opal_deploy.train.loop import fit

    if is_main_process():
        balance = [] if resolved.class_weights == "balanced" else warn_of_balance(labelled)
        for line in [*labelled.warnings, *balance]:
            resolved.log(WarningLine(f"warning: {line}"))
        resolved.log(f"recipe {recipe}; read as {labelled.describe()}")
    result = fit(labelled, resolved)
    if plain is not None:
        resolved.log("fine-tuning the network's own classifier, to compare")
        resolved.log(describe_comparison(result, fit(held_out, plain)))
    return result


def describe_comparison(result: TrainResult, plain: TrainResult) -> str:
    """Return a line on the accuracy of the network's own classifier, without explanation, and that of a run."""
    split, own, other = "validation", result.val, plain.val
    if result.test is not None and plain.test is not None:
        split, own, other = "test", result.test, plain.test
    return (
        f"the network's own classifier, fine-tuned, without explanation: {other.accuracy:.1%} of {other.images:,} "
        f"{split} images; with explanation: {own.accuracy:.1%} of {own.images:,} ({plain.best})"
    )


def is_main_process() -> bool:
    """Return whether this process prints and writes: under torchrun every process runs the command."""
    return int(os.environ.get("RANK", "0")) == 0


def warn_of_balance(data: DataSet) -> list[str]:
    """Return a line if the training images of the classes are unbalanced, else nothing."""
    images = Counter(sample.label for sample in data.train)
    (most, count), (fewest, least) = images.most_common()[0], images.most_common()[-1]
    if count < _UNBALANCED_RATIO * least:
        return []
    return [
        f"unbalanced classes: {data.class_names[most]} has {count:,} training images and {data.class_names[fewest]} "
        f"{least:,}; --class-weights balanced gives all classes the same weight"
    ]
