"""The options of a training run, and recipes, the TOML files that hold them. Plain data; imports no torch.

`TrainOptions` declares every option once: the command, `train_model` and recipes read it, by the same names. What a
caller gives is laid over a recipe (`resolve`). A run stores its resolved options as recipe.toml, which repeats it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from opal_deploy.artifact.documents import Distance
from opal_deploy.artifact.files import read_toml
from opal_deploy.artifact.preprocessing import ResizeRule
from opal_deploy.errors import UsageError
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.model.config import (
    LINEAR_BASELINE,
    PLAIN_CLASSIFIER,
    HeadConfig,
    Pooling,
    check_tiling,
    require_stride,
)
from opal_deploy.model.network_names import TIMM_PREFIX, check_network, list_torchvision_weights
from opal_deploy.options import Option, Options, StrPath, option_fields, parse_size
from opal_deploy.runtime.devices import parse_device

# options of one call, which recipes do not have
_CALL_OPTIONS = frozenset(("recipe", "out", "resume", "overwrite", "compare", "log", "progress"))
# parts of the OPAL head
_HEAD_OPTIONS = frozenset(("projection", "cws", "pooling", "anchors", "prototypes", "distance"))
# how stored configurations and recipes with sections call some options
_STORED_NAMES = {"input_size": "size", "kind": "head", "prototypes_per_class": "prototypes"}
# options of 0.1.0 that went, with the values that every run has now
_FORMER_VALUES = {
    "partition": 1, "skip_missing": False, "epsilon": 1e-8, "agreement": 0.0, "freeze_backbone": False,
    "reset_dropped": False, "compile": False, "compare_strides": False,
}  # fmt: skip
# options that may differ between a run and its continuation: all but the epochs change only where and how fast it runs
CHANGEABLE_ON_RESUME = frozenset(("epochs", "device", "workers", "cache_megabytes", "tensorboard"))

RANDOM = "none"  # `weights`
# measured (docs/reference/measurements-training.md)
_REGION_WEIGHT = 10.0
# batch size and epochs up to so many training images; an epoch of few images is few steps. Two epochs of 2,400 images
# take seven minutes on two CPU cores; --resume --epochs goes on where more may help
_PLANS = ((1_000, 16, 24), (10_000, 32, 2), (math.inf, 64, 2))
# up to so many training images a fitted head is not fine-tuned by default: the images set aside to judge that cost as
# much as it gains; with 2,400 images of 100 species two epochs gain two points
MAX_FROZEN = 1_000
# options by the group of `--help` that lists them
_data, _tuning, _advanced = (partial(Option, panel=panel) for panel in ("Data", "Optimisation", "Advanced"))


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """The resolved options of a run.

    The defaults here are the paper's protocol (Sec. 4.1 and Supp. B.2), except for `precision`, `epochs` and
    `batch_size`. None means: all layers (`stride`), planned by the number of images (`epochs`, `batch_size`), chosen
    for the machine (`workers`), logits that are not scaled (`anchor_probability`).
    """

    # fmt: off
    recipe: Annotated[StrPath, Option(
        "grounded (finer cells), paper, or a .toml file such as a run's own recipe.toml. Options "
        "override it.", default="grounded", cli=str)] = "grounded"
    backbone: Annotated[str, Option(
        "A torchvision CNN classifier, or timm:NAME (extra timm).",
        default="resnet18 (grounded), convnext_tiny (paper)")] = "convnext_tiny"
    weights: Annotated[StrPath, Option(
        "Initial weights of the backbone: a .pth, .ckpt or .safetensors file, a torchvision name or timm tag "
        "(downloaded), imagenet for the library's usual ones, or none for random ones.",
        default="imagenet", cli=str)] = "imagenet"
    size: Annotated[int | tuple[int, int], Option(
        "Input size in pixels: 224, or 224x448 (height x width).",
        default="224", cli=str, parse=parse_size)] = (224, 224)
    resize: Annotated[Literal["squash", "letterbox", "shortest_edge"], _data(
        "squash to the input size; letterbox: whole, between grey bars; shortest_edge: the centre, 7/8 of the shorter "
        "side.", default="squash")] = "squash"
    stride: Annotated[int | None, Option(
        "Input pixels per cell: 32, 16 or 8. The backbone ends at its last feature map with this stride.", min=1,
        default="16 with --keep-layers (grounded), all layers (paper)")] = None
    keep_layers: Annotated[bool, _advanced(
        "With --stride: keep the later layers too; their last feature map is upsampled and stacked on the finer one.",
        flag="--keep-layers/--no-keep-layers")] = False
    adapt_stride: Annotated[bool, _advanced(
        "Where the backbone has no cells of the recipe's stride, use its own.",
        default="on in grounded unless --stride is given", flag="--adapt-stride/--no-adapt-stride")] = False
    epochs: Annotated[int | None, Option(
        "Epochs of fine-tuning; 0 fits the head only.", min=0,
        default="24, or 2 for more than 1,000 images (grounded), 30 (paper)")] = None
    minutes: Annotated[float | None, Option(
        "Train as many epochs as fit into this time, up to --epochs.", min=0, default="no limit")] = None
    head_steps: Annotated[int, _tuning(
        "Steps of fitting the head to the frozen network before fine-tuning, 20 passes or more; 0 skips it.", min=0,
        default="200 (grounded), 0 (paper)")] = 0
    batch_size: Annotated[int | None, _tuning(
        "Batch size over all processes.", min=1,
        default="16, 32 or 64 by the number of images (grounded), 64 (paper)")] = None
    lr: Annotated[float, _tuning(
        "Adam's initial learning rate.", min=0, default="2e-4 in grounded, 1e-4 in the other recipes")] = 1e-4
    augment: Annotated[Literal["paper", "erase", "none"], _data(
        "Augmentation of the training images: the paper's, erase for random rectangles over it, or none.",
        default="erase in grounded, paper in the other recipes")] = "paper"
    device: Annotated[str, Option("auto, cpu, cuda or cuda:N.", default="auto")] = "auto"
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], _advanced(
        "Precision of the convolutions. auto: bf16 or fp16 on a GPU, fp32 on a CPU.",
        default="fp32 in paper, auto in the other recipes")] = "auto"
    workers: Annotated[int | None, _advanced(
        "Processes that prepare images.", min=0, default="fits the machine")] = None
    dataset: Annotated[str | None, _data(
        "cub, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397, csv or imagefolder.",
        default="recognised by its files")] = None
    boxes: Annotated[bool, _data("Crop to the data set's boxes.", default="--boxes", flag="--boxes/--no-boxes")] = True
    head: Annotated[Literal["opal", "linear", "plain", "additive"], _advanced(
        "linear: the paper's linear head, a dense layer on pooled features normalised to length 1. plain: the "
        "network's own classifier, as it is usually fine-tuned. additive: `export --slots`.", default="opal")] = "opal"
    prototypes: Annotated[int, Option("Prototypes per class, m.", min=1, default="5")] = 5
    distance: Annotated[Distance, _advanced("Distance between embedding and anchors.", default="l2")] = "l2"
    pooling: Annotated[Pooling, _advanced("Pooling over cells.", default="max, for the linear head avg")] = "max"
    cws: Annotated[bool, _advanced("Channel-wise softmax; without it: an ablation.", flag="--cws/--no-cws")] = True
    projection: Annotated[bool, _advanced(
        "1x1 convolution; without it: an ablation.", flag="--projection/--no-projection")] = True
    anchors: Annotated[bool, _advanced(
        "Anchors; without them, a dense layer: an ablation.", flag="--anchors/--no-anchors")] = True
    patience: Annotated[int | None, _tuning(
        "Stop after this many epochs without a lower validation loss.", min=1, default="all epochs are trained")] = None
    class_weights: Annotated[Literal["none", "balanced"], _tuning(
        "`balanced` gives all classes the same weight in the loss, N / (C * n_c).", default="none")] = "none"
    anchor_probability: Annotated[float | None, _tuning(
        "Probability of an embedding at its class's anchor; the loss scales the logits to reach it.", min=0.001,
        max=0.999, default="0.9 (grounded), logits as they are (paper)")] = None
    schedule: Annotated[Literal["constant", "cosine"], _tuning(
        "Learning-rate schedule. `cosine` warms up after a fitted head.",
        default="cosine (grounded), constant (paper)")] = "constant"
    foreground: Annotated[float, _tuning(
        "Weight of keeping the slots off the background, which is found without labels, while the head is fitted.",
        min=0, default="3 (grounded), 0 (paper)")] = 0.0
    apart: Annotated[float, _tuning(
        "Weight of keeping the slots of a class on different parts while the head is fitted.", min=0,
        default="0.5 (grounded), 0 (paper)")] = 0.0
    adversarial: Annotated[float, _tuning(
        "Weight of the loss on images attacked outside the boxes. Triples training time.", min=0, default="0")] = 0.0
    start_from: Annotated[StrPath | None, _tuning(
        "Initialise backbone and head from this checkpoint instead of --weights. To continue an interrupted run, use "
        "--resume.", default="none", cli=str)] = None
    keep_off: Annotated[StrPath | None, _data(
        "Keep the attention off the regions in this COCO file.", default="none", cli=str)] = None
    keep_off_weight: Annotated[float | None, _data(
        "Weight of the attention in these regions.", min=0, default="10")] = None
    background: Annotated[StrPath | None, _data(
        "Folder of out-of-distribution images, e.g. empty scenes. They are not trained on; they help --unknown flag "
        "similar images.", default="none", cli=str)] = None
    seed: Annotated[int, _tuning("Seed of weights, order and augmentation.", min=0, max=2**63 - 1, default="0")] = 0
    tf32: Annotated[bool, _advanced("Allow TF32 on the GPU.", flag="--tf32/--no-tf32")] = False
    cache_megabytes: Annotated[int, _advanced(
        "Memory for decoded images and for features of the frozen network, in megabytes.", min=0,
        default="1024")] = 1024
    tensorboard: Annotated[bool, _advanced("Log for TensorBoard.", flag="--tensorboard/--no-tensorboard")] = False
    out: Annotated[StrPath | None, Option("Run directory.", default="runs/<name of DATA>", cli=Path)] = None
    resume: Annotated[bool, Option("Resume the run in --out with its own options, or start one.")] = False
    overwrite: Annotated[bool, Option("Replace the run in --out.")] = False
    compare: Annotated[bool, Option(
        "Then fine-tune the network's own classifier on the same images, into plain/ of the run, and compare.")] = False
    log: Log = log_line
    progress: ProgressChoice | None = None
    # fmt: on

    @property
    def input_size(self) -> tuple[int, int]:
        """(H0, W0) in pixels."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def resize_rule(self) -> ResizeRule:
        """The resize rule; of the shorter side, 7/8 are kept, as in torchvision's presets (224 of 256 pixels)."""
        short = max(self.input_size) * 8 // 7 if self.resize == "shortest_edge" else 0
        return ResizeRule(self.resize, "bilinear", short)

    @property
    def head_config(self) -> HeadConfig:
        """The head; raises UsageError for none of the paper's variants."""
        if self.head != "opal":
            return LINEAR_BASELINE if self.head == "linear" else PLAIN_CLASSIFIER
        return HeadConfig(self.projection, self.cws, self.pooling, self.anchors, self.prototypes, self.distance)

    @property
    def weights_name(self) -> str | None:
        """The weights as a name or path; None for random ones."""
        return None if self.weights == RANDOM else os.fspath(self.weights)

    @property
    def region_weight(self) -> float:
        """Weight of the attention in kept-off regions; 0 without regions."""
        weight = _REGION_WEIGHT if self.keep_off_weight is None else self.keep_off_weight
        return 0.0 if self.keep_off is None else weight

    def plan(self, num_images: int, *, new_classes: bool = False) -> TrainOptions:
        """Return the options with batch size and epochs for so many training images where they are not given.

        `new_classes`: whether the checkpoint of `start_from` has other classes, so that a head must be fitted.
        """
        batch_size, epochs = next((size, count) for limit, size, count in _PLANS if num_images <= limit)
        tunes = self.head != "opal" or self.adversarial or self.minutes is not None
        if self.fits_head(new_classes=new_classes) and num_images <= MAX_FROZEN and not tunes:
            epochs = 0
        epochs = epochs if self.epochs is None else self.epochs
        return replace(self, batch_size=self.batch_size or batch_size, epochs=epochs)

    def validates_out_of_fold(self, num_images: int, *, new_classes: bool = False) -> bool:
        """Return whether one process fits the head only, and can answer out of fold instead of setting images aside."""
        able = os.environ.get("WORLD_SIZE", "1") == "1" and self.head != "plain"
        planned = self.plan(num_images, new_classes=new_classes)
        return able and self.fits_head(new_classes=new_classes) and planned.epochs == 0

    def trains_on_all(self, num_images: int, *, new_classes: bool = False) -> bool:
        """Return whether one process, which set images aside, trains on all of them in the end: few are worth it."""
        able = os.environ.get("WORLD_SIZE", "1") == "1" and self.minutes is None
        return able and self.fits_head(new_classes=new_classes) and num_images <= MAX_FROZEN

    def fits_head(self, *, new_classes: bool) -> bool:
        """Return whether a head is fitted first; one that another run has trained is not, but for other classes."""
        return self.head_steps > 0 and (self.start_from is None or new_classes)

    def to_config(self) -> dict[str, Any]:
        """Return what determines the weights, by the names in checkpoints and config.json."""
        left_out = _CALL_OPTIONS | _HEAD_OPTIONS | {"dataset", "boxes", "size", "head"}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        head = asdict(self.head_config)
        return {**values, "input_size": self.input_size, "weights": self.weights_name, "head": head}

    def to_toml(self) -> str:
        """Return the options as a recipe; `load_recipe` reads it."""
        import tomli_w

        left_out = _CALL_OPTIONS if self.head == "opal" else _CALL_OPTIONS | _HEAD_OPTIONS
        values = {**vars(self), "size": list(self.input_size)}
        return tomli_w.dumps({k: v for k, v in values.items() if k not in left_out and v is not None})

    def check(self) -> None:
        """Raise UsageError for options that no run can have."""
        if self.epochs == 0 and self.head_steps == 0:
            raise UsageError(
                "epochs 0: expected at least 1; 0 fits the head only, and this recipe does not, or --weights are none"
            )
        if min(self.input_size) < 1:
            raise UsageError(f"input size {self.input_size}: expected at least 1 pixel")
        check_network(self.backbone)
        require_stride(self.stride, self.keep_layers)
        if self.stride is not None:
            check_tiling(self.backbone, self.input_size, self.stride)
        if self.precision == "fp16" and parse_device(self.device)[0] == "cpu":
            raise UsageError("precision fp16 on a CPU: use bf16 or fp32, or a GPU")
        if self.head_config.evidence != "exact":
            for name in ("adversarial", "keep_off", "background"):
                if getattr(self, name):
                    raise UsageError(f"{name} needs slots with cells, and this head has none; train the OPAL head")
        if self.resume and self.overwrite:
            raise UsageError("--resume continues a run, --overwrite replaces it: give only one of them")


def load_recipe(name: str) -> dict[str, Any]:
    """Return the options that a recipe states, by name.

    `name` is a recipe of the package, or the path of a file whose keys are options, perhaps in sections of any name.

    UsageError: no such recipe, not TOML, unknown keys, or values of the wrong type.
    """
    own = {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}
    path = own.get(name, Path(name))
    if not path.is_file():
        raise UsageError(f"recipe {name!r}: no such file, and not one of {', '.join(own)}; give a .toml file")
    stored: dict[str, Any] = {}
    try:
        # a path to weights may hold bytes that are not UTF-8
        for key, value in read_toml(path, "surrogateescape").items():
            stored |= value if isinstance(value, dict) else {key: value}
    except (OSError, ValueError) as error:
        raise UsageError(f"recipe {name}: cannot be read as TOML ({error})") from None
    types = {field.name: kind for field, kind, _ in option_fields(TrainOptions) if field.name not in _CALL_OPTIONS}
    options, problems = dict[str, Any](), []
    for stored_name, value in stored.items():
        option = _STORED_NAMES.get(stored_name, stored_name)
        if _FORMER_VALUES.get(option) == value:
            continue
        if option not in types:
            problems.append(f"unknown key {stored_name!r}; expected one of {', '.join(types)}")
            continue
        try:
            options[option] = msgspec.convert(value, str if "PathLike" in str(types[option]) else types[option])
        except msgspec.ValidationError as error:
            problems.append(f"{stored_name} = {value!r}: {error}")
    if problems:
        raise UsageError(f"recipe {name}: {'; '.join(problems)}")
    return options


def resolve(recipe: Mapping[str, Any], options: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a run: those given by name, laid over a recipe's; None leaves one to the recipe.

    UsageError: options that contradict each other, or values that no run can have.
    """
    base = dict(recipe)
    changes = {name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in options.items() if v is not None}
    if changes.get("head") == "additive" or str(changes.get("start_from", "")).endswith(".onnx"):
        raise UsageError(
            "--head additive, --start-from .onnx: a classifier that is explained as it is keeps its weights; find its "
            "slots with `opal-deploy export CLASSIFIER.onnx --slots DATA`"
        )
    if "head" in changes:
        # all parts of OPAL, whatever variant the recipe has
        kept = {"prototypes", "distance"} if changes["head"] == "opal" else set()
        base = {name: value for name, value in base.items() if name not in _HEAD_OPTIONS - kept}
        if changes["head"] != "opal":
            # what the recipe says for its own head does not fit
            base |= {"stride": None, "keep_layers": False, "adapt_stride": False}
    if changes.get("weights") == RANDOM:
        base |= {"head_steps": 0, "anchor_probability": None}
    if "stride" in changes:
        # the network that ends there, unless told otherwise
        base["keep_layers"] = False
    if changes.keys() & {"stride", "keep_layers"}:
        base["adapt_stride"] = False
    merged = {**base, **changes}
    head = merged.get("head", "opal")
    if head != "opal" and (others := sorted(_HEAD_OPTIONS & merged.keys())):
        raise UsageError(f"the {head} head has no {', '.join(others)}; leave them out, or train the OPAL head")
    backbone = merged.get("backbone", TrainOptions.backbone)
    if merged.get("weights", "imagenet") == "imagenet":
        merged["weights"] = default_weights(backbone)
    resolved = TrainOptions(**merged)
    resolved.check()
    return resolved


def resolve_plain(recipe: Mapping[str, Any], options: Mapping[str, Any]) -> TrainOptions:
    """Return the options by which a run of these options is compared with the network's own classifier, fine-tuned."""
    meant_for_slots = _HEAD_OPTIONS | {"epochs", "stride", "keep_layers", "adversarial", "keep_off", "background"}
    others = {name: value for name, value in options.items() if name not in meant_for_slots}
    return resolve(recipe, {**others, "head": "plain", "start_from": None, "resume": not options.get("overwrite")})


def default_weights(name: str) -> str:
    """Return the name of a network's usual ImageNet weights.

    For torchvision these are the paper's: the second set for ResNets, else the first. For timm, which is imported, it
    is the tag in the name, or timm's default.

    UsageError: the library has no such network, or timm no weights for it.
    """
    check_network(name)
    if name.startswith(TIMM_PREFIX):
        from opal_deploy.model import timm_backbones

        return timm_backbones.default_weights(name)
    names = list_torchvision_weights(name)
    preferred = ("IMAGENET1K_V2", "IMAGENET1K_V1") if name.startswith("resnet") else ("IMAGENET1K_V1",)
    return next((weights for weights in preferred if weights in names), "DEFAULT")
