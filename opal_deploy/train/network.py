"""The network that a run starts with, and lines on what the run does and costs.

A run starts with pretrained layers and a new head, or with another run's network (`--start-from`).
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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
from opal_deploy.train.head_fit import BATCH, LEAST_PASSES, VIEWS
from opal_deploy.train.images import TrainImages, normalize
from opal_deploy.train.options import TrainOptions

# a training step costs about three forward passes
PASSES = 3
# images of the batch that is timed
_MEASURED = 8
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


def choose_strides(
    options: TrainOptions, start: Checkpoint | None, stored: Mapping[str, Any] | None
) -> list[TrainOptions]:
    """Return the run's options, or with `compare_strides` those with finer cells and those with all layers.

    Args:
        options: of the run.
        start: checkpoint of `--start-from`, whose stride the run has, too.
        stored: configuration of a run that goes on, whose stride was chosen.
    """
    settled = replace(options, compare_strides=False)
    if not options.compare_strides:
        return [options]
    if start is not None:
        return [replace(settled, stride=start.network.config.stride, keep_layers=start.network.config.keep_layers)]
    if stored is not None:
        return [replace(settled, stride=(stored.get("options") or {}).get("stride"))]
    if is_transformer(options.backbone):
        return [replace(settled, stride=None)]
    own = own_stride(options.backbone)
    # the cells of both must tile the input
    tiles = all(size % own == 0 and size > own for size in options.input_size)
    if not (tiles and options.stride and options.stride < own and options.head_steps and not options.keep_layers):
        return [settled]
    return [settled, replace(settled, stride=own)]


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


def describe_run(options: TrainOptions, config: Mapping[str, Any], epochs: int) -> str:
    """Return a line on the training: network, device, initial weights and method.

    Args:
        options: the run's.
        config: its config.json.
        epochs: as planned; those of a run that goes on may differ from its config.json.
    """
    head, fits = options.head_config, options.head_steps > 0 and options.start_from is None
    where = "" if options.stride is None else f" at stride {options.stride}"
    origin = options.start_from or options.weights
    slots = f"{head.prototypes_per_class} prototypes per class" if head.anchors else f"head {head.kind}"
    steps = [f"the head fitted to the frozen network in {options.head_steps} steps or more"] * fits
    steps += [f"{epochs} epochs in batches of {options.batch_size}, learning rate {options.lr:g}"] * (epochs > 0)
    return (
        f"training {options.backbone}{where} on {config['device']} in {config['precision']}, from {origin}, {slots}: "
        f"{', then '.join(steps)}"
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
        "reset": [f"{start.class_names[class_id]}/{slot}" for class_id, slot in owners],
    }


def describe_weights(network: OpalNetwork, weights: str | None) -> dict[str, Any]:
    """Return the origin of the backbone's initial weights, the sha256 of their file, and its library's details."""
    if weights is None:
        return {"origin": "random"}
    name = network.config.backbone
    library = get_library(name)
    path = Path(weights) if Path(weights).is_file() else library.find_downloaded(name, weights)
    details = library.get_pretrained_config(name, weights).details
    return {
        "origin": network.weights_origin,
        "sha256": None if path is None else compute_sha256(path),
        **({"pretrained_cfg": details} if details else {}),
    }


def describe_cost(
    networks: list[OpalNetwork], options: TrainOptions, data: DataSet, images: TrainImages, processes: int, fits: bool
) -> str:
    """Return a line on the number of images, the time that the run will take, and what other options would save.

    Args:
        networks: one per stride that is compared, finer cells first.
        options: of the run.
        data: the data set.
        images: the training images, of which the first ones are timed.
        processes: number of the run's processes.
        fits: whether the head is fitted first.
    """
    train, val = (len(samples) / processes for samples in (data.train, data.val))
    views = 1 if images.augmentation is None else len(VIEWS)
    steps = max(options.head_steps, views * math.ceil(train / BATCH) * LEAST_PASSES)
    speeds = [measure_speed(network, images) for network in networks]
    fitting = [(views * train + val) * image + steps * step for image, step in speeds] if fits else []
    # attacked images triple the work of a step
    epoch = (PASSES * (1 + 2 * (options.adversarial > 0)) * train + val) * max(image for image, _ in speeds)
    tuning = epoch * (options.epochs or 0)
    line = f"{len(data.train):,} training, {len(data.val):,} validation, {len(data.test):,} test images; about "
    line += f"{_round(sum(fitting) + tuning)} here: "
    line += f"{_round(sum(fitting))} for the head's fit{' at two strides' * (len(fitting) > 1)}, " if fits else ""
    line += f"{_round(epoch)} per epoch"
    line += f"; --stride {options.stride} saves {_round(fitting[1])} of the fit" if len(fitting) > 1 else ""
    return line + (f"; --epochs 0 saves {_round(tuning)}" if fits and tuning else "")


def measure_speed(network: OpalNetwork, images: TrainImages) -> tuple[float, float]:
    """Return the seconds of a forward pass of the backbone per image, and those of a step of fitting the head."""
    device, config, head = next(network.parameters()).device, network.config, network.eval().head
    items = [images[0, index] for index in range(min(_MEASURED, len(images)))]
    pixels = torch.stack([torch.tensor(pixels[..., :3]) for pixels, _ in items])
    inputs = normalize(pixels.to(device), config.mean, config.std)
    forward = step = 0.0
    for batch in (inputs[:1], inputs):  # the first one warms up
        started = time.perf_counter()
        with torch.no_grad():
            features = network.backbone(batch)
        features.sum().item()  # waits for the device
        forward = (time.perf_counter() - started) / len(batch)
        rows = features.repeat(math.ceil(BATCH / len(batch)), 1, 1, 1)[:BATCH]
        started = time.perf_counter()
        total = head(rows).sum()
        torch.autograd.grad(total, list(head.parameters()), allow_unused=True)
        total.item()
        step = time.perf_counter() - started
    return forward, step


def _round(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of all packages that a run's metrics depend on."""
    versions = {"opal-deploy": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "lightning-fabric", "timm", "numpy", "pillow", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
