"""timm's convolutional networks as backbones, under the names `timm:NAME` and `timm:NAME.TAG`.

A network ends at its `forward_features()`, before pooling and classifier, and without layers after the pooling
(MobileNet-V3's last convolution). The tag names one set of weights with its mean, standard deviation, interpolation,
crop and licence (timm's `pretrained_cfg`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opal_deploy.errors import UsageError, first_line, require
from opal_deploy.model.config import PretrainedConfig
from opal_deploy.model.network_names import TIMM_PREFIX, check_network

# fields of timm's configuration that records keep
_DETAILS = ("license", "interpolation", "crop_pct", "crop_mode", "input_size", "hf_hub_id")


def build_network(name: str, device: str | torch.device = "cpu", num_classes: int | None = None) -> nn.Module:
    """Build timm's whole network with random weights; its `forward` is timm's `forward_features`.

    With a number of classes, `forward` returns logits.

    Raises:
        UsageError: timm has no such network, or no weights of this tag.
        MissingExtra: timm is not installed.
    """
    timm = _import_timm()
    architecture, _ = _split_name(name)
    with torch.device(device):
        if num_classes is not None:
            classifier: nn.Module = timm.create_model(architecture, num_classes=num_classes)
            return classifier
        model: nn.Module = timm.create_model(architecture)
    # feature extraction traces `forward`
    kind: Any = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"forward": kind.forward_features})
    return model


def find_architecture(name: str) -> str:
    """Return timm's name of a network, without the tag.

    Raises:
        UsageError: timm has no such network, or no such tag for it. MissingExtra: timm is not installed.
    """
    _import_timm()
    return _split_name(name)[0]


def tracer_options() -> dict[str, Any]:
    """Return the modules and functions that timm does not want traced through."""
    models = _import_timm().models
    return {"leaf_modules": models.get_notrace_modules(), "autowrap_functions": tuple(models.get_notrace_functions())}


def get_pretrained_config(name: str, weights: str | None) -> PretrainedConfig:
    """Return how a tag's weights were made; a file and random weights count as the name's tag."""
    architecture, tag = _split_name(name)
    configs = _configs(architecture)
    tag = weights if weights in configs else tag
    config = configs[tag]
    details = {key: value for key in _DETAILS if (value := getattr(config, key)) is not None}
    return PretrainedConfig(tuple(config.mean), tuple(config.std), {"tag": tag, **details})


def default_weights(name: str) -> str:
    """Return the tag in a name, or timm's default for the network.

    Raises:
        UsageError: timm has no such network, or no weights for it.
    """
    architecture, tag = _split_name(name)
    if not _configs(architecture)[tag].has_weights:
        raise UsageError(
            f"{name}: timm has no weights for it; give --weights a file, or none to start from random ones"
        )
    return tag


def download_weights(name: str, weights: str) -> tuple[dict[str, Tensor], str]:
    """Return the weights of a tag, downloaded by timm if necessary, and their origin.

    Raises:
        UsageError: timm has no such tag, or the download failed.
    """
    architecture, _ = _split_name(name)
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


def find_downloaded(name: str, weights: str) -> Path | None:
    """Return the file that `download_weights` keeps in Hugging Face's cache; None without one."""
    from huggingface_hub import try_to_load_from_cache

    architecture, _ = _split_name(name)
    config = _configs(architecture)[weights]
    for file in (config.hf_hub_filename, "model.safetensors", "pytorch_model.bin"):
        if config.hf_hub_id and file and isinstance(path := try_to_load_from_cache(config.hf_hub_id, file), str):
            return Path(path)
    return None


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


def _split_name(name: str) -> tuple[str, str]:
    """Return architecture and tag of `timm:NAME` (its default tag) or `timm:NAME.TAG`.

    Raises:
        UsageError: timm has no such network, or no such tag for it.
    """
    check_network(name)
    architecture, _, tag = name.removeprefix(TIMM_PREFIX).partition(".")
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
