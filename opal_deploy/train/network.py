"""A run, the network that it starts with, what config.json says of them, and what the run will cost.

A run starts with pretrained layers and a new head, or with another run's network (`--start-from`).
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from opal_deploy._version import __version__
from opal_deploy.artifact.files import compute_sha256, without_folders
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import check_classes
from opal_deploy.logs import Log, Progress
from opal_deploy.model import checkpoint
from opal_deploy.model.backbones import build, get_library
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.head_fit import BATCH, DIRECTIONS, LEAST_PASSES, VIEWS
from opal_deploy.train.images import TrainImages, normalize
from opal_deploy.train.options import MAX_FROZEN, TrainOptions

# a training step costs about three forward passes
PASSES = 3
# images of the batch that is timed
_MEASURED = 8


@dataclass(frozen=True)
class Run:
    """The data, options and devices that all steps of a run share."""

    data: DataSet  # without images that cannot be decoded, once they are read
    options: TrainOptions
    fabric: Fabric  # processes, device and precision
    precision: str  # fp32, bf16 or fp16
    progress: Progress  # as `log`, silent in all processes but the first
    log: Log
    start: Checkpoint | None  # of `--start-from`
    fingerprint: dict[str, str]  # of the data set, see `run_directory.fingerprint_dataset`

    @property
    def new_classes(self) -> bool:
        """Whether `start` has other classes, so that a head must be fitted."""
        return self.start is not None and self.start.class_names != self.data.class_names

    @property
    def ends_on_all(self) -> bool:
        """Whether training is repeated on all images, those that were set aside to validate too."""
        whole = self.data.whole
        return whole is not None and self.options.trains_on_all(len(whole.train), new_classes=self.new_classes)

    @property
    def fits_again(self) -> bool:
        """Whether one process fits the head again after fine-tuning: few images are worth the time.

        In networks trained from random weights, the largest features may not be of the object.
        """
        options = self.options
        keeps_off = options.foreground > 0 and options.head_steps > 0 and options.head_config.evidence == "exact"
        few = self.fabric.world_size == 1 and len(self.data.train) <= MAX_FROZEN
        return few and keeps_off and not options.adversarial

    def identify(self) -> dict[str, Any]:
        """Return what a run must have in common with the one that it goes on with."""
        start = self.start
        return {
            "options": without_folders(self.options.to_config()), "fingerprint": self.fingerprint,
            "processes": self.fabric.world_size, "precision": self.precision,
            "start": None if start is None else {key: start.source[key] for key in ("file", "sha256")},
        }  # fmt: skip


def load_start(options: TrainOptions, data: DataSet) -> Checkpoint | None:
    """Return the checkpoint of `options.start_from`; None without one.

    Raises:
        CheckpointError: the file is damaged.
        UsageError: its network does not match the options; or its classes are others, and no head is to be fitted.
    """
    if options.start_from is None:
        return None
    path = Path(options.start_from)
    start = checkpoint.load(path)
    stored = start.network.config
    names = ("backbone",) if options.adapt_stride else ("backbone", "stride", "keep_layers")
    values = {name: (getattr(stored, name), getattr(options, name)) for name in names}
    head = {name: value for name, value in vars(options.head_config).items() if name not in ("dropped", "epsilon")}
    values |= {name: (getattr(stored.head, name), value) for name, value in head.items()}
    if differences := [f"{name} is {old} there and {new} here" for name, (old, new) in values.items() if old != new]:
        raise UsageError(
            f"--start-from {path}: its network differs: {', '.join(differences)}; give the options that it was trained "
            "with, or its run's recipe (--recipe RUN/recipe.toml)"
        )
    if not options.head_steps:
        check_classes(path, start.class_names, data)
    return start


def settle_stride(options: TrainOptions, start: Checkpoint | None, stored: Mapping[str, Any] | None) -> TrainOptions:
    """Return the options with cells that the backbone has: with `adapt_stride` its own if it has none of the recipe's.

    A run keeps the cells of the checkpoint `start`, and a run that goes on those in its `stored` configuration.
    """
    if not options.adapt_stride:
        return options
    stride, keep_layers = options.stride, options.keep_layers
    if start is not None:
        stride, keep_layers = start.network.config.stride, start.network.config.keep_layers
    elif stored is not None:
        settled = stored.get("options") or {}
        stride, keep_layers = settled.get("stride"), bool(settled.get("keep_layers"))
    else:
        try:
            build(options.backbone, stride=stride, keep_layers=keep_layers, device="meta").grid(options.input_size)
        except UsageError:
            stride, keep_layers = None, False
    return replace(options, stride=stride, keep_layers=keep_layers, adapt_stride=False)


def build_network(options: TrainOptions, class_names: Sequence[str], start: Checkpoint | None) -> OpalNetwork:
    """Return the network that training starts with; the run's seed determines its new weights.

    Classes that the checkpoint of `--start-from` lacks get new slots; the others keep theirs. CheckpointError: the
    weights do not fit; UsageError: the options fit no network, or there are no such weights.
    """
    torch.manual_seed(options.seed)
    config = NetworkConfig(
        options.backbone, len(class_names), options.input_size, options.head_config,
        stride=options.stride, keep_layers=options.keep_layers, resize=str(options.resize_rule),
    )  # fmt: skip
    if start is None:
        weights = options.weights_name
        pretrained = get_library(options.backbone).get_pretrained_config(options.backbone, weights)
        return OpalNetwork(replace(config, mean=pretrained.mean, std=pretrained.std), weights=weights).channels_last()
    stored = start.network.config
    config = replace(config, mean=stored.mean, std=stored.std)
    if start.class_names == list(class_names):
        # what edits dropped is still dropped
        network = OpalNetwork(replace(config, head=replace(config.head, dropped=stored.head.dropped)))
        network.load_state_dict(start.network.state_dict())
        return network.channels_last()
    network = OpalNetwork(config)
    network.backbone.load_state_dict(start.network.backbone.state_dict())
    slots, own = network.head.projection, start.network.head.projection
    if isinstance(slots, nn.Conv2d) and isinstance(own, nn.Conv2d):
        rows, others = find_kept_slots(class_names, start)
        with torch.no_grad():
            slots.weight[rows] = own.weight[others]
            slots.bias[rows] = own.bias[others]  # type: ignore[index]  # a projection has one
    return network.channels_last()


def find_kept_slots(class_names: Sequence[str], start: Checkpoint) -> tuple[Tensor, Tensor]:
    """Return the channels of the classes that a checkpoint has too, int64 [k], and their channels there."""
    names, slots = start.class_names, start.network.config.head.prototypes_per_class
    kept = [(label, names.index(name)) for label, name in enumerate(class_names) if name in names]
    columns = torch.tensor(kept, dtype=torch.int64).reshape(-1, 2).T
    rows, others = ((labels[:, None] * slots + torch.arange(slots)).flatten() for labels in columns)
    return rows, others


def describe_run(run: Run, epochs: int) -> str:
    """Return a line on the training of so many epochs: network, device, initial weights and method."""
    options, head = run.options, run.options.head_config
    where = "" if options.stride is None else f" at stride {options.stride}"
    slots = f"{head.prototypes_per_class} prototypes per class" if head.anchors else f"head {head.kind}"
    steps = f"{epochs} epochs in batches of {options.batch_size}, learning rate {options.lr:g}"
    return (
        f"training {options.backbone}{where} on {run.fabric.device} in {run.precision}, from "
        f"{options.start_from or options.weights}, {slots}: {steps if epochs else 'the head only'}"
    )


def describe_cost(run: Run, network: OpalNetwork, images: TrainImages, heads: int) -> str:
    """Return a line on the numbers of images, and on the time until best.pt, with `heads` to fit, and for all epochs.

    The network's backbone is timed on the first training `images`, its head on random features.
    """
    data, options, processes = run.data, run.options, run.fabric.world_size
    forward = measure_seconds_per_image(network, images) / processes
    # attacked images triple the work of a step
    epoch = forward * (PASSES * (3 if options.adversarial else 1) * len(data.train) + len(data.val))
    epochs = options.epochs or 0
    line = f"{len(data.train):,} training, {len(data.val):,} validation, {len(data.test):,} test images; "
    if heads:
        seen = len(VIEWS) * len(data.train)
        steps = heads * max(options.head_steps, LEAST_PASSES * math.ceil(seen / BATCH))
        # validation images are answered twice: for metrics and for the baseline
        first = forward * (seen + 2 * len(data.val) + (0 if epochs else len(data.test)))
        line += f"best.pt in about {_round(first + steps * measure_seconds_per_step(network) / processes)}"
        if not epochs:
            return line
        line += ", then "
    line += f"{epochs} epochs of about {_round(epoch)} each, {_round(epochs * epoch)} in all"
    again = ", then the best number of them again on all images" if run.ends_on_all else ""
    return line + again + ("; --epochs 0 fits the head only" if heads else "")


def measure_seconds_per_image(network: OpalNetwork, images: TrainImages) -> float:
    """Return the seconds that the backbone takes per image in a forward pass."""
    device, config = next(network.eval().parameters()).device, network.config
    pixels = [torch.tensor(images[0, index][0][..., :3]) for index in range(min(_MEASURED, len(images)))]
    inputs = normalize(torch.stack(pixels).to(device), config.mean, config.std)
    with torch.no_grad():
        return _time(lambda: network.backbone(inputs)) / len(inputs)


def measure_seconds_per_step(network: OpalNetwork) -> float:
    """Return the seconds of a step of fitting the head, to random features of 64 images."""
    if not network.config.head.projection:
        return 0.0  # a dense layer on pooled features
    device, channels = next(network.parameters()).device, min(DIRECTIONS, network.backbone.num_features)
    head = OpalHead(channels, network.config.num_classes, network.config.head).to(device)
    features = torch.randn(BATCH, channels, *network.grid, device=device)

    def step() -> Tensor:
        total: Tensor = head(features).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    return _time(step)


def _time(call: Callable[[], Tensor]) -> float:
    """Return the seconds of the second of two calls; the first warms up."""
    call().sum().item()  # waits for the device
    started = time.perf_counter()
    call().sum().item()
    return time.perf_counter() - started


def _round(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe_weights(network: OpalNetwork, weights: str | None) -> dict[str, Any]:
    """Return the origin of the backbone's initial weights, the sha256 of a file, and its library's details."""
    if weights is None:
        return {"origin": "random"}
    name = network.config.backbone
    details = get_library(name).get_pretrained_config(name, weights).details
    return {
        "origin": network.weights_origin,
        "sha256": compute_sha256(Path(weights)) if Path(weights).is_file() else None,
        **({"pretrained_cfg": details} if details else {}),
    }


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of all packages that a run's metrics depend on."""
    versions = {"opal-deploy": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "lightning-fabric", "timm", "numpy", "pillow", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
