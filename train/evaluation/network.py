"""What a network makes of labelled pictures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.data.samples import Report, Sample
from opal_deploy.train.evaluation.figures import Evaluation, figures_of
from opal_deploy.train.pictures import Batches, Pictures, normalised

__all__ = ["Evaluation", "evaluate", "evaluate_batches"]


def evaluate(
    network: OpalNetwork, samples: list[Sample], *, batch_size: int = 64, workers: int = 0, report: Report | None = None
) -> Evaluation:
    """Run `samples` (at least one) through `network`, in float32 on its device; leaves it in eval mode.

    Raises:
        UsageError: names a picture that cannot be decoded.
    """
    batches = Batches(Pictures(samples, network.config.input_size), batch_size, workers=workers)
    return evaluate_batches(network, batches, report=report)


# one batch's logits [n, C], labels [n] and cells [n, K], where there are any
Part = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int32] | None]


def evaluate_batches(
    network: OpalNetwork,
    batches: Batches,
    *,
    report: Report | None = None,
    gather: Callable[[list[Part]], list[list[Part]]] | None = None,
) -> Evaluation:
    """As `evaluate`, over batches that may be cached.

    Args:
        gather: from this process's share to that of each; the figures are then of all, in every process.
    """
    network.eval()
    device = next(network.parameters()).device
    parts: list[Part] = []
    done = 0
    with torch.inference_mode():
        for images, labels in batches:
            outputs = network.explain(normalised(images.to(device), IMAGENET_MEAN, IMAGENET_STD))
            cells = None if outputs.argmax is None else outputs.argmax.cpu().numpy()
            parts.append((outputs.logits.float().cpu().numpy(), labels.numpy(), cells))
            done += len(labels)
            if report is not None:
                report(done, len(batches.pictures), "evaluating")
    if gather is not None:
        parts = [part for share in gather(parts) for part in share]
    logits, all_labels = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    all_cells = [part[2] for part in parts if part[2] is not None]
    m = network.config.head.prototypes_per_class
    return figures_of(logits, all_labels, np.concatenate(all_cells) if all_cells else None, m)
