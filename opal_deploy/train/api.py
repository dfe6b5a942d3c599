"""The public `train_model`, which `opal-deploy train` calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from opal_deploy.errors import require
from opal_deploy.logs import Log, log_line
from opal_deploy.model.config import HeadKind
from opal_deploy.train.recipe import Augment, Schedule, TrainingPrecision, load_recipe, resolve_recipe

if TYPE_CHECKING:
    from opal_deploy.logs import Progress
    from opal_deploy.train.loop import TrainResult


def train_model(
    data: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] = "paper",
    dataset: str | None = None,
    partition: int | None = None,
    skip_missing: bool | None = None,
    backbone: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    head: HeadKind | None = None,
    prototypes: int | None = None,
    distance: Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None = None,
    pooling: Literal["max", "avg"] | None = None,
    cws: bool | None = None,
    projection: bool | None = None,
    anchors: bool | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    schedule: Schedule | None = None,
    agreement: float | None = None,
    size: int | tuple[int, int] | None = None,
    stride: int | None = None,
    keep_layers: bool | None = None,
    augment: Augment | None = None,
    seed: int | None = None,
    device: str | None = None,
    precision: TrainingPrecision | None = None,
    tf32: bool | None = None,
    compile: bool | None = None,
    workers: int | None = None,
    cache_megabytes: int | None = None,
    save_every: int | None = None,
    tensorboard: bool | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    log: Log = log_line,
    progress: Progress | None = None,
) -> TrainResult:
    """Train an OPAL network, or a classifier to compare it with, on labelled images.

    Does what `opal-deploy train` does, with options of the same names; prints nothing. An option of None is the
    recipe's. KeyboardInterrupt passes through, and the same call with `resume=True` continues the run.

    Args:
        data: a data set's folder as unpacked, or one with a folder per class, or with train/ (val/, test/) above these.
        recipe: `paper`, `grounded`, `grounded-resnet50`, or a .toml file such as a run's own recipe.toml.
        dataset: the data set's name; None: recognized by its files.
        partition: number of the official partition (DTD, SUN-397), 1 ... 10.
        skip_missing: leave out images that the data set's lists name and that are not there.
        backbone: a CNN classifier of torchvision's, or `timm:NAME`.
        weights: first weights of the backbone: a file, a name or tag of its library's (downloaded), `imagenet`, or
            `none` for random ones.
        head: `opal`, `linear` (the paper's baseline) or `plain` (the network's own classifier).
        prototypes: per class, m.
        distance: between embedding and anchors.
        pooling: over cells.
        cws, projection, anchors: False leaves the channel-wise softmax, the 1x1 convolution or the anchors out.
        epochs: their number.
        batch_size: images a step, over all processes.
        lr: Adam's learning rate.
        schedule: `constant`, or `cosine`, which falls to 0.
        agreement: weight of a term that asks an image and its mirror image for the same cells.
        size: input in pixels, one number or (height, width).
        stride: input pixels per cell; the backbone ends at its last feature map of this stride.
        keep_layers: keep the layers behind that, with stride 1.
        augment: of the training images: `paper` or `none`.
        seed: of weights, order and augmentation.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        precision: of the convolutions.
        tf32: allow TF32 on the GPU.
        compile: run steps through torch.compile.
        workers: processes that prepare images. None chooses by the machine, and none where processes are spawned
            (macOS, Windows): a number there needs the call to be under `if __name__ == "__main__":`.
        cache_megabytes: decoded images are kept in memory up to this much.
        save_every: save every so many steps too, not only each epoch.
        tensorboard: log for TensorBoard.
        out: folder of the run; None: runs/<name of data>.
        resume: continue the run in `out`, or begin where there is none.
        overwrite: replace the run that is there.
        log: called with each line that the command would print; by default they go to the logger `opal_deploy`.
        progress: called with images done, in all (None while unknown), and a note on what is being done.

    Returns:
        Checkpoints, metrics by split, and a record per epoch.

    Raises:
        MissingExtra: a package of the extra `train` is not installed.
        UsageError: data or options are impossible, or `out` holds a run. Messages name options as the command does.
        StoppedEarly: the loss is not finite, or disk or memory are full; what was written can be resumed.
    """
    for package in ("torch", "torchvision", "matplotlib"):
        require(package, "train", "training")
    from opal_deploy.datasets.registry import read_dataset
    from opal_deploy.logs import no_progress
    from opal_deploy.train.distributed import is_main_process
    from opal_deploy.train.loop import fit

    resolved = resolve_recipe(
        load_recipe(os.fspath(recipe)),
        {
            "data": {"dataset": dataset, "partition": partition, "skip_missing": skip_missing},
            "model": {
                "backbone": backbone,
                "weights": None if weights is None else os.fspath(weights),
                "input_size": [size, size] if isinstance(size, int) else None if size is None else list(size),
                "stride": stride,
                "keep_layers": keep_layers,
            },
            "head": {
                "kind": head,
                "prototypes_per_class": prototypes,
                "distance": distance,
                "pooling": pooling,
                "cws": cws,
                "projection": projection,
                "anchors": anchors,
            },
            "training": {
                "epochs": epochs,
                "batch_size": batch_size,
                "lr": lr,
                "schedule": schedule,
                "agreement": agreement,
                "augment": augment,
                "seed": seed,
                "precision": precision,
                "tf32": tf32,
            },
            "machine": {
                "device": device,
                "workers": workers,
                "compile": compile,
                "cache_megabytes": cache_megabytes,
                "save_every": save_every,
                "tensorboard": tensorboard,
            },
        },
    )
    data = Path(data)
    folder = Path("runs") / data.resolve().name if out is None else Path(out)
    report = progress or no_progress
    labelled = read_dataset(
        data,
        resolved.dataset,
        partition=resolved.partition,
        skip_missing=resolved.skip_missing,
        progress=report,
    )
    # under torchrun every process comes here, and one reports
    if is_main_process():
        for line in labelled.warnings:
            log(f"warning: {line}")
        log(f"read as {labelled.describe()}")
    return fit(
        labelled, resolved.options, folder,
        overwrite=overwrite, resume=resume, recipe=resolved, report=report, log=log,
    )  # fmt: skip
