"""What a network makes of labelled pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.data.samples import Sample
from opal_deploy.train.evaluation.metrics import accuracy, cross_entropy, spatial_prototype_collapse
from opal_deploy.train.pictures import Batches, Pictures, Report, normalised


@dataclass(frozen=True)
class Evaluation:
    """Figures over N pictures.

    Attributes:
        images: N.
        loss: cross-entropy over the logits, in nats.
        accuracy: 0 ... 1.
        spatial_prototype_collapse: 0 ... 1 (paper, Supp. D.1); None for a network without slots.
    """

    images: int
    loss: float
    accuracy: float
    spatial_prototype_collapse: float | None = None

    def to_dict(self, prefix: str) -> dict[str, Any]:
        """For checkpoints and JSON: `<prefix>_accuracy`, `<prefix>_loss`, `<prefix>_images`, the collapse as it is."""
        figures: dict[str, Any] = {
            f"{prefix}_accuracy": self.accuracy,
            f"{prefix}_loss": self.loss,
            f"{prefix}_images": self.images,
        }
        if self.spatial_prototype_collapse is not None:
            figures["spatial_prototype_collapse"] = self.spatial_prototype_collapse
        return figures


def evaluate(
    network: OpalNetwork, samples: list[Sample], *, batch_size: int = 64, workers: int = 0, report: Report | None = None
) -> Evaluation:
    """Run `samples` (at least one) through `network`, in float32 on its device; leaves it in eval mode.

    Raises:
        UsageError: names a picture that cannot be decoded.
    """
    batches = Batches(Pictures(samples, network.config.input_size), batch_size, workers=workers)
    return evaluate_batches(network, batches, report=report)


def evaluate_batches(network: OpalNetwork, batches: Batches, *, report: Report | None = None) -> Evaluation:
    """As `evaluate`, over batches that may be cached."""
    network.eval()
    device = next(network.parameters()).device
    all_logits, all_labels, all_cells = [], [], []
    done = 0
    with torch.inference_mode():
        for images, labels in batches:
            outputs = network.explain(normalised(images.to(device), IMAGENET_MEAN, IMAGENET_STD))
            all_logits.append(outputs.logits.float().cpu().numpy())
            all_labels.append(labels.numpy())
            if outputs.argmax is not None:
                all_cells.append(outputs.argmax.cpu().numpy())
            done += len(labels)
            if report is not None:
                report(done, len(batches.pictures), "evaluating")
    logits, labels_array = np.concatenate(all_logits), np.concatenate(all_labels)
    collapse = None
    if all_cells:
        m = network.config.head.prototypes_per_class
        collapse = spatial_prototype_collapse(np.concatenate(all_cells), labels_array, m)
    return Evaluation(len(logits), cross_entropy(logits, labels_array), accuracy(logits, labels_array), collapse)
