"""The figures that need no annotation but the label: of a network, a graph or an engine alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.statistics.risk import risk_curve
from opal_deploy.train.evaluation.metrics import (
    accuracy,
    collapse_by_picture,
    cross_entropy,
    macro_f1,
    top_k_accuracy,
)

_TOP = 5
# checkpoints keep `val_risk`, from where the metadata has it
RISK = "risk"


@dataclass(frozen=True)
class Evaluation:
    """Figures over N pictures.

    Attributes:
        images: N.
        loss: cross-entropy over the logits, in nats.
        accuracy: top-1, 0 ... 1.
        spatial_prototype_collapse: mean over pictures, 0 ... 1 (paper, Supp. D.1); None for a network without slots.
        spatial_prototype_collapse_std: standard deviation over pictures, as the paper's table gives it.
        top5: top-5 accuracy, 0 ... 1; None with no more than 5 classes.
        macro_f1: 0 ... 1.
        risk: summary of the risk-coverage curve over the margin, see `RiskCurve.summary`; None without anchors.
    """

    images: int
    loss: float
    accuracy: float
    spatial_prototype_collapse: float | None = None
    spatial_prototype_collapse_std: float | None = None
    top5: float | None = None
    macro_f1: float | None = None
    risk: dict[str, Any] | None = None

    def to_dict(self, prefix: str) -> dict[str, Any]:
        """For checkpoints and JSON: `<prefix>_accuracy` and so on, the collapse as it is; what is None is left out."""
        figures = {
            f"{prefix}_accuracy": self.accuracy,
            f"{prefix}_top5": self.top5,
            f"{prefix}_macro_f1": self.macro_f1,
            f"{prefix}_loss": self.loss,
            f"{prefix}_images": self.images,
            f"{prefix}_{RISK}": self.risk,
            "spatial_prototype_collapse": self.spatial_prototype_collapse,
            "spatial_prototype_collapse_std": self.spatial_prototype_collapse_std,
        }
        return {name: value for name, value in figures.items() if value is not None}


def figures_of(
    logits: NDArray[np.float32],
    labels: NDArray[np.int64],
    argmax: NDArray[np.int32] | None = None,
    prototypes_per_class: int = 1,
    margins: NDArray[np.float64] | None = None,
) -> Evaluation:
    """Every figure that these outputs suffice for.

    Args:
        logits: [N, C], N at least 1.
        labels: [N], class indices.
        argmax: [N, K], flat cell of each channel's maximum; None for a network without slots.
        prototypes_per_class: m.
        margins: [N], see `metrics.margins`; None for a network without anchors.
    """
    mean, std = None, None
    if argmax is not None:
        collapse = collapse_by_picture(argmax, labels, prototypes_per_class)
        mean, std = float(collapse.mean()), float(collapse.std())
    risk = None if margins is None else risk_curve(margins, logits.argmax(axis=1) == labels).summary()
    return Evaluation(
        images=len(labels),
        loss=cross_entropy(logits, labels),
        accuracy=accuracy(logits, labels),
        spatial_prototype_collapse=mean,
        spatial_prototype_collapse_std=std,
        top5=top_k_accuracy(logits, labels, _TOP) if logits.shape[1] > _TOP else None,
        macro_f1=macro_f1(logits, labels),
        risk=risk,
    )
