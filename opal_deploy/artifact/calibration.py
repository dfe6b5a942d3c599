"""The calibration of a model's logits, as checkpoints and metadata keep it: temperature scaling.

After Guo, Pleiss, Sun and Weinberger, "On calibration of modern neural networks" (ICML 2017): softmax(logits / T) with
one temperature T for all classes, fitted on validation images. The prediction stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from opal_deploy.errors import ArtifactError

METHOD = "temperature"
# of the expected calibration error, with as many images each
NUM_BINS = 15
# parts of the images that are measured with the temperature of the others
NUM_FOLDS = 5
NOT_FITTED = "none was fitted; `opal-deploy evaluate DATA --model MODEL --split val --record` fits and keeps one"


@dataclass(frozen=True)
class Calibration:
    """The temperature of a model and how well calibrated it made the predictions, or the reason why there is none.

    Figures without `_uncalibrated` are cross-fitted: each fifth of the images is measured with the temperature fitted
    on the other four; `temperature` is fitted on all. Training also chose the best epoch on these images, so that new
    ones may do a little worse.

    Attributes:
        images: validation images that it was fitted on.
        temperature: T, over 0; None where it was not fitted.
        reason: why it was not fitted; empty if it was.
        accuracy: share of right predictions, 0 ... 1, the same with every temperature.
        nll: mean of -log(probability of the label), in nats.
        nll_uncalibrated: the same at temperature 1.
        ece: expected calibration error of the predicted class's probability, 0 ... 1 (`evaluation.calibration`).
        ece_uncalibrated: the same at temperature 1.
        ece_perfect: mean error that the same probabilities would show if they were exactly right: what so few images
            cannot tell from 0.
        bins: of the expected calibration error, with as many images each.
        folds: of the cross-fitting.
        split: of the data set.
        method: `temperature`.
    """

    images: int
    temperature: float | None = None
    reason: str = ""
    accuracy: float | None = None
    nll: float | None = None
    nll_uncalibrated: float | None = None
    ece: float | None = None
    ece_uncalibrated: float | None = None
    ece_perfect: float | None = None
    bins: int = NUM_BINS
    folds: int = NUM_FOLDS
    split: str = "val"
    method: str = METHOD

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have a value, for JSON; `from_dict` reads them."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Calibration | None:
        """Return the calibration that `to_dict` wrote; None for an empty dictionary.

        Raises:
            ArtifactError: the dictionary is not one of `to_dict`, or its method is not known here.
        """
        if not raw:
            return None
        known = {name: raw[name] for name in Calibration.__dataclass_fields__ if name in raw}
        temperature = known.get("temperature")
        figures = [value for name, value in known.items() if name not in ("reason", "split", "method")]
        if (
            known.get("method") != METHOD
            or not isinstance(known.get("images"), int)
            or not all(type(value) in (int, float) and math.isfinite(value) for value in figures)
            or (temperature is None and not known.get("reason"))
            or (temperature is not None and not (temperature > 0 and "ece" in known))
        ):
            raise ArtifactError(
                f"calibration {dict(raw)!r}: expected a temperature over 0 with its errors, or a reason"
            )
        return Calibration(**known)

    def describe(self) -> str:
        """Return one line for a person."""
        if self.temperature is None:
            return f"not calibrated: {self.reason}"
        assert self.ece is not None  # `from_dict` checks it
        other = "" if self.ece_uncalibrated is None else f"; {self.ece_uncalibrated:.1%} at temperature 1"
        perfect = "" if self.ece_perfect is None else f", where exact probabilities would show {self.ece_perfect:.1%}"
        right = "" if self.accuracy is None else f", {self.accuracy:.1%} right"
        return (
            f"temperature {self.temperature:.4g}, fitted on {self.images:,} {self.split} images{right}: expected "
            f"calibration error {self.ece:.1%} on images left out of the fit{perfect}{other}"
        )


def describe_calibration(raw: Mapping[str, Any]) -> str:
    """Return one line for a person on the `calibration` of metadata or of a checkpoint; {} where there is none.

    Raises:
        ArtifactError: see `Calibration.from_dict`.
    """
    calibration = Calibration.from_dict(raw)
    return f"not calibrated: {NOT_FITTED}" if calibration is None else calibration.describe()
