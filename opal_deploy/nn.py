"""The network and the head as PyTorch modules, for your own training loop.

>>> network = opal_deploy.nn.build_network("resnet18", 10, weights="imagenet")  # doctest: +SKIP
>>> loss = opal_deploy.nn.cross_entropy(network(images), labels)  # doctest: +SKIP
>>> opal_deploy.nn.save_checkpoint(network, class_names, "mine.pt")  # doctest: +SKIP

`opal_deploy.export_model("mine.pt")` and every command take the file, and `opal_deploy.nn.load("mine.pt")` gives the
network back, for Captum, Quantus or a loop of your own. Images are normalised, float32 [N, 3, H0, W0].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from opal_deploy.artifact.documents import Distance
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork
from opal_deploy.options import StrPath

__all__ = [
    "HeadConfig",
    "NetworkConfig",
    "OpalHead",
    "OpalNetwork",
    "build_network",
    "cross_entropy",
    "load",
    "save_checkpoint",
]

# logits are minus distances of at most the square root of 2: unscaled, many classes cannot be told apart
LOGIT_SCALE = 10.0


def build_network(
    backbone: str,
    num_classes: int,
    *,
    size: int = 224,
    prototypes: int = 5,
    distance: Distance = "l2",
    stride: int | None = 16,
    weights: StrPath | Mapping[str, Tensor] | torch.nn.Module | None = None,
) -> OpalNetwork:
    """Return a network with OPAL's head.

    Args:
        backbone: a torchvision name, such as `resnet18`, or `timm:` and a timm name.
        num_classes: C, at least 2.
        size: side of the square input in pixels, a multiple of the stride.
        prototypes: per class, m.
        distance: of the embedding to a class's anchor.
        stride: pixels per cell; None keeps the backbone's own, usually 32.
        weights: `imagenet` (downloaded once); a classifier of that name which you trained, its state dict, or a file of
            it (.pth, .ckpt, .safetensors), whose last layer is left out; None leaves them random.

    Raises:
        UsageError: no such backbone, or the values do not fit together. CheckpointError: weights that do not fit.
    """
    head = HeadConfig(prototypes_per_class=prototypes, distance=distance)
    config = NetworkConfig(backbone, num_classes, (size, size), head, stride=stride)
    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict()
    return OpalNetwork(config, weights=weights if weights is None or isinstance(weights, Mapping) else str(weights))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of 10 times the logits [N, C]; labels are int64 [N]."""
    return torch.nn.functional.cross_entropy(LOGIT_SCALE * logits, labels)


def load(path: StrPath, *, device: str = "cpu") -> OpalNetwork:
    """Return the network of a checkpoint, in evaluation mode; it maps normalised images to logits, float32 [N, C].

    Args:
        path: of this trainer (best.pt), of `save_checkpoint`, or of the authors' repository.
        device: as torch names it, such as `cuda`.

    Raises:
        UsageError: no such file. CheckpointError: it is damaged, or of another kind.
    """
    return checkpoint.load(Path(path)).network.to(device).eval()


def save_checkpoint(network: OpalNetwork, class_names: Sequence[str], path: StrPath) -> Path:
    """Write a checkpoint that every command takes, and return its path.

    Args:
        network: with this package's backbone; on any device, and left as it is.
        class_names: C names in the order of the logits.
        path: the file to write, or to replace.

    Raises:
        UsageError: not as many names as classes, or the file cannot be written.
    """
    if len(class_names) != network.config.num_classes:
        raise UsageError(f"{len(class_names)} class names for {network.config.num_classes} classes")
    checkpoint.save(Path(path), checkpoint.Checkpoint(network, list(class_names)))
    return Path(path)
