"""The network that a run starts with: pretrained layers and a new head, or another run's network (`--start-from`)."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opal_deploy._version import __version__
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import check_classes
from opal_deploy.model import checkpoint
from opal_deploy.model.backbones import get_library, is_transformer, own_stride
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.options import TrainOptions

_PROJECTION = ("head.projection.weight", "head.projection.bias")


def load_start(options: TrainOptions, data: DataSet) -> Checkpoint | None:
    """Return the checkpoint of `options.start_from`; None without one.

    Raises:
        CheckpointError: the file is damaged.
        UsageError: its network does not match the options and the data set.
    """
    if options.start_from is None:
        return None
    path = Path(options.start_from)
    start = checkpoint.load(path)
    stored = start.network.config
    # with compare_strides its own run has chosen the stride
    names = ("backbone",) if options.compare_strides else ("backbone", "stride", "keep_layers")
    values = {name: (getattr(stored, name), getattr(options, name)) for name in names}
    for name, value in vars(options.head_config).items():
        if name not in ("dropped", "epsilon"):
            values[name] = getattr(stored.head, name), value
    if differences := [f"{name} is {old} there and {new} here" for name, (old, new) in values.items() if old != new]:
        raise UsageError(
            f"--start-from {path}: its network differs: {', '.join(differences)}; give the options that it was trained "
            "with, or its run's recipe (--recipe RUN/recipe.toml)"
        )
    check_classes(path, start.class_names, data)
    if options.reset_dropped and not stored.head.dropped:
        raise UsageError(f"--reset-dropped: no slot of {path} was dropped; leave it out")
    return start


def settle_stride(options: TrainOptions, start: Checkpoint | None, stored: Mapping[str, Any] | None) -> TrainOptions:
    """Return the options, without comparing strides if the choice is already made, or cannot be made.

    Args:
        options: of the run.
        start: checkpoint of `--start-from`, whose stride the run has, too.
        stored: config.json of a run that goes on.
    """
    if not options.compare_strides:
        return options
    settled = replace(options, compare_strides=False)
    if start is not None:
        return replace(settled, stride=start.network.config.stride, keep_layers=start.network.config.keep_layers)
    if stored is not None:
        chosen = stored.get("options")
        return replace(settled, stride=chosen.get("stride")) if isinstance(chosen, dict) else settled
    if is_transformer(options.backbone):
        return replace(settled, stride=None)
    comparable = options.head_steps and options.stride is not None and not options.keep_layers
    return options if comparable and is_finer(options.stride, options) else settled


def is_finer(stride: int | None, options: TrainOptions) -> bool:
    """Return whether the network has a coarser stride of its own than `stride`, whose cells tile the input, too."""
    own = own_stride(options.backbone)
    return stride is not None and own > stride and all(size % own == 0 and size > own for size in options.input_size)


def build_network(options: TrainOptions, num_classes: int, start: Checkpoint | None) -> OpalNetwork:
    """Return the network that training starts with; the run's seed determines its new weights.

    Raises:
        CheckpointError: the weights do not fit.
        UsageError: the options fit no network, or there are no such weights.
    """
    torch.manual_seed(options.seed)
    config = NetworkConfig(
        options.backbone, num_classes, options.input_size, options.head_config,
        stride=options.stride, keep_layers=options.keep_layers,
    )  # fmt: skip
    if start is None:
        weights = options.weights_name
        pretrained = get_library(options.backbone).get_pretrained_config(options.backbone, weights)
        return OpalNetwork(replace(config, mean=pretrained.mean, std=pretrained.std), weights=weights).channels_last()
    stored = start.network.config
    dropped = stored.head.dropped
    head = config.head if options.reset_dropped else replace(config.head, dropped=dropped)
    network = OpalNetwork(replace(config, head=head, mean=stored.mean, std=stored.std))
    state, new = start.network.state_dict(), network.state_dict()
    if options.reset_dropped:
        for key in _PROJECTION:
            state[key][list(dropped)] = new[key][list(dropped)]
    network.load_state_dict(state)
    return network.channels_last()


def check_batch_norm(network: OpalNetwork, local_batch: int) -> None:
    """Raise UsageError where batch normalisation would see a single value per channel in a process's local batch."""
    normalizes = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
    if normalizes and local_batch == 1 and network.grid == (1, 1):
        raise UsageError(
            f"batches of one image with a single cell in {network.config.backbone}: batch normalisation needs two "
            "values; give a larger --batch-size or --size"
        )


def describe_run(options: TrainOptions, config: Mapping[str, Any], epochs: int) -> str:
    """Return a line on the training: network, a GPU, initial weights and method.

    Args:
        options: the run's.
        config: its config.json.
        epochs: as planned; those of a run that goes on may differ from its config.json.
    """
    head, weights, started = options.head_config, config["weights"], config["start"] is not None
    where = "" if options.stride is None else f" at stride {options.stride}"
    if config["device"] != "cpu":
        where += f" on {config['device']} in {config['precision']}"
    origin = f"from {options.start_from}"
    if weights is not None and not started:
        origin = "random weights" if options.weights_name is None else f"weights {weights['origin']}"
    slots = f"{head.prototypes_per_class} prototypes per class" if head.anchors else f"head {head.kind}"
    fitting = f"the head fitted to the frozen network in {options.head_steps} steps or more"
    trained = "the head" if options.freeze_backbone else "all layers"
    tuning = f"{epochs} epochs of {trained} in batches of {config['batch_size']}, learning rate {options.lr:g}"
    steps = [fitting] if options.head_steps and not started else []
    return (
        f"training {options.backbone}{where}, {origin}, {slots}: {', then '.join([*steps, *[tuning] * (epochs > 0)])}"
    )


def describe_start(options: TrainOptions, start: Checkpoint | None) -> dict[str, Any] | None:
    """Return the entry of `--start-from` in config.json: the file, and which of its parts are trained."""
    if start is None:
        return None
    dropped = start.network.config.head.dropped if options.reset_dropped else ()
    owners = [start.network.config.class_map.owners(channel)[0] for channel in dropped]
    return {
        "file": start.source["file"],
        "sha256": start.source["sha256"],
        "frozen_backbone": options.freeze_backbone,
        "reset": [f"{start.class_names[class_id]}/{slot}" for class_id, slot in owners],
    }


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
