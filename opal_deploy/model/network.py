"""The OPAL network: a backbone and a head in one module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from opal_deploy.model import backbones
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.head import HeadOutputs, OpalHead
from opal_deploy.model.neighbours import Neighbours


class OpalNetwork(nn.Module):
    """Normalised images, float [N, 3, H0, W0], to logits [N, C]; `explain` adds the evidence of the same pass.

    Attributes:
        config: the network's configuration.
        backbone: [N, 3, H0, W0] to features [N, D, H, W].
        head: features to logits.
        grid: (H, W) of the feature map.
        weights_origin: origin of the backbone's weights; None for random ones.
        neighbours: features of training images; None where they were not kept. No part of the state dict.
    """

    def __init__(self, config: NetworkConfig, *, weights: str | Path | Mapping[str, Tensor] | None = None) -> None:
        """Build the network; `weights` of the backbone are those of `backbones.load_weights`, or None for random ones.

        Errors are those of `backbones`.
        """
        super().__init__()
        self.config = config
        self.backbone = backbones.build(
            config.backbone, stride=config.stride, keep_layers=config.keep_layers, input_size=config.input_size
        )
        self.grid = self.backbone.grid(config.input_size)
        classifier = None
        if config.head.plain:
            classifier = backbones.build_classifier(config.backbone, config.num_classes, stride=config.stride)
        self.weights_origin = None if weights is None else backbones.load_weights(self.backbone, weights, classifier)
        self.head = OpalHead(self.backbone.num_features, config.num_classes, config.head, classifier)
        self.neighbours: Neighbours | None = None

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits

    def explain(self, images: Tensor) -> HeadOutputs:
        """Return logits, scores, argmax, attention and OOD score of one forward pass."""
        features = self.backbone(images)
        return self.explain_features(features, self.head.project(features))

    def explain_features(self, features: Tensor, projected: Tensor) -> HeadOutputs:
        """Return the outputs for features [N, D, H, W] and their projection [N, K, H, W]."""
        outputs = self.head.explain(projected)
        outputs.ood_score = None if self.neighbours is None else self.neighbours(features)
        return outputs

    def list_outputs(self, *, attention: bool = False) -> tuple[str, ...]:
        """Return the names of the contract's outputs that the network has, in order."""
        if self.config.head.evidence == "none":
            return ("logits",)
        extra = {"attention": attention, "ood_score": self.neighbours is not None}
        return ("logits", "argmax", "scores", *(name for name, wanted in extra.items() if wanted))

    def channels_last(self) -> OpalNetwork:
        """Lay out the convolutions' weights for NHWC, which is faster on CPU and GPU, and return the network."""
        return self.to(memory_format=torch.channels_last)
