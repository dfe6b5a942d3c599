"""The options of a training run, and recipes: TOML files that hold them. Plain data; imports no torch.

    [data]      dataset, partition, skip_missing, boxes
    [model]     backbone, weights, input_size, stride, keep_layers, compare_strides
    [head]      kind, projection, cws, pooling, anchors, prototypes_per_class, distance, epsilon
    [training]  head_steps, epochs, minutes, patience, batch_size, lr, schedule, class_weights, anchor_probability,
                agreement, adversarial, keep_off, keep_off_weight, start_from, freeze_backbone, reset_dropped, augment,
                seed, precision, tf32
    [machine]   device, workers, compile, cache_megabytes, save_every, tensorboard

Defaults are the paper's, with two exceptions: `precision` is `auto`, and the number of training images determines
`epochs` and `batch_size` unless a recipe states them (`paper` does). A run stores its resolved recipe, which repeats
it.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from opal_deploy.artifact.files import read_toml
from opal_deploy.errors import UsageError, require
from opal_deploy.model.config import (
    LINEAR_BASELINE,
    PLAIN_CLASSIFIER,
    HeadConfig,
    HeadKind,
    check_tiling,
    require_stride,
)
from opal_deploy.model.network_names import TIMM_PREFIX, check_network, default_weights
from opal_deploy.runtime.devices import parse_device

# erase: the paper's, and random erasing
Augment = Literal["paper", "erase", "none"]
ClassWeights = Literal["none", "balanced"]
# learning rate: fixed; or falling to 0 along half a cosine (Loshchilov and Hutter 2017, without restarts), with a
# warm-up after a fitted head
Schedule = Literal["constant", "cosine"]
# type of the convolutions while training; `auto` is bfloat16 or float16 on a GPU, float32 on a CPU
TrainingPrecision = Literal["auto", "fp32", "bf16", "fp16"]

# section name to keys and values
Sections = dict[str, dict[str, Any]]

IMAGENET, RANDOM = "imagenet", "none"
# `keep_off` without a file: everything outside the objects
OUTSIDE = "outside"
# measured (docs/reference/measurements-training.md): small regions need more, most of an image less
_REGION_WEIGHT, _OUTSIDE_WEIGHT = 10.0, 3.0

# share of a cosine schedule's steps in which the learning rate rises from 0 after a fitted head: Adam's first steps are
# the largest
_WARM_UP = 0.1
# options for the whole OPAL head only
_NEEDS_SLOTS = {
    "agreement": "slots with cells",
    "adversarial": "slots with cells",
    "keep_off": "slots with cells",
    "background": "an OOD score",
}
# batch size and epochs up to so many training images; an epoch of few images is few steps
_PLANS = ((1_000, 16, 24), (10_000, 32, 8))
_LARGEST_PLAN = (64, 4)

# these change how fast and where a run computes, not what
MACHINE_OPTIONS = ("device", "workers", "compile", "cache_megabytes", "save_every", "tensorboard")
# options that may differ between a run and its continuation
CHANGEABLE_ON_RESUME = ("epochs", *MACHINE_OPTIONS)

# of TOML, whose integers have 64 bits
_MAX_INTEGER = 1 << 63
_MAX_INPUT_PIXELS = 100_000_000
_CHOICES = {"kind": get_args(HeadKind)}
_TYPE_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


@dataclass(frozen=True)
class TrainOptions:
    """The resolved options of a run; `options.TrainRunOptions` describes each.

    The defaults are the paper's protocol (Sec. 4.1 and Supp. B.2), except for `precision`, `epochs` and `batch_size`.
    Here `weights` of None means random ones, `stride` of None all layers before the global pooling, `workers` of None
    `machine.default_num_workers`, `epochs` and `batch_size` of None those of `plan_epochs`, and `anchor_probability` of
    None logits that are not scaled. With `compare_strides`, all layers are kept instead of `stride` if that classifies
    clearly more validation images correctly (`train.stride`).
    """

    backbone: str = "convnext_tiny"
    head: HeadConfig = field(default_factory=HeadConfig)
    weights: str | None = None
    head_steps: int = 0
    epochs: int | None = None
    minutes: float | None = None
    patience: int | None = None
    batch_size: int | None = None
    lr: float = 1e-4
    schedule: Schedule = "constant"
    class_weights: ClassWeights = "none"
    anchor_probability: float | None = None
    agreement: float = 0.0
    adversarial: float = 0.0
    keep_off: str | None = None
    keep_off_weight: float | None = None
    background: str | None = None
    start_from: str | None = None
    freeze_backbone: bool = False
    reset_dropped: bool = False
    input_size: tuple[int, int] = (224, 224)
    stride: int | None = None
    keep_layers: bool = False
    compare_strides: bool = False
    augment: Augment = "paper"
    seed: int = 0
    device: str = "auto"
    precision: TrainingPrecision = "auto"
    tf32: bool = False
    compile: bool = False
    workers: int | None = None
    cache_megabytes: int = 1024
    save_every: int = 0
    tensorboard: bool = False

    def plan_epochs(self, num_images: int, stored: Mapping[str, Any] | None = None) -> tuple[int, int]:
        """Return the batch size and the number of epochs of fine-tuning for a number of training images.

        Args:
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
        if self.keep_off is None:
            return None
        default = _OUTSIDE_WEIGHT if self.keep_off == OUTSIDE else _REGION_WEIGHT
        return default if self.keep_off_weight is None else self.keep_off_weight

    def stops_after(self, epoch: int, best_epoch: int) -> bool:
        """Return whether `patience` ends the run after an epoch, given the best epoch so far."""
        return self.patience is not None and epoch - best_epoch >= self.patience

    def check(self) -> None:
        """Raise UsageError for values that no run can have."""
        if self.patience is not None and self.patience < 1:
            raise UsageError(f"patience {self.patience}: expected at least 1 epoch")
        # a head that another run has trained is not fitted again
        fits_head = self.head_steps > 0 and self.start_from is None
        if self.epochs is not None and self.epochs < (0 if fits_head else 1):
            why = "--start-from has a fitted head" if self.start_from else "this recipe does not, or --weights are none"
            raise UsageError(f"epochs {self.epochs}: expected at least 1; 0 fits the head only, and {why}")
        if self.head_steps < 0 or (self.batch_size is not None and self.batch_size < 1):
            raise UsageError("the batch size must be at least 1, and head_steps must not be negative")
        for name in ("lr", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} {value}: expected a number above 0")
        if self.anchor_probability is not None and not 0 < self.anchor_probability < 1:
            raise UsageError(f"anchor_probability {self.anchor_probability}: expected a number between 0 and 1")
        if self.seed >= 1 << 63 or not math.isfinite(self.head.epsilon):
            raise UsageError("the seed must be below 2^63, and the head's epsilon a number")
        if self.save_every < 0 or self.cache_megabytes < 0 or (self.workers or 0) < 0 or self.seed < 0:
            raise UsageError("save_every, cache_megabytes, workers and seed must not be negative")
        if math.prod(self.input_size) > _MAX_INPUT_PIXELS:
            raise UsageError(f"the input size {self.input_size} is over the limit of {_MAX_INPUT_PIXELS:,} pixels")
        require_stride(self.stride, self.keep_layers)
        if self.stride is not None:
            # a transformer's patch may have 14
            if self.stride.bit_count() != 1 and not self.backbone.startswith(TIMM_PREFIX):
                raise UsageError(f"stride {self.stride}: no network has cells of so many pixels; give 32, 16 or 8")
            if not self.compare_strides:
                check_tiling(self.backbone, self.input_size, self.stride)
        check_precision(self.precision, parse_device(self.device)[0])
        for name in ("agreement", "adversarial", "keep_off_weight"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise UsageError(f"{name} {getattr(self, name)}: expected a weight of at least 0")
        for name, needed in _NEEDS_SLOTS.items():
            if getattr(self, name) and self.head.evidence != "exact":
                raise UsageError(
                    f"{name} needs {needed}, and this head has none; leave it out or train the whole OPAL head"
                )
        if self.start_from is None and (self.freeze_backbone or self.reset_dropped):
            name = "--freeze-backbone" if self.freeze_backbone else "--reset-dropped"
            advice = "; to fit only the head to --weights, use --epochs 0" if self.freeze_backbone else ""
            raise UsageError(f"{name} without a trained network; add --start-from CHECKPOINT{advice}")
        choices = {
            "schedule": Schedule, "class_weights": ClassWeights, "augment": Augment, "precision": TrainingPrecision
        }  # fmt: skip
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} {getattr(self, name)!r}: expected one of {', '.join(get_args(kind))}")


def check_precision(precision: TrainingPrecision, device_type: str) -> None:
    """Raise UsageError for float16 on a CPU (`device_type` cpu), which has no fast float16 arithmetic."""
    if precision == "fp16" and device_type == "cpu":
        raise UsageError("precision fp16 on a CPU: use bf16 or fp32, or a GPU")


@dataclass(frozen=True)
class Recipe:
    """A resolved run.

    Attributes:
        options: the options of the run.
        dataset: one of `datasets.registry.DATASET_NAMES`; None recognizes the folder by its files.
        partition: number of the official partition.
        skip_missing: leave out listed images that do not exist.
        boxes: crop images to the data set's boxes.
    """

    options: TrainOptions
    dataset: str | None = None
    partition: int = 1
    skip_missing: bool = False
    boxes: bool = True

    def to_toml(self) -> str:
        """Return the recipe as TOML; `resolve_recipe` reverses it."""
        require("tomli_w", "train", "saving a recipe", pip_name="tomli-w")
        import tomli_w

        options, head = self.options, self.options.head
        values = {
            **vars(self),
            **vars(options),
            **vars(head),
            "weights": options.weights or RANDOM,
            "input_size": list(options.input_size),
            "keep_layers": options.keep_layers or None,
            "compare_strides": options.compare_strides or None,
        }
        sections = {
            section: {key: values[key] for key in keys if values.get(key) is not None}
            for section, keys in SECTIONS.items()
        }
        if head.plain:
            sections["head"] = {"kind": "plain"}
        return tomli_w.dumps(sections)


def _toml_types(options: type) -> dict[str, type]:
    """Return each field's type in TOML: str for a Literal, list for a tuple."""
    types = {}
    for name, hint in get_type_hints(options).items():
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        (kind,) = (part for part in parts if part is not NoneType)
        types[name] = {Literal: str, tuple: list}.get(get_origin(kind), kind)
    return types


def _sections() -> dict[str, dict[str, type]]:
    data, options = _toml_types(Recipe), _toml_types(TrainOptions)
    del data["options"], options["head"]
    names = ("backbone", "weights", "input_size", "stride", "keep_layers", "compare_strides")
    model = {name: options.pop(name) for name in names}
    machine = {name: options.pop(name) for name in MACHINE_OPTIONS}
    head = {"kind": str, **_toml_types(HeadConfig)}
    # the first is a kind; slots are dropped from a trained model
    del head["plain"], head["dropped"]
    return {"data": data, "model": model, "head": head, "training": options, "machine": machine}


# the sections of a recipe, with the type of each key
SECTIONS = _sections()


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    folder = resources.files("opal_deploy.train") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str) -> Sections:
    """Return a recipe of the package by name, or a recipe file.

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
    problems = _find_problems(raw)
    if problems:
        raise UsageError(f"recipe {name}: {'; '.join(problems)}")
    return raw


def resolve_recipe(raw: Sections, overrides: Sections) -> Recipe:
    """Return a recipe, overridden by the values of the command line.

    Args:
        raw: a recipe as `load_recipe` returns it.
        overrides: the same sections; values of None change nothing.

    Raises:
        UsageError: options that contradict each other, or values that no run can have.
    """
    changes = {section: {k: v for k, v in keys.items() if v is not None} for section, keys in overrides.items()}
    if problems := [problem for section, keys in changes.items() for problem in _find_wrong_values(section, keys)]:
        raise UsageError("; ".join(problems))
    # another head or random weights instead of the recipe's: what it says for its own does not fit them
    adapted: Sections = {"model": {}, "training": {}}
    if changes.get("head", {}).get("kind") in ("linear", "plain"):
        adapted["model"] = {"stride": None, "keep_layers": False, "compare_strides": False}
    if changes.get("model", {}).get("weights") == RANDOM:
        adapted["training"] |= {"head_steps": 0, "anchor_probability": None}
    if changes.get("model", {}).keys() & {"stride", "keep_layers"}:
        adapted["model"]["compare_strides"] = False
    merged: Sections = {
        section: {**raw.get(section, {}), **adapted.get(section, {}), **changes.get(section, {})}
        for section in SECTIONS
    }
    model, data = merged["model"], merged["data"]
    backbone = model.get("backbone", TrainOptions.backbone)
    options = TrainOptions(
        backbone=backbone,
        head=_resolve_head(raw.get("head", {}), changes.get("head", {})),
        weights=_resolve_weights(model.get("weights", IMAGENET), backbone),
        input_size=_parse_input_size(model.get("input_size", TrainOptions.input_size)),
        stride=model.get("stride"),
        keep_layers=model.get("keep_layers", TrainOptions.keep_layers),
        compare_strides=model.get("compare_strides", TrainOptions.compare_strides),
        **merged["training"],
        **merged["machine"],
    )
    options.check()
    return Recipe(options, **data)


def _find_problems(raw: dict[str, Any]) -> list[str]:
    problems = []
    for section, keys in raw.items():
        if section not in SECTIONS or not isinstance(keys, dict):
            problems.append(f"unknown section {section!r}; expected one of {', '.join(SECTIONS)}")
            continue
        problems += _find_wrong_values(section, keys)
    head = raw.get("head")
    if isinstance(head, dict) and head.get("kind") in ("linear", "plain") and len(head) > 1:
        others = ", ".join(key for key in head if key != "kind")
        problems.append(f"[head] kind = {head['kind']!r} takes no other keys; remove {others}")
    return problems


def _find_wrong_values(section: str, keys: dict[str, Any]) -> list[str]:
    problems, known = [], SECTIONS[section]
    for key, value in keys.items():
        if key not in known:
            problems.append(f"[{section}] has no key {key!r}; expected one of {', '.join(known)}")
        elif not _has_type(value, known[key]):
            problems.append(f"[{section}] {key} = {value!r}: expected {_TYPE_NAMES[known[key]]}")
        elif key in _CHOICES and value not in _CHOICES[key]:
            problems.append(f"[{section}] {key} = {value!r}: expected {' or '.join(_CHOICES[key])}")
    return problems


def _has_type(value: Any, expected: type) -> bool:
    # True is an int to Python, and 1 is not a float to TOML
    fits = not isinstance(value, int) or abs(value) < _MAX_INTEGER
    return fits and (type(value) in (float, int) if expected is float else type(value) is expected)


def _resolve_head(recipe: dict[str, Any], overrides: dict[str, Any]) -> HeadConfig:
    kind = overrides.get("kind", recipe.get("kind"))
    switches = {key: value for key, value in overrides.items() if key != "kind"}
    if kind in ("linear", "plain"):
        if kind == "linear" and switches.get("pooling") == "max":
            raise UsageError(
                "--head linear pools by average; for the ablation row with max pooling use "
                "--no-projection --no-cws --no-anchors --pooling max"
            )
        if others := sorted(switches.keys() - ({"pooling"} if kind == "linear" else set())):
            raise UsageError(
                f"the {kind} head has no {', '.join(others)}; leave them out, or train another head (--head opal)"
            )
        return LINEAR_BASELINE if kind == "linear" else PLAIN_CLASSIFIER
    base = {key: value for key, value in recipe.items() if key != "kind"}
    if overrides.get("kind") == "opal":
        # all parts of OPAL, whatever variant the recipe has
        base = {key: value for key, value in base.items() if key in ("prototypes_per_class", "distance", "epsilon")}
    known = {field.name for field in fields(HeadConfig)}
    return HeadConfig(**{key: value for key, value in {**base, **switches}.items() if key in known})


def _resolve_weights(name: str, backbone: str) -> str | None:
    check_network(backbone)
    if name == RANDOM:
        return None
    return default_weights(backbone) if name == IMAGENET else name


def _parse_input_size(value: Any) -> tuple[int, int]:
    if len(value) != 2 or not all(type(number) is int and number > 0 for number in value):
        raise UsageError(f"input_size {value!r}: expected two whole numbers, height and width in pixels")
    return value[0], value[1]
