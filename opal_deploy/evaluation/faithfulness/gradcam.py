"""Grad-CAM (Selvaraju et al. 2017) of a network in PyTorch, as a control for the evidence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import ImageBatch


class HeatMap(Protocol):
    """Computes the relevance of every cell for a class."""

    def __call__(self, images: ImageBatch, classes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return relevances float32 [n, H * W] for images uint8 [n, H0, W0, 3] and class ids [n]."""
        ...


class GradCam:
    """Grad-CAM of the classes' logits at the features before the projection.

    Before its rectification: the peaks are the same, and maps that are nowhere positive still have an order.
    """

    def __init__(self, network: OpalNetwork) -> None:
        self._network = network.eval()
        self._device = next(network.parameters()).device

    def __call__(self, images: ImageBatch, classes: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the maps of the given classes; see `HeatMap`."""
        config = self._network.config
        pixels = torch.from_numpy(normalise(images, config.mean, config.std)).to(self._device)
        with torch.no_grad():
            features = self._network.backbone(pixels)
        with torch.enable_grad():
            features = features.detach().requires_grad_()  # [n, D, H, W]
            logits = self._network.head(features)
            selected = logits.gather(1, torch.from_numpy(classes).to(self._device)[:, None]).sum()
            (gradient,) = torch.autograd.grad(selected, features)
        weights = gradient.mean(dim=(2, 3), keepdim=True)
        heat_map: NDArray[np.float32] = (weights * features.detach()).sum(1).flatten(1).float().cpu().numpy()
        return heat_map
