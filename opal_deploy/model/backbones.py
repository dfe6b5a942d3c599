"""Backbones: any torchvision or timm convolutional classifier, cut before its global pooling, or earlier.

The paper's nine (ResNet-50/101/152, EfficientNet-V2 S/M/L, ConvNeXt T/S/B) are cut where its authors cut them: after
the last convolutional stage, before pooling, without the norm that follows in ConvNeXt. A finer stride cuts at the
last feature map of that stride, so that cells are smaller and see less of the image; or all layers are kept, and the
later ones get stride 1. The traced graph tells where to cut (`feature_graph`). Parameter names stay those of the
library (`layer4.1.conv2.weight`, `features.7.2.block.0.weight`). `torchvision_backbones` and `timm_backbones` hold
what differs between the libraries, `token_backbones` transformers.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from opal_deploy.errors import CheckpointError, UsageError, first_line
from opal_deploy.model import timm_backbones, token_backbones, torchvision_backbones
from opal_deploy.model.config import PretrainedConfig, check_tiling, require_stride
from opal_deploy.model.feature_graph import Cut, extract_classifier, find_cut, find_unstrided_cut, remove_strides
from opal_deploy.model.network_names import TIMM_PREFIX, check_weights, is_weights_file

_OUTPUT = "features"
# not the default of any library: tells which layers depend on the number of classes
_OTHER_CLASSES = 7
# keys of each kind that an error names; the rest is counted
_MAX_KEYS = 3
_PICKLED_OBJECT = re.compile(r"GLOBAL (\S+)")


class Backbone(nn.Module):
    """Normalised images, float [N, 3, H0, W0], to features F [N, D, H, W].

    Attributes:
        name: a torchvision name, or `timm:` and a timm name.
        body: the cut network.
        num_features: D.
        stride: input pixels per cell, the same in both directions.
    """

    def __init__(self, name: str, body: nn.Module, num_features: int, stride: int) -> None:
        super().__init__()
        self.name = name
        self.body = body
        self.num_features = num_features
        self.stride = stride

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.body(images)[_OUTPUT]
        return features

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
        """Return (H, W) for an input of (H0, W0).

        Raises:
            UsageError: the size is not a multiple of the stride.
        """
        check_tiling(self.name, input_size, self.stride)
        height, width = input_size
        return height // self.stride, width // self.stride


class _Library(Protocol):
    """A library of networks; `torchvision_backbones` documents the functions."""

    def list_networks(self) -> list[str]: ...

    def build_network(
        self, name: str, device: str | torch.device = "cpu", num_classes: int | None = None
    ) -> nn.Module: ...

    def tracer_options(self) -> dict[str, Any]: ...

    def get_pretrained_config(self, name: str, weights: str | None) -> PretrainedConfig: ...

    def download_weights(self, name: str, weights: str) -> tuple[dict[str, Tensor], str]: ...

    def find_downloaded(self, name: str, weights: str) -> Path | None: ...

    def convert_sync_batch_norm(self, network: nn.Module) -> nn.Module: ...


def get_library(name: str) -> _Library:
    """Return a backbone's library, by its name."""
    if name.startswith(TIMM_PREFIX):
        return timm_backbones
    return torchvision_backbones


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
        keep_layers: end the network before its global pooling anyway, and give stride 1 to each convolution and
            pooling that would coarsen a feature map of `stride`.
        input_size: (H0, W0), which only transformers depend on; None: the library's own.
        device: of the parameters; `meta` allocates none.

    Raises:
        UsageError: no such network, no grid of cells before a global pooling, or none of this stride; or layers that
            cannot be kept, see `find_unstrided_cut`.
        MissingExtra: the library is not installed.
    """
    library = get_library(name)
    cut = _find_cut(name, stride, keep_layers)
    if (architecture := _find_transformer(name)) is not None:
        body = token_backbones.build_network(architecture, input_size, device)
        return Backbone(name, body, cut.num_features, cut.stride)
    full = library.build_network(name, device)
    remove_strides(full, cut.unstrided)
    from torchvision.models.feature_extraction import create_feature_extractor

    body = create_feature_extractor(
        full, {cut.node: _OUTPUT}, tracer_kwargs=library.tracer_options(), suppress_diff_warning=True
    )
    return Backbone(name, body, cut.num_features, cut.stride)


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
    try:
        body = create_feature_extractor(
            full, {layer or _find_cut(name, None).node: _OUTPUT}, suppress_diff_warning=True
        )
    except ValueError:
        raise UsageError(f"{name} has no layer {layer!r}") from None
    # padding aside, the number of cells grows by one per stride
    sizes = [body.eval()(torch.zeros(1, 3, size, size))[_OUTPUT].shape for size in (256, 512)]
    return Backbone(name, body, sizes[0][1], 256 // (sizes[1][2] - sizes[0][2]))


def build_classifier(
    name: str,
    num_classes: int,
    *,
    stride: int | None = None,
    keep_layers: bool = False,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Build the layers of a network after its backbone: features [N, D, H, W] to logits [N, C], with random weights.

    They are the library's own, under its parameter names: a ResNet's pooling and `fc`, ConvNeXt's pooling, LayerNorm
    and dense layer, EfficientNet's pooling, dropout and dense layer. The arguments are those of `build`.

    Raises:
        UsageError: the backbone is cut before its last layer.
    """
    own, library = own_stride(name), get_library(name)
    if _find_transformer(name) is not None:
        raise UsageError(f"the plain head takes convolutional networks, and {name} is a transformer; use --head linear")
    if stride not in (None, own) and not keep_layers:
        raise UsageError(
            f"the plain head, the network's own classifier, takes features of {name} at stride {own}, not {stride}; "
            f"give --stride {own}, --keep-layers, or another head"
        )
    network = library.build_network(name, device, num_classes)
    return extract_classifier(name, network, _find_cut(name, None).node, library.tracer_options())


def _find_transformer(name: str) -> str | None:
    """Return timm's name of a network whose cells are tokens; None for others."""
    if not name.startswith(TIMM_PREFIX):
        return None
    architecture = timm_backbones.find_architecture(name)
    return None if token_backbones.find_tokens(architecture) is None else architecture


def is_transformer(name: str) -> bool:
    """Return whether a network's cells are the tokens of a transformer."""
    return _find_transformer(name) is not None


def own_stride(name: str) -> int:
    """Return the input pixels per cell of a network with all of its layers before the global pooling."""
    return _find_cut(name, None).stride


def list_variants(
    names: Iterable[str], strides: Iterable[int | None], keep_layers: bool
) -> list[tuple[str, int | None, bool]]:
    """Return every network at every stride as arguments of `build`: name, stride, and whether its layers are kept.

    At a network's own stride, where nothing changes, layers do not count as kept.
    """
    variants = itertools.product(dict.fromkeys(names), dict.fromkeys(strides))
    return [(name, stride, keep_layers and stride != own_stride(name)) for name, stride in variants]


def load_weights(backbone: Backbone, weights: str | Path, classifier: nn.Module | None = None) -> str:
    """Load ImageNet weights into a backbone and return their origin.

    Args:
        backbone: from `build`.
        weights: a local `.pth`/`.safetensors` state dict with the library's names, or the name of the library's own
            weights (torchvision's `DEFAULT`, `IMAGENET1K_V1`, ...; a timm tag), which are downloaded if necessary.
        classifier: from `build_classifier`; gets weights too, except for layers that depend on the number of classes.

    Raises:
        CheckpointError: the file lacks keys of the backbone, or has keys that the library's network lacks.
        UsageError: no such file and no such weights, or the download failed.
    """
    path, library = Path(weights), get_library(backbone.name)
    check_weights(backbone.name, str(weights))
    if is_weights_file(str(weights)):
        state, origin = read_state_dict(path), path.name
    else:
        state, origin = library.download_weights(backbone.name, str(weights))
    if _find_transformer(backbone.name) is not None:
        state = token_backbones.fit_weights(backbone.body, state)
    network = library.build_network(backbone.name, "meta").state_dict()
    expected = backbone.body.state_dict()
    if classifier is not None:
        other = library.build_network(backbone.name, "meta", _OTHER_CLASSES).state_dict()
        expected |= {k: v for k, v in classifier.state_dict().items() if network[k].shape == other[k].shape}
    if errors := describe_key_errors(get_shapes(expected), get_shapes(state), ignored=network):
        raise CheckpointError(
            f"{origin} does not fit {backbone.name}: {errors}; give weights of that network or another --backbone"
        )
    for module in (backbone.body, *([] if classifier is None else [classifier])):
        keys = module.state_dict().keys() & expected.keys() & state.keys()
        module.load_state_dict({key: state[key].float() for key in keys}, strict=False)
    return origin


def load_classifier(
    name: str, num_classes: int, weights: str | None, input_size: tuple[int, int] | None = None
) -> nn.Module | None:
    """Return the whole classifier in a weights file, images [N, 3, H0, W0] to logits [N, C], in evaluation mode.

    None where the weights are no file, or one of a network with other classes, such as ImageNet's.

    Raises:
        UsageError: no such file. CheckpointError: it is damaged.
    """
    if weights is None or not is_weights_file(weights):
        return None
    state = read_state_dict(Path(weights))
    if (architecture := _find_transformer(name)) is None:
        network = get_library(name).build_network(name, "cpu", num_classes)
    else:
        network = token_backbones.build_network(architecture, input_size, "cpu", num_classes)
        state = token_backbones.fit_weights(network, state)
    shapes = get_shapes(network.state_dict())
    if any(state.get(key, torch.empty(0)).shape != shape for key, shape in shapes.items() if not is_counter(key)):
        return None
    network.load_state_dict({key: state[key].float() for key in shapes.keys() & state.keys()}, strict=False)
    return network.eval()


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state dict (names to tensors) from a `.safetensors` file or a weights-only torch file.

    Raises:
        CheckpointError: not a state dict, or one that needs unsafe loading.
    """
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    raw = load_torch_file(path)
    if not isinstance(raw, dict) or not all(isinstance(v, Tensor) for v in raw.values()):
        raise CheckpointError(f"{path}: expected a state dict (names to tensors), found {type(raw).__name__}")
    return raw


def load_torch_file(path: Path) -> Any:
    """Read a file with `torch.load(weights_only=True)`; there is no fallback to unsafe loading.

    Raises:
        CheckpointError: the file is damaged, or holds objects that only unsafe loading accepts.
    """
    import pickle

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about formats that are refused next
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # the class or function that the file imports; other reasons are pickle's own codes
        found = _PICKLED_OBJECT.search(str(error))
        if found is None:
            raise CheckpointError(f"{path}: damaged, or not a PyTorch file; copy or save it again") from None
        raise CheckpointError(
            f"{path}: refused, since it holds a Python object ({found[1]}), and loading that may run any code; save "
            "only its tensors where it was made: torch.save(model.state_dict(), 'weights.pth')"
        ) from None
    except Exception as error:  # damaged bytes make torch's readers fail in any way: IndexError, struct.error, ...
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: a TorchScript archive, which is a program; save only its tensors: "
                f"torch.save(torch.jit.load({path.name!r}).state_dict(), 'weights.pth')"
            ) from None
        raise CheckpointError(
            f"{path}: not a readable PyTorch file ({first_line(error)}); copy or save it again"
        ) from None


def describe_key_errors(
    expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], ignored: Collection[str] = ()
) -> str:
    """Return one line about the missing, unexpected and mismatched keys of a state dict; empty if it fits.

    BatchNorm's step counters may be missing: exporters often drop them, and inference ignores them.

    Args:
        expected, found: shapes by key.
        ignored: keys that are not unexpected.
    """
    errors = {
        "missing": [key for key in expected.keys() - found.keys() if not is_counter(key)],
        "unexpected": list(found.keys() - expected.keys() - set(ignored)),
        "of another shape": [
            f"{key} {list(found[key])} instead of {list(expected[key])}"
            for key in expected.keys() & found.keys()
            if found[key] != expected[key]
        ],
    }
    return "; ".join(
        f"{len(keys)} {kind}: {', '.join(sorted(keys)[:_MAX_KEYS])}{', ...' if len(keys) > _MAX_KEYS else ''}"
        for kind, keys in errors.items()
        if keys
    )


def get_shapes(state: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of a state dict by key."""
    return {key: value.shape for key, value in state.items()}


def is_counter(key: str) -> bool:
    """Return whether a key is one of BatchNorm's step counters."""
    return key.endswith("num_batches_tracked")


@cache
def _find_cut(name: str, stride: int | None, keep_layers: bool = False) -> Cut:
    """Return the cut of a network; cached, since tracing is slow."""
    require_stride(stride, keep_layers)
    if (architecture := _find_transformer(name)) is not None:
        tokens = token_backbones.find_tokens(architecture)
        assert tokens is not None
        if keep_layers or stride not in (None, tokens.stride):
            raise UsageError(
                f"{name}: a transformer has cells of {tokens.stride} pixels only; leave --stride and --keep-layers out"
            )
        return Cut("", *tokens)
    library = get_library(name)
    network, options = library.build_network(name, "meta"), library.tracer_options()
    cut = find_cut(name, network, stride, options)
    if not keep_layers:
        return cut
    if cut.stride == own_stride(name):
        raise UsageError(
            f"--keep-layers: all layers of {name} already end at stride {cut.stride}; leave --keep-layers out "
            "(--no-keep-layers if a recipe has it), or give a smaller --stride"
        )
    return find_unstrided_cut(name, network, cut.stride, options)


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


@cache
def backbone_macs(name: str, input_size: tuple[int, int], stride: int | None = None, keep_layers: bool = False) -> int:
    """Count the multiply-accumulates of one image of `input_size` = (H0, W0) through a backbone.

    Raises:
        UsageError: no such backbone, none of this stride, or layers that cannot be kept.
    """
    backbone = build(name, stride=stride, keep_layers=keep_layers, input_size=input_size, device="meta")
    return count_macs(backbone.eval(), (3, *input_size))
