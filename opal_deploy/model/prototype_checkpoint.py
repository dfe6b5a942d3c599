"""Checkpoints of other prototype networks, as `export --arch` reads them: PIP-Net, ProtoPNet, and CaBRNet's of both.

    pipnet:NET       the file that PIP-Net's own code saves: `model_state_dict` with `module._net.*`,
                     `module._add_on.0.*` and `module._classification.*`; NET as its option --net: convnext_tiny_26, ...
    protopnet:NET    the state dict of ProtoPNet's own code: `features.*`, `add_on_layers.*`, `prototype_vectors` and
                     `last_layer.weight`; NET as torchvision calls it: resnet34, vgg19, ...
    FILE.yml         CaBRNet's model_arch.yml, next to its model_state.pth: `extractor.*` and `classifier.*`

None of them records the input size or class names. Facts on the formats are from
github.com/M-Nauta/PIPNet, github.com/cfchen-duke/ProtoPNet and CaBRNet 1.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec.yaml
import torch
from torch import Tensor, nn

from opal_deploy.errors import CheckpointError, UsageError, first_line, require
from opal_deploy.model import backbones, state_dicts
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.linear_head import LinearHead, LinearHeadConfig, LinearNetwork, LinearNetworkConfig

# PIP-Net ignores scores under this at inference; CaBRNet's PIP-Net does not
_PIPNET_THRESHOLD = 0.1
# ProtoPNet's head, with the epsilon of its own code
_PROTOPNET = LinearHeadConfig("distance", similarity="log", epsilon=1e-4)
# the channels above which PIP-Net's ConvNeXts keep stride 1, by the name of the network
_PIPNET_CHANNELS = {"convnext_tiny_26": 100, "convnext_tiny_13": 300}
# CaBRNet's names of ProtoPNet's similarity
_SIMILARITIES = ("ProtoPNetSimilarity", "LegacyProtoPNetSimilarity")
_ADD_ONS = ("Conv2d", "BatchNorm2d", "ReLU", "Sigmoid", "Identity")


class _Parts(NamedTuple):
    """The parts of a network that a checkpoint gives; `state` has its tensors under `body.*` and `add_on.*`."""

    backbone: Backbone
    add_on: nn.Module
    config: LinearHeadConfig
    weights: Tensor
    biases: Tensor | None
    prototypes: Tensor | None
    state: dict[str, Tensor]


def load_network(path: Path, raw: Mapping[str, Any], arch: str, input_size: tuple[int, int]) -> LinearNetwork:
    """Return the network of a checkpoint that `state_dicts.load_torch_file` read.

    Args:
        path: named in errors.
        raw: the file's content.
        arch: see this module.
        input_size: (H0, W0) in pixels.

    Raises:
        CheckpointError: the file's keys or shapes are not those of the format.
        UsageError: no such architecture, or one whose answers are no weighted sum of single cells' scores.
    """
    kind, _, name = arch.partition(":")
    state = raw.get("model_state_dict", raw)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: no state dict (found {', '.join(sorted(map(str, raw))[:5])}); see --arch")
    state = {str(key).removeprefix("module."): value for key, value in state.items()}
    try:
        if kind in ("pipnet", "protopnet") and name:
            parts = (_read_pipnet if kind == "pipnet" else _read_protopnet)(name, state)
        elif Path(arch).suffix in (".yml", ".yaml"):
            parts = _read_cabrnet(Path(arch), state)
        else:
            raise UsageError(f"--arch {arch}: expected pipnet:NET, protopnet:NET, or CaBRNet's model_arch.yml")
    except KeyError as error:
        raise CheckpointError(f"{path}: its state dict has no {error.args[0]}, which --arch {arch} has") from None
    holder = nn.ModuleDict({"body": parts.backbone.body, "add_on": parts.add_on})
    state_dicts.load_exactly(holder, parts.state, f"{path} does not fit --arch {arch}")
    head = LinearHead(parts.config, parts.add_on, parts.weights, parts.biases, parts.prototypes)
    config = LinearNetworkConfig(parts.backbone.name, len(parts.weights), input_size, parts.config)
    network = LinearNetwork(config, parts.backbone, head).eval()
    _check_head(path, network)
    return network


def _check_head(path: Path, network: LinearNetwork) -> None:
    """Raise CheckpointError unless the head's tensors fit each other."""
    head: Any = network.head
    with torch.no_grad():
        width = head.projection(torch.zeros(1, network.backbone.num_features, 1, 1)).shape[1]
    is_softmax = head.config.kind == "softmax"
    shape = (width,) if is_softmax else tuple(head.prototypes.shape)
    expected = (head.num_prototypes,) if is_softmax else (head.num_prototypes, width, 1, 1)
    if shape != expected:
        raise CheckpointError(f"{path}: prototypes of shape {shape} found, {expected} expected by its last layer")


def _read_pipnet(name: str, state: dict[str, Tensor]) -> _Parts:
    network, channels = name.removesuffix("_26").removesuffix("_13"), _PIPNET_CHANNELS.get(name)

    def stride_of(path: str, layer: nn.Conv2d) -> int:
        stride = int(layer.stride[0])
        if channels is None:
            # its ResNets: the last two stages have stride 1
            return 1 if path.startswith(("layer3", "layer4")) else stride
        return 1 if stride == 2 and layer.in_channels > channels else stride

    if channels is None and not name.startswith("resnet"):
        raise UsageError(f"--arch pipnet:{name}: expected one of PIP-Net's networks: resnet50, convnext_tiny_26, ...")
    network = name.removesuffix("_inat") if channels is None else network
    backbone = backbones.build_with_strides(network, None, stride_of)
    add_on = _add_on_of(state, "_add_on.", sigmoid=False)
    return _Parts(
        backbone, add_on, LinearHeadConfig("softmax", threshold=_PIPNET_THRESHOLD),
        torch.relu(state["_classification.weight"]), state.get("_classification.bias"), None,
        {**_take(state, "_net.", "body."), **_take(state, "_add_on.", "add_on.")},
    )  # fmt: skip


def _read_protopnet(name: str, state: dict[str, Tensor]) -> _Parts:
    backbone = backbones.build_with_strides(name, None, lambda _, layer: int(layer.stride[0]))
    return _Parts(
        backbone, _add_on_of(state, "add_on_layers.", sigmoid=True), _PROTOPNET,
        state["last_layer.weight"], state.get("last_layer.bias"), state["prototype_vectors"],
        {**_take(state, "features.", "body."), **_take(state, "add_on_layers.", "add_on.")},
    )  # fmt: skip


def _add_on_of(state: dict[str, Tensor], prefix: str, *, sigmoid: bool) -> nn.Module:
    """Return convolutions of the stored shapes with ReLUs between, and a sigmoid after the last or nothing."""
    weights = {
        int(match[1]): tensor
        for key, tensor in state.items()
        if (match := re.fullmatch(prefix + r"(\d+)\.weight", key))
    }
    layers: list[nn.Module] = []
    for index in range(max(weights, default=-1) + 1):
        if index in weights:
            outputs, inputs, *kernel = weights[index].shape
            layers.append(nn.Conv2d(inputs, outputs, (kernel[0], kernel[1])))
        else:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers, *([nn.Sigmoid()] if sigmoid and layers else []))


def _read_cabrnet(path: Path, state: dict[str, Tensor]) -> _Parts:
    document = _read_yaml(path)
    try:
        extractor, classifier = document["extractor"], document["classifier"]
        base, kind = extractor["backbone"], str(classifier["name"])
        pipeline = next(value for key, value in extractor.items() if key != "backbone" and "source_layer" in value)
        stride_of = _stride_divider(base.get("postprocess") or {}, path)
        backbone = backbones.build_with_strides(str(base["arch"]).lower(), str(pipeline["source_layer"]), stride_of)
        add_on = _build_add_on(pipeline.get("add_on") or {}, backbone.num_features, path)
    except (AttributeError, KeyError, StopIteration, TypeError) as error:
        raise UsageError(f"{path}: not a model_arch.yml of CaBRNet with one extracted layer ({error!r})") from None
    if kind not in ("PIPNetClassifier", "ProtoPNetClassifier"):
        raise UsageError(f"{path}: {kind} cannot be exported; expected PIPNetClassifier or ProtoPNetClassifier")
    weights, prototypes = state["classifier.last_layer.weight"], None
    config = LinearHeadConfig("softmax")
    if kind == "PIPNetClassifier":
        weights = torch.relu(weights)
    else:
        config, prototypes = _read_similarity(document.get("similarity"), path), state["classifier.prototypes"]
    return _Parts(
        backbone, add_on, config, weights, state.get("classifier.last_layer.bias"), prototypes,
        {**_take(state, "extractor.convnet.", "body."), **_take(state, "extractor.add_on.", "add_on.")},
    )  # fmt: skip


def _read_similarity(document: Any, path: Path) -> LinearHeadConfig:
    """Return the head with ProtoPNet's similarity, whose epsilon CaBRNet's `stability_factor` replaces."""
    document = document or {}
    name, params = document.get("name", _SIMILARITIES[0]), document.get("params") or {}
    if name not in _SIMILARITIES or params.get("log_probabilities"):
        raise UsageError(f"{path}: similarity {name} {params or ''} cannot be exported; known: {_SIMILARITIES[0]}")
    return replace(_PROTOPNET, epsilon=float(params.get("stability_factor", _PROTOPNET.epsilon)))


def _stride_divider(postprocess: Mapping[str, Any], path: Path) -> Callable[[str, nn.Conv2d], int]:
    """Return the strides of CaBRNet's `stride_divider`, or unchanged ones."""
    if unknown := postprocess.keys() - {"stride_divider"}:
        raise UsageError(f"{path}: postprocess {', '.join(sorted(unknown))} cannot be exported")
    divider = postprocess.get("stride_divider") or {"ratio": 1, "min_channels": 0}
    ratio, channels = int(divider["ratio"]), int(divider["min_channels"])

    def stride_of(_: str, layer: nn.Conv2d) -> int:
        stride = int(layer.stride[0])
        return stride // ratio if layer.in_channels > channels and stride >= ratio else stride

    return stride_of


def _build_add_on(document: Mapping[str, Any], channels: int, path: Path) -> nn.Module:
    """Return CaBRNet's add-on layers, named as in its state dict."""
    layers = nn.Sequential()
    for name, layer in document.items():
        if name == "init_mode":
            continue
        if layer["type"] not in _ADD_ONS:
            raise UsageError(f"{path}: add-on layer {layer['type']} cannot be exported; known: {', '.join(_ADD_ONS)}")
        settings = dict(layer.get("params") or {})
        if layer["type"] == "Conv2d":
            settings["in_channels"] = settings.get("in_channels") or channels
            channels = settings["out_channels"]
        layers.add_module(str(name), getattr(nn, layer["type"])(**settings))
    return layers


def _read_yaml(path: Path) -> dict[str, Any]:
    require("yaml", "export", "--arch FILE.yml", pip_name="pyyaml")
    try:
        document: dict[str, Any] = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"--arch {path}: not a readable YAML file ({first_line(error)})") from None
    return document


def _take(state: dict[str, Tensor], prefix: str, new: str) -> dict[str, Tensor]:
    """Return the tensors whose keys begin with a prefix, with another."""
    return {new + key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
