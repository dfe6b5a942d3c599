"""A network's metrics on labelled images, while it is trained and at its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from opal_deploy.evaluation.metrics import Evaluation, compute_metrics, margins
from opal_deploy.logs import Progress
from opal_deploy.model.network import OpalNetwork
from opal_deploy.train.images import Batches, normalize

__all__ = ["Evaluation", "LabelledOutputs", "evaluate", "predict"]


class LabelledOutputs(NamedTuple):
    """The outputs for n images and their labels.

    Attributes:
        logits: float32 [n, C].
        labels: int64 [n].
        argmax: int32 [n, K]; None for a network without slots.
        margins: float64 [n], see `metrics.margins`; None for a network without anchors.
    """

    logits: NDArray[np.float32]
    labels: NDArray[np.int64]
    argmax: NDArray[np.int32] | None
    margins: NDArray[np.float64] | None


Gather = Callable[[list[LabelledOutputs]], list[list[LabelledOutputs]]]

_Number = TypeVar("_Number", np.int32, np.float64)


def evaluate(
    network: OpalNetwork, batches: Batches, *, report: Progress | None = None, gather: Gather | None = None
) -> Evaluation:
    """Return the metrics over all batches; see `predict`."""
    outputs = predict(network, batches, report=report, gather=gather)
    return compute_metrics(
        outputs.logits, outputs.labels, outputs.argmax, network.config.head.prototypes_per_class, outputs.margins
    )


def predict(
    network: OpalNetwork, batches: Batches, *, report: Progress | None = None, gather: Gather | None = None
) -> LabelledOutputs:
    """Return the outputs of all batches, computed in float32 on the network's device; leaves it in eval mode.

    Args:
        network: the network.
        batches: at least one image.
        report: called after each batch.
        gather: from this process's outputs to those of every process, which are then returned.

    Raises:
        UsageError: names an image that cannot be decoded.
    """
    network.eval()
    device = next(network.parameters()).device
    config, head = network.config, network.config.head
    parts: list[LabelledOutputs] = []
    done = 0
    with torch.inference_mode():
        for images, labels in batches:
            outputs = network.explain(normalize(images.to(device), config.mean, config.std))
            argmax = None if outputs.argmax is None else outputs.argmax.cpu().numpy()
            logits = outputs.logits.float().cpu().numpy()
            batch_margins = None
            if outputs.scores is not None:
                scores = outputs.scores.float().cpu().numpy()
                batch_margins = margins(logits, scores, head.prototypes_per_class, head.epsilon)
            parts.append(LabelledOutputs(logits, labels.numpy(), argmax, batch_margins))
            done += len(labels)
            if report is not None:
                report(done, len(batches.images), "evaluating")
    if gather is not None:
        parts = [part for share in gather(parts) for part in share]
    return LabelledOutputs(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.labels for part in parts]),
        _concatenate([part.argmax for part in parts]),
        _concatenate([part.margins for part in parts]),
    )


def _concatenate(arrays: list[NDArray[_Number] | None]) -> NDArray[_Number] | None:
    """Return the arrays as one, or None where the network has no such output."""
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None
