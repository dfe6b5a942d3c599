"""`opal-deploy train`: from labelled images to a checkpoint."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.console import print_line, print_message, progress
from opal_deploy.errors import ExitCode
from opal_deploy.options import parse_size

if TYPE_CHECKING:
    from opal_deploy.train.loop import TrainResult


def train(
    data: Annotated[
        Path,
        typer.Argument(help="The data set's folder as unpacked, or DATA/<class>/*.jpg, or DATA/train/<class> ..."),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            help="`paper`, `grounded` or `grounded-resnet50` (finer cells), or a .toml file such as a run's own "
            "recipe.toml. Options override it."
        ),
    ] = "paper",
    dataset: Annotated[
        str | None,
        typer.Option(
            help="cub, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397, cub100, imagefolder. "
            "Default: by its files.",
            show_default=False,
        ),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(min=1, max=10, help="Partition of the data set (DTD, SUN-397). Default: 1.", show_default=False),
    ] = None,
    skip_missing: Annotated[
        bool | None,
        typer.Option("--skip-missing/--no-skip-missing", help="Leave out images that are missing.", show_default=False),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="A CNN classifier of torchvision's, or timm:NAME (extra timm). Paper: convnext_tiny.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="The backbone's first weights: a .pth or .safetensors file, a name of torchvision's or a tag of "
            "timm's (downloaded), 'imagenet' for the library's usual ones, or 'none' for random ones. Paper: imagenet.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        Literal["opal", "linear", "plain"] | None,
        typer.Option(
            help="OPAL; `linear`: the paper's baseline, a dense layer on pooled features normalised to length 1; "
            "`plain`: the network's own classifier, as it is usually fine-tuned.",
            show_default=False,
        ),
    ] = None,
    prototypes: Annotated[
        int | None, typer.Option(min=1, help="Prototypes per class, m. Paper: 5.", show_default=False)
    ] = None,
    distance: Annotated[
        Literal["l1", "l2", "l3", "linf", "kl", "tropical"] | None,
        typer.Option(help="Between embedding and anchors. Paper: l2.", show_default=False),
    ] = None,
    pooling: Annotated[
        Literal["max", "avg"] | None,
        typer.Option(help="Over cells. Paper: max for OPAL, avg for the linear baseline.", show_default=False),
    ] = None,
    no_cws: Annotated[bool, typer.Option("--no-cws", help="Ablation: no channel-wise softmax.")] = False,
    no_projection: Annotated[bool, typer.Option("--no-projection", help="Ablation: no 1x1 convolution.")] = False,
    no_anchors: Annotated[bool, typer.Option("--no-anchors", help="Ablation: a dense layer for the anchors.")] = False,
    epochs: Annotated[int | None, typer.Option(min=1, help="Paper: 30.", show_default=False)] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Over all processes. Paper: 64.", show_default=False)
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Adam's learning rate. Paper: 1e-4.", show_default=False)] = None,
    schedule: Annotated[
        Literal["constant", "cosine"] | None,
        typer.Option(
            help="Learning rate: constant, or falling to 0 along a cosine. Paper: constant.", show_default=False
        ),
    ] = None,
    agreement: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight of a term that asks an image and its mirror image for the same cells; doubles the time. "
            "Paper: 0.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="Input in pixels: 224, or 224x448 (height x width). Paper: 224.", show_default=False),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Input pixels per cell: 32, 16 or 8. The backbone ends at its last feature map of this stride. "
            "Paper: all layers, 32.",
            show_default=False,
        ),
    ] = None,
    keep_layers: Annotated[
        bool | None,
        typer.Option(
            "--keep-layers/--no-keep-layers",
            help="With --stride: keep all pretrained layers, and give those behind this stride stride 1.",
            show_default=False,
        ),
    ] = None,
    augment: Annotated[
        Literal["paper", "none"] | None, typer.Option(help="Augmentation of the training images.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of weights, order and augmentation. Default: 0.", show_default=False)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.", show_default=False)] = None,
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"] | None,
        typer.Option(
            help="Precision of the convolutions. auto: bf16 or fp16 on a GPU, fp32 on a CPU. Paper: fp32.",
            show_default=False,
        ),
    ] = None,
    tf32: Annotated[
        bool | None, typer.Option("--tf32/--no-tf32", help="Allow TF32 on the GPU.", show_default=False)
    ] = None,
    compile_: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Run steps through torch.compile.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that prepare images. Default: by the machine.")
    ] = None,
    cache_megabytes: Annotated[
        int | None,
        typer.Option(
            min=0, help="Decoded images are kept in memory up to this much. Default: 1024.", show_default=False
        ),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=0, help="Save every so many steps too, not only each epoch.", show_default=False)
    ] = None,
    tensorboard: Annotated[
        bool | None,
        typer.Option("--tensorboard/--no-tensorboard", help="Log for TensorBoard.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder. Default: runs/<name of DATA>.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or begin where there is none.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is there.")] = False,
) -> None:
    """Train an OPAL network, or a classifier to compare it with, on labelled images.

    Several GPUs: torchrun --nproc-per-node 4 -m opal_deploy train DATA ...
    """
    from opal_deploy.train.api import train_model

    try:
        with progress("training") as advance:
            result = train_model(
                data,
                recipe=recipe,
                dataset=dataset,
                partition=partition,
                skip_missing=skip_missing,
                backbone=backbone,
                weights=weights,
                head=head,
                prototypes=prototypes,
                distance=distance,
                pooling=pooling,
                cws=False if no_cws else None,
                projection=False if no_projection else None,
                anchors=False if no_anchors else None,
                epochs=epochs,
                batch_size=batch_size,
                lr=lr,
                schedule=schedule,
                agreement=agreement,
                size=None if size is None else parse_size(size),
                stride=stride,
                keep_layers=keep_layers,
                augment=augment,
                seed=seed,
                device=device,
                precision=precision,
                tf32=tf32,
                compile=compile_,
                workers=workers,
                cache_megabytes=cache_megabytes,
                save_every=save_every,
                tensorboard=tensorboard,
                out=out,
                resume=resume,
                overwrite=overwrite,
                log=print_line,
                progress=advance,
            )
    except KeyboardInterrupt:
        if _is_main_process():
            print_message(f"Interrupted; resume with: {_format_resume_command()}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if _is_main_process():
        _print_result(result)


def _is_main_process() -> bool:
    """Return whether this process prints: under torchrun every process runs the command."""
    from opal_deploy.train.distributed import is_main_process

    return is_main_process()


def _format_resume_command() -> str:
    """Return the command that resumes this run, as a shell takes it."""
    name, *arguments = sys.argv
    kept = [argument for argument in arguments if argument not in ("--overwrite", "--resume")]
    return shlex.join([Path(name).name, *kept, "--resume"])


def _print_result(result: TrainResult) -> None:
    print_message(
        f"best: epoch {result.best_epoch}, of the lowest validation loss: {result.val.loss:.4f}, accuracy "
        f"{result.val.accuracy:.1%}"
    )
    if result.test is None:
        print_message("test: the data set has no test images")
    else:
        collapse = result.test.spatial_prototype_collapse
        print_message(
            f"test: accuracy {result.test.accuracy:.1%} of {result.test.images} images"
            + ("" if collapse is None else f", spatial prototype collapse {collapse:.1%}")
        )
    if result.calibration is not None:
        print_message(f"calibration: {result.calibration.describe()}")
    print_message(str(result.best))
    if result.config["data"]["crop"] == "boxes":
        from opal_deploy.datasets.boxes import format_box_option

        boxes = format_box_option(result.config)
        print_message(f"it was trained on images cropped to boxes: give infer those of its images, such as {boxes}")
    print_message(f"next: opal-deploy export {result.best}")
