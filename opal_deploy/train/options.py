"""The options of a training run and recipes, the TOML files that hold them. Plain data; imports no torch.

`TrainOptions` declares every option once: the command, `train_model` and recipes read it. What a caller gives is laid
over a recipe (`resolve`). A run stores its resolved options as recipe.toml, which repeats it.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from opal_deploy.artifact.documents import Distance
from opal_deploy.artifact.files import read_toml
from opal_deploy.errors import UsageError
from opal_deploy.logs import Log, ProgressChoice, log_line
from opal_deploy.model.config import (
    EPSILON,
    LINEAR_BASELINE,
    PLAIN_CLASSIFIER,
    HeadConfig,
    HeadKind,
    Pooling,
    check_tiling,
    require_stride,
)
from opal_deploy.model.network_names import TIMM_PREFIX, check_network, list_torchvision_weights
from opal_deploy.options import Option, Options, StrPath, option_fields, parse_size
from opal_deploy.runtime.devices import parse_device

# keys of a recipe by section; a key in brackets is the option's name in the file
_SECTIONS = {
    "data": "dataset partition skip_missing boxes",
    "model": "backbone weights size(input_size) stride keep_layers compare_strides",
    "head": "head(kind) projection cws pooling anchors prototypes(prototypes_per_class) distance epsilon",
    "training": "head_steps epochs minutes patience batch_size lr schedule class_weights anchor_probability agreement "
    "adversarial keep_off keep_off_weight background start_from freeze_backbone reset_dropped augment seed precision "
    "tf32",
    "machine": "device workers compile cache_megabytes tensorboard",
}
# section to {key in the file: option}
SECTIONS = {
    section: {word.rpartition("(")[2].rstrip(")"): word.partition("(")[0] for word in words.split()}
    for section, words in _SECTIONS.items()
}
_SWITCHES = frozenset(SECTIONS["head"].values()) - {"head"}
# options that may differ between a run and its continuation: all but the epochs change only where and how fast it runs
CHANGEABLE_ON_RESUME = ("epochs", *SECTIONS["machine"])
# written by earlier versions, without a meaning here
_FORMER_KEYS = {"machine": {"save_every"}}

RANDOM = "none"  # `weights`
OUTSIDE = "outside"  # `keep_off`: everything outside the objects
# measured (docs/reference/measurements-training.md): small regions need more, most of an image less
_REGION_WEIGHT, _OUTSIDE_WEIGHT = 10.0, 3.0
# share of a cosine schedule in which the learning rate rises after a fitted head: Adam's first steps are the largest
_WARM_UP = 0.1
# options for the whole OPAL head only
_NEEDS_SLOTS = dict.fromkeys(("agreement", "adversarial", "keep_off"), "slots with cells") | {
    "background": "an OOD score"
}
# batch size and epochs up to so many training images; an epoch of few images is few steps
_PLANS = ((1_000, 16, 24), (10_000, 32, 8))
_LARGEST_PLAN = (64, 4)
_MAX_INPUT_PIXELS = 100_000_000
# options by the group of `--help` that lists them
_data, _tuning, _advanced = (partial(Option, panel=panel) for panel in ("Data", "Optimisation", "Advanced"))


def _switch(name: str) -> str:
    return f"--{name}/--no-{name}"


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """The resolved options of a run.

    The defaults here are the paper's protocol (Sec. 4.1 and Supp. B.2), except for `precision`, `epochs` and
    `batch_size`. None means: all layers (`stride`), planned by the number of images (`epochs`, `batch_size`), chosen
    for the machine (`workers`), logits that are not scaled (`anchor_probability`).
    """

    # fmt: off
    recipe: Annotated[StrPath, Option(
        "grounded (finer cells), grounded-resnet50, paper, or a .toml file such as a run's own recipe.toml. Options "
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
    stride: Annotated[int | None, Option(
        "Input pixels per cell: 32, 16 or 8. The backbone ends at its last feature map with this stride.", min=1,
        default="16, or 32 if clearly better on validation images (grounded), all layers (paper)")] = None
    keep_layers: Annotated[bool, _advanced(
        "With --stride: keep all pretrained layers; those after this stride get stride 1.",
        flag=_switch("keep-layers"))] = False
    compare_strides: Annotated[bool, _advanced(
        "Keep all layers instead of --stride if clearly better on validation images.",
        default="on in grounded unless --stride is given", flag=_switch("compare-strides"))] = False
    epochs: Annotated[int | None, Option(
        "Epochs of fine-tuning; 0 fits the head only.", min=0,
        default="24, 8 or 4 by the number of images (grounded), 30 (paper)")] = None
    minutes: Annotated[float | None, Option(
        "Train as many epochs as fit into this time, up to --epochs.", min=0, default="no limit")] = None
    head_steps: Annotated[int, _tuning(
        "Steps of fitting the head to the frozen network before fine-tuning, 20 passes or more; 0 skips it.", min=0,
        default="600 (grounded), 0 (paper)")] = 0
    batch_size: Annotated[int | None, _tuning(
        "Batch size over all processes.", min=1,
        default="16, 32 or 64 by the number of images (grounded), 64 (paper)")] = None
    lr: Annotated[float, _tuning(
        "Adam's initial learning rate.", default="2e-4 in grounded, 1e-4 in the other recipes")] = 1e-4
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
        "cub, dogs, cars, pets, flowers, imagenet, caltech101, dtd, sun397, cub100 or imagefolder.",
        default="recognised by its files")] = None
    partition: Annotated[int, _data("Official partition (DTD, SUN-397).", min=1, max=10, default="1")] = 1
    skip_missing: Annotated[bool, _data(
        "Leave out images that the data set lists but lacks.", flag=_switch("skip-missing"))] = False
    boxes: Annotated[bool, _data("Crop to the data set's boxes.", default="--boxes", flag=_switch("boxes"))] = True
    head: Annotated[HeadKind, _advanced(
        "linear: the paper's linear head, a dense layer on pooled features normalised to length 1. plain: the "
        "network's own classifier, as it is usually fine-tuned.", default="opal")] = "opal"
    prototypes: Annotated[int, Option("Prototypes per class, m.", min=1, default="5")] = 5
    distance: Annotated[Distance, _advanced("Distance between embedding and anchors.", default="l2")] = "l2"
    pooling: Annotated[Pooling, _advanced("Pooling over cells.", default="max, for the linear head avg")] = "max"
    cws: Annotated[bool, _advanced("Channel-wise softmax; without it: an ablation.", flag=_switch("cws"))] = True
    projection: Annotated[bool, _advanced(
        "1x1 convolution; without it: an ablation.", flag=_switch("projection"))] = True
    anchors: Annotated[bool, _advanced(
        "Anchors; without them, a dense layer: an ablation.", flag=_switch("anchors"))] = True
    epsilon: Annotated[float, _advanced("Number added to the embedding's norm.", min=0, default="1e-8")] = EPSILON
    patience: Annotated[int | None, _tuning(
        "Stop after this many epochs without a lower validation loss.", min=1, default="all epochs are trained")] = None
    class_weights: Annotated[Literal["none", "balanced"], _tuning(
        "`balanced` gives all classes the same weight in the loss, N / (C * n_c).", default="none")] = "none"
    anchor_probability: Annotated[float | None, _tuning(
        "Probability of an embedding at its class's anchor; the loss scales the logits to reach it.",
        default="0.9 (grounded), logits as they are (paper)")] = None
    schedule: Annotated[Literal["constant", "cosine"], _tuning(
        "Learning-rate schedule. `cosine` warms up after a fitted head.",
        default="cosine (grounded), constant (paper)")] = "constant"
    agreement: Annotated[float, _tuning(
        "Weight of a consistency loss between an image and its mirror image. Doubles training time.", min=0,
        default="0")] = 0.0
    adversarial: Annotated[float, _tuning(
        "Weight of the loss on images attacked outside the boxes. Triples training time.", min=0, default="0")] = 0.0
    start_from: Annotated[StrPath | None, _tuning(
        "Initialise backbone and head from this checkpoint instead of --weights. To continue an interrupted run, use "
        "--resume.", default="none", cli=str)] = None
    freeze_backbone: Annotated[bool, _tuning(
        "With --start-from: train only the head.", flag=_switch("freeze-backbone"))] = False
    reset_dropped: Annotated[bool, _tuning(
        "With --start-from: train dropped slots anew instead of leaving them dropped.",
        flag=_switch("reset-dropped"))] = False
    keep_off: Annotated[StrPath | None, _data(
        "Keep the attention off these regions: a COCO file, or `outside` for all but the "
        "data set's objects.", default="none", cli=str)] = None
    keep_off_weight: Annotated[float | None, _data(
        "Weight of the attention in these regions.", min=0, default="10, for outside 3")] = None
    background: Annotated[StrPath | None, _data(
        "Folder of out-of-distribution images, e.g. empty scenes. They are not trained on; they help --unknown flag "
        "similar images.", default="none", cli=str)] = None
    seed: Annotated[int, _tuning("Seed of weights, order and augmentation.", min=0, default="0")] = 0
    tf32: Annotated[bool, _advanced("Allow TF32 on the GPU.", flag=_switch("tf32"))] = False
    compile: Annotated[bool, _advanced("Run steps through torch.compile.", flag=_switch("compile"))] = False
    cache_megabytes: Annotated[int, _advanced(
        "Memory for decoded images and for features of the frozen network, in megabytes.", min=0,
        default="1024")] = 1024
    tensorboard: Annotated[bool, _advanced("Log for TensorBoard.", flag=_switch("tensorboard"))] = False
    out: Annotated[StrPath | None, Option("Run directory.", default="runs/<name of DATA>", cli=Path)] = None
    resume: Annotated[bool, Option("Resume the run in --out with its own options, or start one.")] = False
    overwrite: Annotated[bool, Option("Replace the run in --out.")] = False
    log: Log = log_line
    progress: ProgressChoice | None = None
    # fmt: on

    @property
    def input_size(self) -> tuple[int, int]:
        """(H0, W0) in pixels."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def head_config(self) -> HeadConfig:
        """The head; raises UsageError for none of the paper's variants."""
        if self.head != "opal":
            return LINEAR_BASELINE if self.head == "linear" else PLAIN_CLASSIFIER
        return HeadConfig(
            self.projection, self.cws, self.pooling, self.anchors, self.prototypes, self.distance, self.epsilon
        )

    @property
    def weights_name(self) -> str | None:
        """The weights as a name or path; None for random ones."""
        return None if self.weights == RANDOM else os.fspath(self.weights)

    def plan_epochs(self, num_images: int, stored: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Return the batch size and the number of epochs of fine-tuning for a number of training images.

        Args:
            num_images: the number of training images.
            stored: config.json of a run that goes on; it keeps its own, which another version may have planned.
        """
        batch_size, epochs = next((plan for limit, *plan in _PLANS if num_images <= limit), _LARGEST_PLAN)
        known = {name: value for name, value in (stored or {}).items() if isinstance(value, int)}
        return (
            self.batch_size or known.get("batch_size", batch_size),
            known.get("epochs", epochs) if self.epochs is None else self.epochs,
        )

    def learning_rate(self, progress: float) -> float:
        """Return the learning rate after a share `progress` of all steps, 0 ... 1."""
        if self.schedule == "constant":
            return self.lr
        # a random head has nothing that Adam's first steps could destroy
        warm_up = min(progress / _WARM_UP, 1.0) if self.head_steps else 1.0
        return self.lr * warm_up * (1 + math.cos(math.pi * progress)) / 2

    def kept_off_weight(self) -> float | None:
        """Return the weight of the attention in kept-off regions; None without regions."""
        default = _OUTSIDE_WEIGHT if self.keep_off == OUTSIDE else _REGION_WEIGHT
        return None if self.keep_off is None else default if self.keep_off_weight is None else self.keep_off_weight

    def to_config(self) -> dict[str, Any]:
        """Return what determines the weights, by the names that checkpoints and config.json have used so far."""
        values = {
            key if section == "model" else name: getattr(self, name)
            for section in ("model", "training", "machine")
            for key, name in SECTIONS[section].items()
        }
        head = asdict(self.head_config)
        return {**values, "input_size": self.input_size, "weights": self.weights_name, "head": head}

    def to_toml(self) -> str:
        """Return the options as a recipe; `load_recipe` reads it."""
        import tomli_w

        values = {**vars(self), "size": list(self.input_size)}
        sections = {
            section: {key: values[name] for key, name in keys.items() if values[name] is not None}
            for section, keys in SECTIONS.items()
        }
        if self.head != "opal":
            sections["head"] = {"kind": self.head}
        return tomli_w.dumps(sections)

    def check(self) -> None:
        """Raise UsageError for options that no run can have."""
        # a head that another run has trained is not fitted again
        fits_head = self.head_steps > 0 and self.start_from is None
        if self.epochs == 0 and not fits_head:
            why = "--start-from has a fitted head" if self.start_from else "this recipe does not, or --weights are none"
            raise UsageError(f"epochs 0: expected at least 1; 0 fits the head only, and {why}")
        for name in ("lr", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} {value}: expected a number above 0")
        if self.anchor_probability is not None and not 0 < self.anchor_probability < 1:
            raise UsageError(f"anchor_probability {self.anchor_probability}: expected a number between 0 and 1")
        if self.seed >= 1 << 63:
            raise UsageError("the seed must be below 2^63")
        for name in ("agreement", "adversarial", "keep_off_weight", "epsilon"):
            if not math.isfinite(getattr(self, name) or 0):
                raise UsageError(f"{name} {getattr(self, name)}: expected a finite number")
        if min(self.input_size) < 1 or math.prod(self.input_size) > _MAX_INPUT_PIXELS:
            raise UsageError(f"input size {self.input_size}: expected 1 to {_MAX_INPUT_PIXELS:,} pixels")
        check_network(self.backbone)
        require_stride(self.stride, self.keep_layers)
        if self.stride is not None:
            # a transformer's patch may have 14
            if self.stride.bit_count() != 1 and not self.backbone.startswith(TIMM_PREFIX):
                raise UsageError(f"stride {self.stride}: no network has cells of so many pixels; give 32, 16 or 8")
            if not self.compare_strides:
                check_tiling(self.backbone, self.input_size, self.stride)
        kind, _ = parse_device(self.device)
        if self.precision == "fp16" and kind == "cpu":
            raise UsageError("precision fp16 on a CPU: use bf16 or fp32, or a GPU")
        for name, needed in _NEEDS_SLOTS.items():
            if getattr(self, name) and self.head_config.evidence != "exact":
                raise UsageError(
                    f"{name} needs {needed}, and this head has none; leave it out or train the whole OPAL head"
                )
        if self.start_from is None and (self.freeze_backbone or self.reset_dropped):
            name = "--freeze-backbone" if self.freeze_backbone else "--reset-dropped"
            advice = "; to fit only the head to --weights, use --epochs 0" if self.freeze_backbone else ""
            raise UsageError(f"{name} without a trained network; add --start-from CHECKPOINT{advice}")
        if self.resume and self.overwrite:
            raise UsageError("--resume continues a run, --overwrite replaces it: give only one of them")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("opal_deploy.train") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str) -> dict[str, Any]:
    """Return the options that a recipe states, by name.

    Args:
        name: a recipe of the package, or the path of a recipe file.

    Raises:
        UsageError: no such recipe, not TOML, unknown sections or keys, or values of the wrong type.
    """
    names = recipe_names()
    if name in names:
        raw = tomllib.loads((resources.files("opal_deploy.train") / "recipes" / f"{name}.toml").read_text("utf-8"))
    elif Path(name).is_file():
        try:
            # a path to weights may hold bytes that are not UTF-8
            raw = read_toml(Path(name), "surrogateescape")
        except OSError as error:
            raise UsageError(f"recipe {name}: cannot be read ({error.strerror or error})") from None
        except ValueError as error:
            raise UsageError(f"recipe {name}: not TOML ({error})") from None
    else:
        raise UsageError(f"recipe {name!r}: no such file, and not one of {', '.join(names)}; give a .toml file")
    types = {field.name: annotation for field, annotation, _ in option_fields(TrainOptions)}
    options: dict[str, Any] = {}
    problems = []
    for section, keys in raw.items():
        if section not in SECTIONS or not isinstance(keys, dict):
            problems.append(f"unknown section {section!r}; expected one of {', '.join(SECTIONS)}")
            continue
        for key, value in keys.items():
            option = SECTIONS[section].get(key)
            if option is None:
                if key not in _FORMER_KEYS.get(section, ()):
                    problems.append(f"[{section}] has no key {key!r}; expected one of {', '.join(SECTIONS[section])}")
                continue
            expected = str if "PathLike" in str(types[option]) else types[option]
            try:
                options[option] = msgspec.convert(value, expected)
            except msgspec.ValidationError as error:
                problems.append(f"[{section}] {key} = {value!r}: {error}")
    if options.get("head", "opal") != "opal" and (others := ", ".join(sorted(_SWITCHES & options.keys()))):
        problems.append(f"[head] kind = {options['head']!r} takes no other keys; remove {others}")
    if problems:
        raise UsageError(f"recipe {name}: {'; '.join(problems)}")
    return options


def resolve(recipe: Mapping[str, Any], options: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a run: those given, laid over a recipe's.

    Args:
        recipe: options by name, as `load_recipe` returns them.
        options: options by name, which win; None leaves an option to the recipe.

    Raises:
        UsageError: options that contradict each other, or values that no run can have.
    """
    base = dict(recipe)
    changes = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in options.items()
        if value is not None
    }
    head = changes.get("head", base.get("head", "opal"))
    switches = _SWITCHES & changes.keys()
    if "head" in changes:
        # all parts of OPAL, whatever variant the recipe has
        kept = {"prototypes", "distance", "epsilon"} if head == "opal" else set()
        base = {name: value for name, value in base.items() if name not in _SWITCHES - kept}
    if head != "opal":
        if changes.get("pooling") == "max" and head == "linear":
            raise UsageError(
                "--head linear pools by average; for the ablation row with max pooling use "
                "--no-projection --no-cws --no-anchors --pooling max"
            )
        if others := sorted(switches - ({"pooling"} if head == "linear" else set())):
            raise UsageError(
                f"the {head} head has no {', '.join(others)}; leave them out, or train another head (--head opal)"
            )
        if "head" in changes:
            # what the recipe says for its own head does not fit
            base |= {"stride": None, "keep_layers": False, "compare_strides": False}
    if changes.get("weights") == RANDOM:
        base |= {"head_steps": 0, "anchor_probability": None}
    if changes.keys() & {"stride", "keep_layers"}:
        base["compare_strides"] = False
    merged = {**base, **changes}
    backbone = merged.get("backbone", TrainOptions.backbone)
    if merged.get("weights", "imagenet") == "imagenet":
        check_network(backbone)
        merged["weights"] = default_weights(backbone)
    resolved = TrainOptions(**merged)
    resolved.check()
    return resolved


def default_weights(name: str) -> str:
    """Return the name of a network's usual ImageNet weights.

    For torchvision these are the paper's: the second set for ResNets, else the first. For timm it is the tag in the
    name, or timm's default, which takes importing timm.

    Raises:
        UsageError: the library has no such network, or timm no weights for it.
    """
    check_network(name)
    if name.startswith(TIMM_PREFIX):
        from opal_deploy.model import timm_backbones

        return timm_backbones.default_weights(name)
    names = list_torchvision_weights(name)
    preferred = ("IMAGENET1K_V2", "IMAGENET1K_V1") if name.startswith("resnet") else ("IMAGENET1K_V1",)
    return next((weights for weights in preferred if weights in names), "DEFAULT")
