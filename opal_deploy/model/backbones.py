"""Backbones: any convolutional classifier of torchvision or timm, cut before its global pooling, or a transformer.

The paper's nine (ResNet-50/101/152, EfficientNet-V2 S/M/L, ConvNeXt T/S/B) are cut where its authors cut them: after
the last convolutional stage, before pooling, without the norm that follows in ConvNeXt. A finer stride cuts at the
last feature map of that stride, so that cells are smaller and see less of the image; or all layers are kept, and the
last feature map, upsampled, is stacked on the finer one: the one knows what, the other where (as in feature pyramids;
Lin et al., CVPR 2017). `feature_graph` finds where. A transformer's cells are its tokens (`timm_backbones`).

Parameter names stay those of the library (`layer4.1.conv2.weight`, `features.7.2.block.0.weight`). `timm_backbones` and
`torchvision_backbones` have the same functions, documented in the latter: they hold what differs between the libraries.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model import state_dicts, timm_backbones, torchvision_backbones
from opal_deploy.model.config import check_tiling, require_stride
from opal_deploy.model.feature_graph import FEATURES, LAST, Cut, extract_classifier, find_cut
from opal_deploy.model.network_names import TIMM_PREFIX, check_weights, is_weights_file
from opal_deploy.model.timm_backbones import TokenNetwork, find_tokens

# not the default of any library: tells which layers depend on the number of classes
_OTHER_CLASSES = 7


class Backbone(nn.Module):
    """Normalised images, float [N, 3, H0, W0], to features F [N, D, H, W].

    Attributes:
        name: a torchvision name, or `timm:` and a timm name.
        body: the cut network.
        maps: channels of each feature map that the features are stacked from: one, or a finer one and the last one.
        stride: input pixels per cell, the same in both directions.
    """

    def __init__(self, name: str, body: nn.Module, maps: tuple[int, ...], stride: int) -> None:
        super().__init__()
        self.name = name
        self.body = body
        self.maps = maps
        self.stride = stride

    @property
    def num_features(self) -> int:
        """The number of channels, D."""
        return sum(self.maps)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.body(images)
        features: Tensor = maps[FEATURES]
        if LAST not in maps:
            return features
        # without interpolation, all cells of a coarse one would be equally good, and a slot would take any of them
        last = functional.interpolate(maps[LAST], features.shape[2:], mode="bilinear")
        return torch.cat([features, last], 1)

    def __deepcopy__(self, memo: dict[int, Any]) -> Backbone:
        """Return a copy with each layer in the original's mode; torchvision puts copies into training mode."""
        copied = Backbone.__new__(Backbone)
        memo[id(self)] = copied
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        copied.body.train(self.body.training)  # chooses the graph too
        modes = {name: module.training for name, module in self.body.named_modules()}
        for name, module in copied.body.named_modules():
            module.training = modes[name]
        return copied

    def grid(self, input_size: tuple[int, int]) -> tuple[int, int]:
        """Return (H, W) for an input of (H0, W0); UsageError unless both are multiples of the stride."""
        check_tiling(self.name, input_size, self.stride)
        height, width = input_size
        return height // self.stride, width // self.stride


def get_library(name: str) -> ModuleType:
    """Return the module of a backbone's library, `timm_backbones` or `torchvision_backbones`, by its name."""
    return timm_backbones if name.startswith(TIMM_PREFIX) else torchvision_backbones


def build(
    name: str,
    *,
    stride: int | None = None,
    keep_layers: bool = False,
    input_size: tuple[int, int] | None = None,
    device: str | torch.device = "cpu",
) -> Backbone:
    """Build a backbone with random weights.

    Args:
        name: such as `resnet18` or `convnext_tiny` for torchvision, `timm:resnet18` for timm.
        stride: input pixels per cell; the network ends at its last feature map of this stride. None keeps all layers
            before the global pooling: stride 32 for the paper's nine.
        keep_layers: keep the layers after it too: the last feature map before the global pooling is upsampled to this
            stride, and its channels follow those of the finer map.
        input_size: (H0, W0), which only transformers depend on; None: the library's own.
        device: of the parameters; `meta` allocates none.

    Raises:
        UsageError: no such network, no grid of cells before a global pooling, or none of this stride; or no layers
            after it that could be kept.
        MissingExtra: the library is not installed.
    """
    require_stride(stride, keep_layers)
    network = _find_network(name)
    cuts = (network.find_cut(stride), *([network.find_cut()] if keep_layers else []))
    if len(cuts) > 1 and cuts[0].stride == cuts[1].stride:
        raise UsageError(f"--keep-layers: {name} ends at stride {cuts[0].stride} anyway; give a smaller --stride")
    body = network.build_body(cuts, input_size, device)
    return Backbone(name, body, tuple(cut.num_features for cut in cuts), cuts[0].stride)


def build_with_strides(name: str, layer: str | None, stride_of: Callable[[str, nn.Conv2d], int]) -> Backbone:
    """Build a torchvision network that ends at a layer, with other strides and random weights.

    Args:
        name: torchvision's name.
        layer: the name of a module; None: all layers before the global pooling.
        stride_of: the new stride of a convolution, given its name and itself, the same for both axes.

    Raises:
        UsageError: no such network or layer.
    """
    from torchvision.models.feature_extraction import create_feature_extractor

    full = torchvision_backbones.build_network(name)
    for path, module in full.named_modules():
        if isinstance(module, nn.Conv2d):
            module.stride = (stride_of(path, module),) * 2
    node = layer or _find_network(name).find_cut().node
    try:
        body = create_feature_extractor(full, {node: FEATURES}, suppress_diff_warning=True)
    except ValueError:
        raise UsageError(f"{name} has no layer {layer!r}") from None
    # padding aside, the number of cells grows by one per stride
    sizes = [body.eval()(torch.zeros(1, 3, size, size))[FEATURES].shape for size in (256, 512)]
    return Backbone(name, body, (sizes[0][1],), 256 // (sizes[1][2] - sizes[0][2]))


def build_classifier(
    name: str, num_classes: int, *, stride: int | None = None, device: str | torch.device = "cpu"
) -> nn.Module:
    """Build the layers of a network after its backbone: features [N, D, H, W] to logits [N, C], with random weights.

    They are the library's own, under its parameter names: a ResNet's pooling and `fc`, ConvNeXt's pooling, LayerNorm
    and dense layer, EfficientNet's pooling, dropout and dense layer. `stride` and `device` are those of `build`.

    Raises:
        UsageError: the backbone is cut before its last layer.
    """
    return _find_network(name).build_classifier(num_classes, stride, device)


def own_stride(name: str) -> int:
    """Return the input pixels per cell of a network with all of its layers before the global pooling."""
    return _find_network(name).find_cut().stride


def list_variants(
    names: Iterable[str], strides: Iterable[int | None], keep_layers: bool
) -> list[tuple[str, int | None, bool]]:
    """Return every network at every stride as arguments of `build`: name, stride, and whether its layers are kept.

    At a network's own stride, where nothing changes, layers do not count as kept.
    """
    variants = itertools.product(dict.fromkeys(names), dict.fromkeys(strides))
    return [(name, stride, keep_layers and stride != own_stride(name)) for name, stride in variants]


def load_weights(
    backbone: Backbone, weights: str | Path | Mapping[str, Tensor], classifier: nn.Module | None = None
) -> str:
    """Load weights into a backbone and return their origin.

    Args:
        backbone: from `build`.
        weights: a state dict with the library's names, or a file that holds one (`.pth`, `.safetensors`, Lightning's
            `.ckpt`), with or without a prefix such as `module.`; or the name of the library's own weights
            (torchvision's `DEFAULT`, `IMAGENET1K_V1`, ...; a timm tag), which are downloaded if necessary.
        classifier: from `build_classifier`; gets weights too, except for layers that depend on the number of classes.

    Raises:
        CheckpointError: the file lacks keys of the backbone, or has keys that the library's network lacks.
        UsageError: no such file and no such weights, or the download failed.
    """
    library = get_library(backbone.name)
    if isinstance(weights, Mapping):
        origin = "a state dict in memory"
        state = state_dicts.find_state_dict(weights, origin)
    else:
        check_weights(backbone.name, str(weights))
        if is_weights_file(str(weights)):
            state, origin = state_dicts.read_state_dict(Path(weights)), Path(weights).name
        else:
            state, origin = library.download_weights(backbone.name, str(weights))
    expected = backbone.body.state_dict()
    state = _find_network(backbone.name).fit_weights(backbone.body, state_dicts.strip_prefix(state, expected))
    network = library.build_network(backbone.name, "meta").state_dict()
    if classifier is not None:
        other = library.build_network(backbone.name, "meta", _OTHER_CLASSES).state_dict()
        expected |= {k: v for k, v in classifier.state_dict().items() if network[k].shape == other[k].shape}
    needed, present = state_dicts.get_shapes(expected), state_dicts.get_shapes(state)
    if errors := state_dicts.describe_key_errors(needed, present, ignored=network):
        raise CheckpointError(f"{origin} does not fit {backbone.name}: {errors}; give another --weights or --backbone")
    for module in (backbone.body, *([] if classifier is None else [classifier])):
        keys = module.state_dict().keys() & expected.keys() & state.keys()
        module.load_state_dict({key: state[key].float() for key in keys}, strict=False)
    return origin


class ConvolutionalNetwork:
    """A network of convolutions, by its name in a library."""

    def __init__(self, name: str, library: ModuleType) -> None:
        self._name, self._library = name, library

    def find_cut(self, stride: int | None = None) -> Cut:
        """Return the last feature map of a stride; None is the network's own."""
        return _find_cut(self._name, self._library, stride)

    def build_body(
        self, cuts: Sequence[Cut], input_size: tuple[int, int] | None, device: str | torch.device
    ) -> nn.Module:
        """Build images of any size to `{FEATURES: [N, D, H, W]}`, and to LAST for a second cut, with random weights."""
        from torchvision.models.feature_extraction import create_feature_extractor

        network, options = self._library.build_network(self._name, device), self._library.tracer_options()
        nodes = dict(zip([cut.node for cut in cuts], (FEATURES, LAST), strict=False))
        body: nn.Module = create_feature_extractor(network, nodes, tracer_kwargs=options, suppress_diff_warning=True)
        return body

    def build_classifier(self, num_classes: int, stride: int | None, device: str | torch.device) -> nn.Module:
        """Build the layers after the backbone; see `backbones.build_classifier`."""
        whole = self.find_cut()
        if stride not in (None, own := whole.stride):
            raise UsageError(f"the plain head of {self._name} needs stride {own}; give --stride {own} or another head")
        network = self._library.build_network(self._name, device, num_classes)
        return extract_classifier(self._name, network, whole.node, self._library.tracer_options())

    def fit_weights(self, network: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict as the network takes it: unchanged."""
        return state


@cache
def _find_cut(name: str, library: ModuleType, stride: int | None) -> Cut:
    """Return the cut of a network; cached, since tracing is slow."""
    return find_cut(name, library.build_network(name, "meta"), stride, library.tracer_options())


@cache
def _find_network(name: str) -> ConvolutionalNetwork | TokenNetwork:
    library = get_library(name)
    if library is timm_backbones:
        architecture, _ = timm_backbones.find_architecture(name)
        if (tokens := find_tokens(architecture)) is not None:
            return TokenNetwork(architecture, tokens)
    return ConvolutionalNetwork(name, library)


def count_macs(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Count the multiply-accumulates of convolutions and matrix products for one input.

    Bias, normalisation, activation and pooling are not counted.

    Args:
        module: in evaluation mode, its parameters on the device `meta`.
        input_shape: without the batch dimension.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(torch.empty(1, *input_shape, device="meta"))
    return int(counter.get_total_flops()) // 2  # PyTorch counts two operations per multiply-accumulate
