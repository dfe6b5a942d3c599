"""Convolutional networks as backbones: cut where `feature_graph` finds a feature map, in either library.

Parameter names stay those of the library (`layer4.1.conv2.weight`, `features.7.2.block.0.weight`).
`torchvision_backbones` and `timm_backbones` hold what differs between the libraries.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from opal_deploy.errors import UsageError
from opal_deploy.model.config import PretrainedConfig, require_stride
from opal_deploy.model.feature_graph import (
    FEATURES,
    Cut,
    extract_classifier,
    find_cut,
    find_unstrided_cut,
    remove_strides,
)


class Library(Hashable, Protocol):
    """A library of networks; `torchvision_backbones` documents the functions."""

    def build_network(
        self, name: str, device: str | torch.device = "cpu", num_classes: int | None = None
    ) -> nn.Module: ...

    def tracer_options(self) -> dict[str, Any]: ...

    def get_pretrained_config(self, name: str, weights: str | None) -> PretrainedConfig: ...

    def download_weights(self, name: str, weights: str) -> tuple[dict[str, Tensor], str]: ...

    def find_downloaded(self, name: str, weights: str) -> Path | None: ...

    def convert_sync_batch_norm(self, network: nn.Module) -> nn.Module: ...


class ConvolutionalNetwork:
    """A network of convolutions, by its name in a library."""

    def __init__(self, name: str, library: Library) -> None:
        self._name, self._library = name, library

    def find_cut(self, stride: int | None = None, keep_layers: bool = False) -> Cut:
        """Return the cut for the arguments of `backbones.build`."""
        return _find_cut(self._name, self._library, stride, keep_layers)

    def build_body(self, cut: Cut, input_size: tuple[int, int] | None, device: str | torch.device) -> nn.Module:
        """Build images of any size to `{FEATURES: [N, D, H, W]}`, with random weights."""
        from torchvision.models.feature_extraction import create_feature_extractor

        network, options = self._library.build_network(self._name, device), self._library.tracer_options()
        remove_strides(network, cut.unstrided)
        body: nn.Module = create_feature_extractor(
            network, {cut.node: FEATURES}, tracer_kwargs=options, suppress_diff_warning=True
        )
        return body

    def build_network(self, num_classes: int, input_size: tuple[int, int] | None) -> nn.Module:
        """Build the whole classifier, images to logits [N, C], with random weights."""
        return self._library.build_network(self._name, "cpu", num_classes)

    def build_classifier(
        self, num_classes: int, stride: int | None, keep_layers: bool, device: str | torch.device
    ) -> nn.Module:
        """Build the layers after the backbone; see `backbones.build_classifier`."""
        whole = self.find_cut()
        own = whole.stride
        if stride not in (None, own) and not keep_layers:
            raise UsageError(
                f"the plain head, the network's own classifier, takes features of {self._name} at stride {own}, not "
                f"{stride}; give --stride {own}, --keep-layers, or another head"
            )
        network = self._library.build_network(self._name, device, num_classes)
        return extract_classifier(self._name, network, whole.node, self._library.tracer_options())

    def fit_weights(self, network: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict as the network takes it: unchanged."""
        return state


@cache
def _find_cut(name: str, library: Library, stride: int | None, keep_layers: bool) -> Cut:
    """Return the cut of a network; cached, since tracing is slow."""
    require_stride(stride, keep_layers)
    network, options = library.build_network(name, "meta"), library.tracer_options()
    cut = find_cut(name, network, stride, options)
    if not keep_layers:
        return cut
    if cut.stride == _find_cut(name, library, None, False).stride:
        raise UsageError(
            f"--keep-layers: all layers of {name} already end at stride {cut.stride}; leave --keep-layers out "
            "(--no-keep-layers if a recipe has it), or give a smaller --stride"
        )
    return find_unstrided_cut(name, network, cut.stride, options)
