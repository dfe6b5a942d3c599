"""The checkpoint format of the paper's authors.

It is the bare state dict of their `NNModel` or `NNModel_softmax` (net/net_model.py and main.py of their repository),
possibly with DistributedDataParallel's prefix `module.`, with exactly these keys:

    backbone.*                           torchvision's names: `backbone.features.*` (ConvNeXt, EfficientNet) or
                                         `backbone.conv1.*` ... `backbone.layer4.*` (ResNet); no norm after the last
                                         stage
    final_conv_layer.weight, .bias       [K, D, 1, 1], [K]: the projection; absent with `--ch_last_conv 0`
    classifier.prototypes                [C, K]: the anchors of Eq. 1 (`--classifier norm_prototypes_dist`), or else
    classifier.weight, classifier.bias   [C, K] or, without projection, [C, D], and [C]: a dense layer on the
                                         L2-normalised embedding (`--classifier linear`)

Backbone, C and m are inferred from names and shapes. The file does not record distance, pooling, CWS, input size and
crop: they are options (`Assumptions`), and the metadata records them as `assumed`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.documents import Distance
from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model import state_dicts, torchvision_backbones
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig, Pooling
from opal_deploy.model.network_names import list_torchvision_networks

# the paper's nine backbones; other torchvision networks are tried after these
PAPER_BACKBONES = (
    "resnet50", "resnet101", "resnet152",
    "efficientnet_v2_s", "efficientnet_v2_m", "efficientnet_v2_l",
    "convnext_tiny", "convnext_small", "convnext_base",
)  # fmt: skip

# our key prefixes by the authors'
_PREFIXES = {"backbone": "backbone.body.", "final_conv_layer": "head.projection.", "classifier": "head.classifier."}
_PROJECTION = ("final_conv_layer.weight", "final_conv_layer.bias")
_DENSE = ("classifier.weight", "classifier.bias")
_ANCHORS = "classifier.prototypes"
# layers of torchvision networks after their pooling
_CLASSIFIERS = ("fc.", "classifier.")


@dataclass(frozen=True)
class Assumptions:
    """Settings that an authors' checkpoint does not record; None is the paper's value.

    Attributes:
        distance: to the anchors; `l2` in the paper.
        pooling: over cells; `max` in the paper, without anchors `avg` as in its linear head.
        cws: channel-wise softmax; in the paper OPAL has it, the linear head does not.
        input_size: (H0, W0) in pixels.
        crop: `boxes` where the network was trained on images cropped to boxes.
    """

    distance: Distance | None = None
    pooling: Pooling | None = None
    cws: bool | None = None
    input_size: tuple[int, int] = (224, 224)
    crop: str | None = None


def parse(
    path: Path, raw: dict[str, Tensor], assumptions: Assumptions
) -> tuple[NetworkConfig, dict[str, Tensor], dict[str, Any]]:
    """Return a state dict's network configuration, its tensors under our keys, and the assumed settings.

    Raises:
        CheckpointError: keys or shapes are not those of the format.
        UsageError: assumptions that do not fit the file's head.
    """
    # DistributedDataParallel's prefix says nothing about the network
    state = {str(key).removeprefix("module."): value for key, value in raw.items()}
    body = {k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")}
    if not body or not any(key in state for key in (*_PROJECTION, *_DENSE, _ANCHORS)):
        raise CheckpointError(
            f"{path}: not the state dict of an OPAL network (found {_sample_keys(state)}); the authors' OPAL "
            f"checkpoints have backbone.*, {', '.join((*_PROJECTION, _ANCHORS))}, or {', '.join(_DENSE)}; to train "
            f"from weights of another network: opal-deploy train DATA --backbone NAME --weights {path}"
        )
    is_dense = _ANCHORS not in state and any(key in state for key in _DENSE)
    has_projection = not is_dense or any(key in state for key in _PROJECTION)
    head_keys = (*(_PROJECTION if has_projection else ()), *(_DENSE if is_dense else (_ANCHORS,)))
    backbone = _infer_backbone(path, body)
    shapes = {key: value.shape for key, value in state.items() if not state_dicts.is_counter(key)}
    expected = {f"backbone.{key}": shape for key, shape in _body_shapes(backbone).items()}
    # the shapes of the head are checked below, against each other
    expected |= {key: shapes.get(key, torch.Size()) for key in head_keys}
    if errors := state_dicts.describe_key_errors(expected, shapes):
        raise CheckpointError(f"{path} does not fit {backbone}, the most similar torchvision network: {errors}")
    classifier = state["classifier.weight"] if is_dense else state.pop(_ANCHORS)
    head = _infer_head(path, classifier, state.get("final_conv_layer.weight"), assumptions, is_dense=is_dense)
    assumed: dict[str, Any] = {} if is_dense else {"distance": head.distance}
    assumed |= {"pooling": head.pooling, "cws": head.cws, "input_size": list(assumptions.input_size)}
    config = NetworkConfig(backbone, classifier.shape[0], assumptions.input_size, head)
    renamed = {_PREFIXES[(parts := key.partition("."))[0]] + parts[2]: value for key, value in state.items()}
    return config, renamed, assumed


def _infer_head(
    path: Path, classifier: Tensor, projection: Tensor | None, assumptions: Assumptions, *, is_dense: bool
) -> HeadConfig:
    """Return the head of a file's anchors or dense layer [C, K], and its projection [K, D, 1, 1]."""
    if is_dense and assumptions.distance is not None:
        raise UsageError(f"{path}: has a dense layer instead of anchors, so no distance; leave --distance out")
    default = LINEAR_BASELINE if is_dense else HeadConfig()
    pooling = default.pooling if assumptions.pooling is None else assumptions.pooling
    cws = default.cws if assumptions.cws is None else assumptions.cws
    distance = default.distance if assumptions.distance is None else assumptions.distance
    prototypes = default.prototypes_per_class
    if projection is not None:
        prototypes = _infer_prototypes(path, classifier, projection)
        anchors = torch.from_numpy(ClassMap.blocks(classifier.shape[0], prototypes).matrix).float()
        if not is_dense and not torch.allclose(classifier.float(), anchors, atol=1e-5):
            raise CheckpointError(f"{path}: its {_ANCHORS} are not the paper's, 1/sqrt(m) on each class's block")
    elif classifier.ndim != 2:
        raise CheckpointError(f"{path}: its classifier.weight is {list(classifier.shape)}; expected [C, D]")
    return replace(
        default, projection=projection is not None, cws=cws, pooling=pooling,
        prototypes_per_class=prototypes, distance=distance,
    )  # fmt: skip


def _infer_prototypes(path: Path, classifier: Tensor, projection: Tensor) -> int:
    """Return m, inferred from anchors or dense layer [C, K] and the projection [K, D, 1, 1]."""
    if classifier.ndim == 2 and projection.ndim == 4:
        num_classes, channels = classifier.shape
        if channels == projection.shape[0] and channels % num_classes == 0:
            return channels // num_classes
    shapes = f"{list(classifier.shape)} and projection {list(projection.shape)}"
    raise CheckpointError(f"{path}: classifier {shapes} found; expected [C, C * m] and [C * m, D, 1, 1]")


def _infer_backbone(path: Path, body: dict[str, Tensor]) -> str:
    """Return the name of the torchvision network most similar to these parameters before its pooling."""
    shapes = {key: value.shape for key, value in body.items() if not state_dicts.is_counter(key)}
    others = [name for name in list_torchvision_networks() if name not in PAPER_BACKBONES]
    nearest, fewest = "", len(shapes)
    for name in (*PAPER_BACKBONES, *others):
        full = _body_shapes(name)
        wrong = len(full.keys() ^ shapes.keys()) + sum(full[k] != shapes[k] for k in full.keys() & shapes.keys())
        if wrong < fewest:
            nearest, fewest = name, wrong
        if not wrong:
            break
    if not nearest:
        raise CheckpointError(f"{path}: no torchvision network has its backbone's parameters ({_sample_keys(shapes)})")
    return nearest


@functools.cache
def _body_shapes(name: str) -> dict[str, torch.Size]:
    """Return the shapes of a torchvision network's parameters before its pooling."""
    state = torchvision_backbones.build_network(name, "meta").state_dict()
    return {k: v.shape for k, v in state.items() if not k.startswith(_CLASSIFIERS) and not state_dicts.is_counter(k)}


def _sample_keys(state: dict[str, Any]) -> str:
    keys = sorted(map(str, state))
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
