"""torchvision's classifiers as backbones: their names, networks and ImageNet weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from opal_deploy.errors import UsageError
from opal_deploy.model.config import PretrainedConfig
from opal_deploy.model.network_names import check_network


def build_network(name: str, device: str | torch.device = "cpu", num_classes: int | None = None) -> nn.Module:
    """Build torchvision's whole network with random weights.

    `num_classes` None means ImageNet's number of classes. On the device `meta` the network takes no memory.

    Raises:
        UsageError: torchvision has no such classifier.
    """
    import torchvision

    check_network(name)
    options = {} if num_classes is None else {"num_classes": num_classes}
    with torch.device(device), warnings.catch_warnings():
        # GoogLeNet and Inception warn that their default initialisation is slow
        warnings.simplefilter("ignore")
        try:
            model: nn.Module = torchvision.models.get_model(name, weights=None, **options)
        except NotImplementedError:
            # RegNet computes its widths with tensors, which have no values on meta; the largest is 2.6 GB, so only its
            # parameters go to `device`
            with torch.device("cpu"), _ParametersOn(device):
                model = torchvision.models.get_model(name, weights=None, **options)
            model = model.to(device)
    return model


def tracer_options() -> dict[str, Any]:
    """Return tracing options for torchvision networks: none."""
    return {}


def get_pretrained_config(name: str, weights: str | None) -> PretrainedConfig:
    """Return ImageNet's mean and standard deviation, as for all torchvision weights."""
    return PretrainedConfig()


def download_weights(name: str, weights: str) -> tuple[dict[str, Tensor], str]:
    """Return weights under a name that `check_weights` passed, and their origin; UsageError if the download fails."""
    import torchvision

    chosen = torchvision.models.get_model_weights(name)[weights]
    try:
        state: dict[str, Tensor] = chosen.get_state_dict(progress=False, check_hash=True)
    except OSError as error:
        raise UsageError(
            f"weights {weights}: torchvision could not download them ({error}); "
            "download the file elsewhere and give its path: --weights FILE"
        ) from None
    return state, f"torchvision {weights}"


def convert_sync_batch_norm(network: nn.Module) -> nn.Module:
    """Return a network with batch statistics over all processes."""
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    return converted


class _ParametersOn(TorchFunctionMode):
    """Allocates only the parameters and buffers of layers on a device."""

    def __init__(self, device: str | torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones):
            kwargs["device"] = self.device
        return func(*args, **kwargs)
