"""The network that a run starts with: pretrained layers and a new head, or another run's network (`--start-from`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import check_classes
from opal_deploy.model import checkpoint
from opal_deploy.model.backbones import get_library
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.recipe import TrainOptions

_PROJECTION = ("head.projection.weight", "head.projection.bias")


def load_start(options: TrainOptions, data: DataSet) -> Checkpoint | None:
    """Return the checkpoint of `options.start_from`; None without one.

    Raises:
        CheckpointError: the file is damaged.
        UsageError: there is no such checkpoint, or its network does not match the options and the data set.
    """
    if options.start_from is None:
        return None
    path = Path(options.start_from)
    found = checkpoint.load(path)
    theirs = found.network.config
    values = {
        "backbone": (theirs.backbone, options.backbone),
        "stride": (theirs.stride, options.stride),
        "keep_layers": (theirs.keep_layers, options.keep_layers),
        **{
            name: (getattr(theirs.head, name), value)
            for name, value in vars(options.head).items()
            if name not in ("dropped", "epsilon")
        },
    }
    if options.compare_strides:
        # its own run has chosen
        del values["stride"], values["keep_layers"]
    differences = [
        f"{name} is {there} there and {here} here" for name, (there, here) in values.items() if there != here
    ]
    if differences:
        raise UsageError(
            f"--start-from {path}: its network differs: {', '.join(differences)}; give the options that it was trained "
            "with, or its run's recipe (--recipe RUN/recipe.toml)"
        )
    check_classes(path, found.class_names, data)
    if options.reset_dropped and not theirs.head.dropped:
        raise UsageError(f"--reset-dropped: no slot of {path} was dropped; leave it out")
    return found


def build_network(options: TrainOptions, num_classes: int, start: Checkpoint | None) -> OpalNetwork:
    """Return the network that training starts with; new weights come from torch's generator.

    Raises:
        CheckpointError: the weights do not fit.
        UsageError: the options fit no network, or there are no such weights.
    """
    config = NetworkConfig(
        options.backbone, num_classes, options.input_size, options.head,
        stride=options.stride, keep_layers=options.keep_layers,
    )  # fmt: skip
    if start is None:
        pretrained = get_library(options.backbone).get_pretrained_config(options.backbone, options.weights)
        return OpalNetwork(replace(config, mean=pretrained.mean, std=pretrained.std), weights=options.weights)
    theirs = start.network.config
    dropped = theirs.head.dropped
    head = config.head if options.reset_dropped else replace(config.head, dropped=dropped)
    network = OpalNetwork(replace(config, head=head, mean=theirs.mean, std=theirs.std))
    state, new = start.network.state_dict(), network.state_dict()
    if options.reset_dropped:
        for key in _PROJECTION:
            state[key][list(dropped)] = new[key][list(dropped)]
    network.load_state_dict(state)
    return network


def describe_run(options: TrainOptions, config: Mapping[str, Any], epochs: int) -> str:
    """Return a line on the training: network, a GPU, initial weights and method.

    Args:
        options: the run's.
        config: its config.json.
        epochs: as planned; those of a run that goes on may differ from its config.json.
    """
    head, weights, started = options.head, config["weights"], config["start"] is not None
    where = "" if options.stride is None else f" at stride {options.stride}"
    if config["device"] != "cpu":
        where += f" on {config['device']} in {config['precision']}"
    origin = f"from {options.start_from}"
    if weights is not None and not started:
        origin = "random weights" if options.weights is None else f"weights {weights['origin']}"
    slots = f"{head.prototypes_per_class} prototypes per class" if head.anchors else f"head {head.kind}"
    steps = ""
    if options.head_steps and not started:
        steps = f"the head fitted to the frozen network in {options.head_steps} steps or more"
        if not epochs:
            return f"training {options.backbone}{where}, {origin}, {slots}: {steps}"
        steps += ", then "
    trained = "the head" if options.freeze_backbone else "all layers"
    return (
        f"training {options.backbone}{where}, {origin}, {slots}: {steps}{epochs} epochs of {trained} in "
        f"batches of {config['batch_size']}, learning rate {options.lr:g}"
    )


def describe_start(options: TrainOptions, start: Checkpoint) -> dict[str, Any]:
    """Return the checkpoint's entry in config.json: its file, and which of its parts are trained."""
    dropped = start.network.config.head.dropped if options.reset_dropped else ()
    owners = [start.network.config.class_map.owners(channel)[0] for channel in dropped]
    return {
        "file": start.source["file"],
        "sha256": start.source["sha256"],
        "frozen_backbone": options.freeze_backbone,
        "reset": [f"{start.class_names[class_id]}/{slot}" for class_id, slot in owners],
    }
