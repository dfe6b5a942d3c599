"""A run, the network that it starts with, and what config.json says of them.

A run starts with pretrained layers and a new head, or with another run's network (`--start-from`).
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
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
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.options import TrainOptions


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
        stride=options.stride, keep_layers=options.keep_layers,
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


def find_kept_slots(class_names: Sequence[str], start: Checkpoint | None) -> tuple[Tensor, Tensor]:
    """Return the channels of the classes that a checkpoint has too, int64 [k], and their channels there."""
    names = [] if start is None else start.class_names
    kept = [(label, names.index(name)) for label, name in enumerate(class_names) if name in names]
    slots = 0 if start is None else start.network.config.head.prototypes_per_class
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
