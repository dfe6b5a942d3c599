"""timm's networks as backbones, under the names `timm:NAME` and `timm:NAME.TAG`.

A network ends at its `forward_features()`, before pooling and classifier, and without layers after the pooling
(MobileNet-V3's last convolution). The tag names one set of weights with its mean, standard deviation, interpolation,
crop and licence (timm's `pretrained_cfg`).

A vision transformer returns tokens [N, T, D]: class and register tokens, then one per patch, row by row. Swin returns
[N, H, W, D]. Either is the grid [N, D, H, W] that a head takes. By attention a cell sees the whole image, so a box says
where a score was read and nothing about what it depends on. A transformer is built for one image size; weights of
another size, and in the formats of DINOv2, DINOv3 and DeiT, are converted as timm converts them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from opal_deploy.errors import UsageError, first_line, require
from opal_deploy.model.config import PretrainedConfig
from opal_deploy.model.feature_graph import FEATURES, Cut
from opal_deploy.model.network_names import check_network, split_timm_name

# fields of timm's configuration that records keep
_DETAILS = ("license", "interpolation", "crop_pct", "crop_mode", "input_size", "hf_hub_id")
# timm's layers after the tokens
_AFTER_TOKENS = ("attn_pool", "fc_norm", "head_drop")


def build_network(name: str, device: str | torch.device = "cpu", num_classes: int | None = None) -> nn.Module:
    """Build timm's whole network with random weights; its `forward` is timm's `forward_features`.

    With a number of classes, `forward` returns logits.

    Raises:
        UsageError: timm has no such network, or no weights of this tag.
        MissingExtra: timm is not installed.
    """
    architecture, _ = find_architecture(name)
    options = {} if num_classes is None else {"num_classes": num_classes}
    with torch.device(device):
        model: nn.Module = _import_timm().create_model(architecture, **options)
    if num_classes is None:
        # feature extraction traces `forward`
        kind: Any = type(model)
        model.__class__ = type(kind.__name__, (kind,), {"forward": kind.forward_features})
    return model


def tracer_options() -> dict[str, Any]:
    """Return the modules and functions that timm does not want traced through."""
    models = _import_timm().models
    return {"leaf_modules": models.get_notrace_modules(), "autowrap_functions": tuple(models.get_notrace_functions())}


def get_pretrained_config(name: str, weights: str | None) -> PretrainedConfig:
    """Return how a tag's weights were made; a file and random weights count as the name's tag."""
    architecture, tag = find_architecture(name)
    configs = _configs(architecture)
    tag = weights if weights in configs else tag
    config = configs[tag]
    details = {key: value for key in _DETAILS if (value := getattr(config, key)) is not None}
    return PretrainedConfig(tuple(config.mean), tuple(config.std), {"tag": tag, **details})


def default_weights(name: str) -> str:
    """Return the tag in a name, or timm's default for the network; UsageError without such a network or weights."""
    architecture, tag = find_architecture(name)
    if not _configs(architecture)[tag].has_weights:
        raise UsageError(f"{name}: timm has no weights for it; give --weights a file, or none for random ones")
    return tag


def download_weights(name: str, weights: str) -> tuple[dict[str, Tensor], str]:
    """Return a tag's weights, downloaded if necessary, and their origin; UsageError for no such tag or a failure."""
    architecture, _ = find_architecture(name)
    configs = _configs(architecture)
    if weights not in configs or not configs[weights].has_weights:
        known = ", ".join(tag for tag, config in configs.items() if config.has_weights) or "it has none"
        raise UsageError(
            f"weights {weights!r}: no such file (.pth, .ckpt, .safetensors) and no timm tag for {architecture} "
            f"({known})"
        )
    full_name = f"{architecture}.{weights}"
    try:
        model = _import_timm().create_model(full_name, pretrained=True)
    except OSError as error:
        raise UsageError(
            f"weights {weights}: timm could not download {full_name} ({first_line(error)}); download it elsewhere "
            f"(https://huggingface.co/{configs[weights].hf_hub_id}) and give its path: --weights FILE"
        ) from None
    return model.state_dict(), f"timm {full_name}"


def convert_sync_batch_norm(network: nn.Module) -> nn.Module:
    """Return a network with batch statistics over all processes.

    PyTorch's own conversion drops the activations inside timm's normalisations.
    """
    converted: nn.Module = _import_timm().layers.convert_sync_batchnorm(network)
    return converted


def _import_timm() -> Any:
    require("timm", "timm", "a timm backbone")
    import timm

    return timm


def find_architecture(name: str) -> tuple[str, str]:
    """Return timm's name of a network, and the tag of `timm:NAME.TAG` or the default tag of `timm:NAME`.

    Raises:
        UsageError: timm has no such network, or no such tag for it. MissingExtra: timm is not installed.
    """
    check_network(name)
    architecture, tag = split_timm_name(name)
    configs = _configs(architecture)
    if tag and tag not in configs:
        raise UsageError(f"backbone {name!r}: timm has no weights {tag!r} for it; it has {', '.join(configs)}")
    return architecture, tag or next(iter(configs))


def _configs(architecture: str) -> dict[str, Any]:
    """Return timm's configurations of a network by tag, the default first."""
    models = _import_timm().models
    default = models.get_pretrained_cfg(architecture)
    configs = models.get_arch_pretrained_cfgs(architecture).values()
    return {config.tag or "": config for config in (default, *configs)}


@cache
def find_tokens(architecture: str) -> Cut | None:
    """Return the cut after a network's grid of tokens; None for one without, such as a convolutional network."""
    import timm

    with torch.device("meta"):
        model: Any = timm.create_model(architecture, num_classes=0)
    if not hasattr(model, "patch_embed"):
        return None
    prefix, patches = getattr(model, "num_prefix_tokens", 0), model.patch_embed
    size = model.pretrained_cfg["input_size"][-1]
    with torch.no_grad():
        features = model.eval().forward_features(torch.empty(1, 3, size, size, device="meta"))
    try:
        grid = _to_grid(features, prefix, model.num_features, patches)
    except ValueError:
        return None
    cells = grid.shape[2]
    return Cut("", grid.shape[1], size // cells) if cells > 1 and size % cells == 0 else None


class TokenNetwork:
    """A transformer of timm, by timm's name; see `backbones.ConvolutionalNetwork` for the methods."""

    def __init__(self, architecture: str, tokens: Cut) -> None:
        self._architecture, self._tokens = architecture, tokens

    def find_cut(self, stride: int | None = None) -> Cut:
        """Return the only cut there is: after the tokens."""
        own = self._tokens.stride
        if stride not in (None, own):
            raise UsageError(f"timm:{self._architecture}: its cells have {own} pixels; leave --stride out")
        return self._tokens

    def build_body(
        self, cuts: Sequence[Cut], input_size: tuple[int, int] | None, device: str | torch.device
    ) -> nn.Module:
        """Build images of one size, None for timm's default, to `{FEATURES: [N, D, H, W]}`.

        Raises:
            UsageError: the network cannot take that size.
        """
        import timm

        create: Any = timm.create_model
        try:
            with torch.device(device):
                size = {} if input_size is None else {"img_size": input_size}
                model: nn.Module = create(self._architecture, num_classes=0, **size)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            wanted = "its own size" if input_size is None else "{}x{}".format(*input_size)
            raise UsageError(f"timm:{self._architecture}: not possible for {wanted} ({first_line(error)})") from None
        for name in {*_AFTER_TOKENS} & {name for name, _ in model.named_children()}:
            setattr(model, name, nn.Identity())
        kind: Any = type(model)
        model.__class__ = type(kind.__name__, (kind,), {"forward": _forward, "__module__": kind.__module__})
        return model

    def build_classifier(self, num_classes: int, stride: int | None, device: str | torch.device) -> nn.Module:
        """Refuse: what follows the tokens takes no grid of cells."""
        raise UsageError(f"the plain head takes no transformer such as timm:{self._architecture}; use --head linear")

    def fit_weights(self, network: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict in timm's names and for the network's image size, as timm's own filter makes it."""
        module = sys.modules[type(network).__module__]
        convert = getattr(module, "checkpoint_filter_fn", None)
        if convert is None:
            return state
        # some filters leave out the classifier, or interpolate positions, only when told to
        wanted, known = {"interpolation": "bicubic", "antialias": True}, inspect.signature(convert).parameters
        options = {name: value for name, value in wanted.items() if name in known}
        converted: dict[str, Tensor] = convert(dict(state), network, **options)
        return converted


def _forward(self: Any, images: Tensor) -> dict[str, Tensor]:
    features = self.forward_features(images)
    return {FEATURES: _to_grid(features, getattr(self, "num_prefix_tokens", 0), self.num_features, self.patch_embed)}


def _to_grid(features: Any, prefix: int, num_features: int, patches: Any) -> Tensor:
    """Return tokens [N, T, D] or [N, H, W, D] as [N, D, H, W]; raise ValueError for other features."""
    shape = features.shape if isinstance(features, Tensor) else ()
    if len(shape) == 4 and shape[3] == num_features:
        return cast(Tensor, features).permute(0, 3, 1, 2)
    rows, cols = getattr(patches, "grid_size", (0, 0))
    if len(shape) != 3 or not rows or rows * cols != shape[1] - prefix:
        raise ValueError("not a grid of tokens")
    grid: Tensor = features[:, prefix:].transpose(1, 2).unflatten(2, (rows, cols))
    return grid
