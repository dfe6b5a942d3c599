"""What a network makes of labelled pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.datasets.samples import ProgressCallback, Sample
from opal_deploy.evaluation.metrics import Evaluation, compute_metrics, margins
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.images import Batches, TrainImages, normalize

__all__ = ["Evaluation", "evaluate", "evaluate_batches"]


def evaluate(
    network: OpalNetwork,
    samples: list[Sample],
    *,
    batch_size: int = 64,
    workers: int = 0,
    report: ProgressCallback | None = None,
) -> Evaluation:
    """Run `samples` (at least one) through `network`, in float32 on its device; leaves it in eval mode.

    Raises:
        UsageError: names a picture that cannot be decoded.
    """
    batches = Batches(TrainImages(samples, network.config.input_size), batch_size, workers=workers)
    return evaluate_batches(network, batches, report=report)


# one batch's logits [n, C], labels [n], and where there are any cells [n, K] and margins [n]
BatchOutputs = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int32] | None, NDArray[np.float64] | None]


def evaluate_batches(
    network: OpalNetwork,
    batches: Batches,
    *,
    report: ProgressCallback | None = None,
    gather: Callable[[list[BatchOutputs]], list[list[BatchOutputs]]] | None = None,
) -> Evaluation:
    """As `evaluate`, over batches that may be cached.

    Args:
        gather: from this process's share to that of each; the figures are then of all, in every process.
    """
    network.eval()
    device = next(network.parameters()).device
    head = network.config.head
    parts: list[BatchOutputs] = []
    done = 0
    with torch.inference_mode():
        for images, labels in batches:
            outputs = network.explain(normalize(images.to(device), IMAGENET_MEAN, IMAGENET_STD))
            cells = None if outputs.argmax is None else outputs.argmax.cpu().numpy()
            logits = outputs.logits.float().cpu().numpy()
            sizes = None
            if outputs.scores is not None:
                sizes = margins(logits, outputs.scores.float().cpu().numpy(), head.prototypes_per_class, head.epsilon)
            parts.append((logits, labels.numpy(), cells, sizes))
            done += len(labels)
            if report is not None:
                report(done, len(batches.pictures), "evaluating")
    if gather is not None:
        parts = [part for share in gather(parts) for part in share]
    return compute_metrics(
        np.concatenate([part[0] for part in parts]),
        np.concatenate([part[1] for part in parts]),
        _concatenate([part[2] for part in parts]),
        head.prototypes_per_class,
        _concatenate([part[3] for part in parts]),
    )


_Number = TypeVar("_Number", np.int32, np.float64)


def _concatenate(arrays: list[NDArray[_Number] | None]) -> NDArray[_Number] | None:
    """None where a network answers with none."""
    there = [array for array in arrays if array is not None]
    return np.concatenate(there) if there else None
