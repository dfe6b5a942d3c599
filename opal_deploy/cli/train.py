"""`opal-deploy train`: from labelled pictures to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.console import progress, say
from opal_deploy.cli.options import parse_size
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from opal_deploy.model.config import Distance, HeadConfig, Pooling
    from opal_deploy.train.loop import Result


def train(
    data: Annotated[
        Path,
        typer.Argument(help="CUB-200-2011's folder, or DATA/<class>/*.jpg, or DATA/train/<class> with val/ and test/."),
    ],
    backbone: Annotated[str, typer.Option(help="A CNN classifier of torchvision's.")] = "resnet50",
    weights: Annotated[
        str | None,
        typer.Option(
            help="The backbone's first weights: a .pth or .safetensors file, a name of torchvision's (downloaded), or "
            "'none' for random ones. Default: torchvision's ImageNet weights that the paper used.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[Literal["opal", "linear"], typer.Option(help="OPAL, or the linear baseline.")] = "opal",
    prototypes: Annotated[int, typer.Option(min=1, help="Prototypes per class, m.")] = 5,
    distance: Annotated[
        Literal["l1", "l2", "l3", "linf", "kl", "tropical"], typer.Option(help="Between embedding and anchors.")
    ] = "l2",
    pooling: Annotated[
        Literal["max", "avg"] | None,
        typer.Option(help="Over cells. Default: max for OPAL, avg for the linear baseline.", show_default=False),
    ] = None,
    no_cws: Annotated[bool, typer.Option("--no-cws", help="Ablation: no channel-wise softmax.")] = False,
    no_projection: Annotated[bool, typer.Option("--no-projection", help="Ablation: no 1x1 convolution.")] = False,
    no_anchors: Annotated[bool, typer.Option("--no-anchors", help="Ablation: a dense layer for the anchors.")] = False,
    epochs: Annotated[int, typer.Option(min=1)] = 30,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    lr: Annotated[float, typer.Option(help="Adam's learning rate, fixed.")] = 1e-4,
    size: Annotated[str, typer.Option(help="Input in pixels: 224, or 224x448 (height x width).")] = "224",
    augment: Annotated[Literal["paper", "none"], typer.Option(help="Of the training pictures.")] = "paper",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, order and augmentation.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that prepare pictures. Default: by the machine.")
    ] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="Allow TF32 on the GPU.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder. Default: runs/<name of DATA>.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is there.")] = False,
) -> None:
    """Train an OPAL network (or the linear baseline) on a folder of labelled pictures."""
    for package in ("torch", "torchvision", "matplotlib"):
        require(package, "train", "opal-deploy train")
    input_size = parse_size(size)
    head_config = head_from_options(
        head, prototypes, distance, pooling, cws=not no_cws, projection=not no_projection, anchors=not no_anchors
    )
    out = out or Path("runs") / data.resolve().name
    from opal_deploy.train.data.catalogue import read
    from opal_deploy.train.loop import Options, fit
    from opal_deploy.train.setup import default_weights

    chosen = default_weights(backbone) if weights is None else weights
    options = Options(
        backbone=backbone,
        head=head_config,
        weights=None if chosen == "none" else chosen,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        input_size=input_size,
        augment=augment,
        seed=seed,
        device=device,
        workers=workers,
        tf32=tf32,
    )
    pictures = read(data)
    for line in pictures.warnings:
        say(f"warning: {line}")
    say(
        f"{pictures.num_classes} classes, {len(pictures.train)} pictures to train on, {len(pictures.val)} to validate, "
        f"{len(pictures.test)} to test{', cropped to their boxes' if pictures.crop else ''}"
    )
    with progress("training") as advance:
        result = fit(pictures, options, out, overwrite=overwrite, report=advance, log=say)
    _say_result(result)


def head_from_options(
    head: Literal["opal", "linear"],
    prototypes: int,
    distance: Distance,
    pooling: Pooling | None,
    *,
    cws: bool,
    projection: bool,
    anchors: bool,
) -> HeadConfig:
    """The head that the options describe.

    Raises:
        UsageError: not one of the paper's eleven variants, or options that contradict each other.
    """
    from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig

    if head == "linear":
        if pooling == "max":
            raise UsageError(
                "--head linear pools by average; for the ablation row with max pooling use "
                "--no-projection --no-cws --no-anchors --pooling max"
            )
        return LINEAR_BASELINE
    return HeadConfig(projection, cws, pooling or "max", anchors, prototypes, distance)


def _say_result(result: Result) -> None:
    say(f"best: epoch {result.best_epoch}, validation accuracy {result.val.accuracy:.1%}, loss {result.val.loss:.4f}")
    if result.test is None:
        say("test: the data set has no test pictures")
    else:
        collapse = result.test.spatial_prototype_collapse
        say(
            f"test: accuracy {result.test.accuracy:.1%} of {result.test.images} pictures"
            + ("" if collapse is None else f", spatial prototype collapse {collapse:.1%}")
        )
    say(str(result.best))
    say(f"next: opal-deploy export {result.best}")
