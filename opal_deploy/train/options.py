"""The options of `train` and `train_model`; None leaves an option to the recipe. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from opal_deploy.artifact.documents import Distance
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.model.config import HeadKind, Pooling
from opal_deploy.options import Option, Options, StrPath, parse_size
from opal_deploy.train.recipe import SECTIONS, Augment, ClassWeights, Schedule, Sections, TrainingPrecision

_DATA, _OPTIMISATION, _ADVANCED = "Data", "Optimisation", "Advanced"
# options that recipes call otherwise
_RECIPE_KEYS = {"size": "input_size", "head": "kind", "prototypes": "prototypes_per_class"}


@dataclass(frozen=True, kw_only=True)
class RecipeOverrides(Options):
    """Options that override a recipe."""

    backbone: Annotated[
        str | None,
        Option(
            "A torchvision CNN classifier, or timm:NAME (extra timm).",
            default="resnet18 (grounded), convnext_tiny (paper)",
        ),
    ] = None
    weights: Annotated[
        StrPath | None,
        Option(
            "Initial weights of the backbone: a .pth, .ckpt or .safetensors file, a torchvision name or timm tag "
            "(downloaded), imagenet for the library's usual ones, or none for random ones.",
            default="imagenet", cli=str,
        ),
    ] = None  # fmt: skip
    size: Annotated[
        int | tuple[int, int] | None,
        Option("Input size in pixels: 224, or 224x448 (height x width).", default="224", cli=str, parse=parse_size),
    ] = None
    stride: Annotated[
        int | None,
        Option(
            "Input pixels per cell: 32, 16 or 8. The backbone ends at its last feature map with this stride.",
            min=1,
            default="16, or 32 if clearly better on validation images (grounded), all layers (paper)",
        ),
    ] = None  # fmt: skip
    keep_layers: Annotated[
        bool | None,
        Option(
            "With --stride: keep all pretrained layers; those after this stride get stride 1.",
            flag="--keep-layers/--no-keep-layers",
            panel=_ADVANCED,
        ),
    ] = None
    epochs: Annotated[
        int | None,
        Option(
            "Epochs of fine-tuning; 0 fits the head only.",
            min=0, default="24, 8 or 4 by the number of images (grounded), 30 (paper)",
        ),
    ] = None  # fmt: skip
    minutes: Annotated[
        float | None, Option("Train as many epochs as fit into this time, up to --epochs.", min=0, default="no limit")
    ] = None
    head_steps: Annotated[
        int | None,
        Option(
            "Steps of fitting the head to the frozen network before fine-tuning, 20 passes or more; 0 skips it.",
            min=0, default="600 (grounded), 0 (paper)", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    batch_size: Annotated[
        int | None,
        Option(
            "Batch size over all processes.",
            min=1, default="16, 32 or 64 by the number of images (grounded), 64 (paper)", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    lr: Annotated[
        float | None,
        Option(
            "Adam's initial learning rate.",
            default="2e-4 in grounded, 1e-4 in the other recipes", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    augment: Annotated[
        Augment | None,
        Option(
            "Augmentation of the training images: the paper's, erase for random rectangles over it, or none.",
            default="erase in grounded, paper in the other recipes", panel=_DATA,
        ),
    ] = None  # fmt: skip
    device: Annotated[str | None, Option("auto, cpu, cuda or cuda:N.", default="auto")] = None
    precision: Annotated[
        TrainingPrecision | None,
        Option(
            "Precision of the convolutions. auto: bf16 or fp16 on a GPU, fp32 on a CPU.",
            default="fp32 in paper, auto in the other recipes",
            panel=_ADVANCED,
        ),
    ] = None
    workers: Annotated[
        int | None, Option("Processes that prepare images.", min=0, default="fits the machine", panel=_ADVANCED)
    ] = None

    def to_sections(self) -> Sections:
        """Return the given options by the recipe's sections and keys."""
        sections: Sections = {section: {} for section in SECTIONS}
        for name, value in self.keywords().items():
            key = _RECIPE_KEYS.get(name, name)
            for section, keys in SECTIONS.items():
                if key in keys and value is not None:
                    sections[section][key] = _to_toml_value(key, value)
        return sections


@dataclass(frozen=True, kw_only=True)
class TrainRunOptions(RecipeOverrides):
    """The options of `train_model` and `train`."""

    recipe: Annotated[
        StrPath | None,
        Option(
            "grounded (finer cells), grounded-resnet50, paper, or a .toml file such as a run's own recipe.toml. "
            "Options override it.",
            default="grounded", cli=str,
        ),
    ] = None  # fmt: skip
    dataset: Annotated[
        str | None,
        Option(
            "cub, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397, cub100, csv or imagefolder.",
            default="recognised by its files", panel=_DATA,
        ),
    ] = None  # fmt: skip
    partition: Annotated[
        int | None, Option("Official partition (DTD, SUN-397).", min=1, max=10, default="1", panel=_DATA)
    ] = None
    skip_missing: Annotated[
        bool | None,
        Option(
            "Leave out images that the data set lists but lacks.",
            flag="--skip-missing/--no-skip-missing",
            panel=_DATA,
        ),
    ] = None
    boxes: Annotated[
        bool | None,
        Option("Crop to the data set's boxes.", default="--boxes", flag="--boxes/--no-boxes", panel=_DATA),
    ] = None
    head: Annotated[
        HeadKind | None,
        Option(
            "linear: the paper's linear head, a dense layer on pooled features normalised to length 1. plain: the "
            "network's own classifier, as it is usually fine-tuned.",
            default="opal", panel=_ADVANCED,
        ),
    ] = None  # fmt: skip
    prototypes: Annotated[int | None, Option("Prototypes per class, m.", min=1, default="5")] = None
    distance: Annotated[
        Distance | None, Option("Distance between embedding and anchors.", default="l2", panel=_ADVANCED)
    ] = None
    pooling: Annotated[
        Pooling | None, Option("Pooling over cells.", default="max, for the linear head avg", panel=_ADVANCED)
    ] = None
    cws: Annotated[
        bool | None, Option("Channel-wise softmax; without it: an ablation.", flag="--cws/--no-cws", panel=_ADVANCED)
    ] = None
    projection: Annotated[
        bool | None,
        Option("1x1 convolution; without it: an ablation.", flag="--projection/--no-projection", panel=_ADVANCED),
    ] = None
    anchors: Annotated[
        bool | None,
        Option("Anchors; without them, a dense layer: an ablation.", flag="--anchors/--no-anchors", panel=_ADVANCED),
    ] = None
    patience: Annotated[
        int | None,
        Option(
            "Stop after this many epochs without a lower validation loss.",
            min=1, default="all epochs are trained", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    class_weights: Annotated[
        ClassWeights | None,
        Option(
            "`balanced` gives all classes the same weight in the loss, N / (C * n_c).",
            default="none", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    anchor_probability: Annotated[
        float | None,
        Option(
            "Probability of an embedding at its class's anchor; the loss scales the logits to reach it.",
            default="0.9 (grounded), logits as they are (paper)", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    schedule: Annotated[
        Schedule | None,
        Option(
            "Learning-rate schedule. `cosine` warms up after a fitted head.",
            default="cosine (grounded), constant (paper)", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    agreement: Annotated[
        float | None,
        Option(
            "Weight of a consistency loss between an image and its mirror image. Doubles training time.",
            min=0, default="0", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    adversarial: Annotated[
        float | None,
        Option(
            "Weight of the loss on images attacked outside the boxes. Triples training time.",
            min=0, default="0", panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    start_from: Annotated[
        StrPath | None,
        Option(
            "Initialise backbone and head from this checkpoint instead of --weights. To continue an interrupted run, "
            "use --resume.",
            default="none", cli=str, panel=_OPTIMISATION,
        ),
    ] = None  # fmt: skip
    freeze_backbone: Annotated[
        bool | None,
        Option(
            "With --start-from: train only the head.",
            flag="--freeze-backbone/--no-freeze-backbone",
            panel=_OPTIMISATION,
        ),
    ] = None
    reset_dropped: Annotated[
        bool | None,
        Option(
            "With --start-from: train dropped slots anew instead of leaving them dropped.",
            flag="--reset-dropped/--no-reset-dropped",
            panel=_OPTIMISATION,
        ),
    ] = None
    keep_off: Annotated[
        StrPath | None,
        Option(
            "Keep the attention off these regions: a COCO file, or `outside` for all but the data set's objects.",
            default="none", cli=str, panel=_DATA,
        ),
    ] = None  # fmt: skip
    keep_off_weight: Annotated[
        float | None,
        Option("Weight of the attention in these regions.", min=0, default="10, for outside 3", panel=_DATA),
    ] = None
    background: Annotated[
        StrPath | None,
        Option(
            "Folder of out-of-distribution images, e.g. empty scenes. They are not trained on; they help --unknown "
            "flag similar images.",
            default="none", cli=str, panel=_DATA,
        ),
    ] = None  # fmt: skip
    seed: Annotated[
        int | None, Option("Seed of weights, order and augmentation.", min=0, default="0", panel=_OPTIMISATION)
    ] = None
    tf32: Annotated[bool | None, Option("Allow TF32 on the GPU.", flag="--tf32/--no-tf32", panel=_ADVANCED)] = None
    compile: Annotated[
        bool | None, Option("Run steps through torch.compile.", flag="--compile/--no-compile", panel=_ADVANCED)
    ] = None
    cache_megabytes: Annotated[
        int | None,
        Option(
            "Memory for decoded images and for features of the frozen network, in megabytes.",
            min=0,
            default="1024",
            panel=_ADVANCED,
        ),
    ] = None
    save_every: Annotated[
        int | None, Option("Steps between saves within an epoch; 0: none.", min=0, default="0", panel=_ADVANCED)
    ] = None
    tensorboard: Annotated[
        bool | None, Option("Log for TensorBoard.", flag="--tensorboard/--no-tensorboard", panel=_ADVANCED)
    ] = None
    out: Annotated[StrPath | None, Option("Run directory.", default="runs/<name of DATA>", cli=Path)] = None
    resume: Annotated[bool, Option("Resume the run in --out with its own options, or start one.")] = False
    overwrite: Annotated[bool, Option("Replace the run in --out.")] = False
    log: Log = log_line
    progress: ProgressChoice | None = None

    def recipe_name(self) -> str:
        """Return the recipe's name or path."""
        return "grounded" if self.recipe is None else os.fspath(self.recipe)


def _to_toml_value(key: str, value: Any) -> Any:
    if key == "input_size":
        return [value, value] if isinstance(value, int) else list(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value
