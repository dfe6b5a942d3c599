"""The stride of a run whose recipe compares two: the finer one, and the network's own with all of its layers.

Finer cells locate evidence more exactly. They cost the layers after the cut, which some classes need: ImageNet's last
layers know breeds of dogs. So the head is fitted to both frozen networks, and the finer cells stay unless all layers
classify clearly more validation images correctly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from opal_deploy.evaluation.metrics import Evaluation
from opal_deploy.model.backbones import is_transformer, own_stride
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.frozen import HeadFit
from opal_deploy.train.recipe import TrainOptions

# of a one-sided test at 5 %
_Z = 1.645


@dataclass(frozen=True)
class FittedNetwork:
    """A network whose head was fitted.

    Attributes:
        options: of the run, with this network's stride.
        random_state: of torch's generator when the network had its first weights.
        fit: the outcome of the fit.
        validation: the metrics of the validation images.
    """

    options: TrainOptions
    network: OpalNetwork
    random_state: Tensor
    fit: HeadFit
    validation: Evaluation


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
        theirs = start.network.config
        return replace(settled, stride=theirs.stride, keep_layers=theirs.keep_layers)
    if stored is not None:
        known = stored.get("options")
        return replace(settled, stride=known.get("stride")) if isinstance(known, dict) else settled
    if is_transformer(options.backbone):
        return replace(settled, stride=None)
    if not options.head_steps or options.stride is None or options.keep_layers:
        return settled
    own = own_stride(options.backbone)
    tiles = all(size % own == 0 and size > own for size in options.input_size)
    return options if own > options.stride and tiles else settled


def choose_network(finer: FittedNetwork, all_layers: FittedNetwork) -> tuple[FittedNetwork, str]:
    """Return the network to train, and a line on why."""
    shares = [each.validation.accuracy for each in (finer, all_layers)]
    mean, images = sum(shares) / 2, finer.validation.images
    # a test for two different sets of images: on the same images it is strict
    clear = shares[1] - shares[0] > _Z * math.sqrt(2 * mean * (1 - mean) / images)
    found = ", ".join(f"{each.validation.accuracy:.1%} at stride {each.options.stride}" for each in (finer, all_layers))
    line = f"fitted heads, {images} validation images correct: {found}; "
    if clear:
        return (
            all_layers,
            f"{line}keeping all layers, whose cells are coarser (fine cells: --stride {finer.options.stride})",
        )
    return finer, f"{line}no clear difference: keeping fine cells (all layers: --stride {all_layers.options.stride})"
