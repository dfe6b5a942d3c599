"""Temperature scaling: fit a temperature, and measure how well calibrated the probabilities are.

The probability of class c is softmax(logits / T)[c] (Guo et al., "On calibration of modern neural networks", ICML
2017). Logits are minus distances, within [-sqrt(2), 0] for the Euclidean head: their softmax is nearly flat at T = 1,
and fitted temperatures are far below 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import softmax

from opal_deploy.artifact.measurements import NUM_BINS, NUM_FOLDS, Calibration, describe_calibration
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import DoubleArray, FloatArray, compute_probabilities
from opal_deploy.evaluation.metrics import Figures

MIN_IMAGES = 50
# the inverse temperatures among which the best is sought, as logarithms
_LOWEST, _HIGHEST = -math.log(1e4), -math.log(1e-4)
_SIMULATIONS = 1_000


def fit_temperature(logits: FloatArray, labels: NDArray[np.int64]) -> float | None:
    """Return the temperature with the lowest mean of -log softmax(logits / T)[label]; None if there is none.

    The mean is convex in 1 / T, so its derivative has at most one zero. It has none if every prediction is correct
    (lower is always better), or if the logits are worse than chance (higher is always better).

    Args:
        logits: [N, C], finite.
        labels: [N], class indices.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    own = float(shifted[np.arange(len(labels)), labels].sum())

    def slope(log_inverse: float) -> float:
        """Return the derivative with respect to 1 / T, times N: the expected logits minus the labels'."""
        return float((softmax(shifted * math.exp(log_inverse), axis=1) * shifted).sum()) - own

    if slope(_LOWEST) >= 0 or slope(_HIGHEST) <= 0:
        return None
    return math.exp(-brentq(slope, _LOWEST, _HIGHEST, xtol=1e-9))


def calibrate(logits: FloatArray, labels: NDArray[np.int64]) -> Calibration:
    """Fit a temperature to finite logits [N, C] and labels [N] of validation images, and measure it cross-validated.

    Each of five folds, stratified by correctness, is measured with the temperature fitted on the other four; the
    returned temperature is fitted on all images, none of which the model was trained on.
    """
    images, correct = len(labels), logits.argmax(axis=1) == labels
    if images < MIN_IMAGES:
        return Calibration(images, reason=f"{images} validation images, but at least {MIN_IMAGES} are needed")
    temperature = fit_temperature(logits, labels)
    by_correctness = np.argsort(correct, kind="stable")
    probabilities, nll = np.empty(images), 0.0
    for fold in range(NUM_FOLDS):
        rows = by_correctness[fold::NUM_FOLDS]
        others = np.setdiff1d(by_correctness, rows)
        fitted = fit_temperature(logits[others], labels[others])
        if temperature is None or fitted is None:
            wrong = images - int(correct.sum())
            reason = f"{wrong} of {images:,} validation images are misclassified, too few or too many for a temperature"
            return Calibration(images, reason=reason)
        probabilities[rows], fold_nll = _compute_probabilities(logits[rows], labels[rows], fitted)
        nll += fold_nll * len(rows) / images
    uncalibrated, uncalibrated_nll = _compute_probabilities(logits, labels, 1.0)
    return Calibration(
        images,
        temperature,
        accuracy=float(correct.mean()),
        nll=nll,
        nll_uncalibrated=uncalibrated_nll,
        ece=expected_calibration_error(probabilities, correct),
        ece_uncalibrated=expected_calibration_error(uncalibrated, correct),
        ece_perfect=perfect_calibration_error(probabilities),
    )


@dataclass(frozen=True)
class CalibrationError(Figures):
    """How far the probabilities of N labelled images are from the share of correct predictions."""

    temperature: float
    nll: float  # mean of -log(probability of the label), in nats
    ece: float  # expected calibration error of the predicted class's probability, 0 ... 1
    ece_perfect: float  # see `perfect_calibration_error`
    mean_probability: float  # of the predicted class, 0 ... 1; equals the accuracy if calibrated
    bins: int = NUM_BINS


def measure_calibration(logits: FloatArray, labels: NDArray[np.int64], temperature: float) -> CalibrationError:
    """Measure the calibration of softmax(logits / temperature) for finite logits [N, C], N over 0, and labels [N]."""
    predicted, nll = _compute_probabilities(logits, labels, temperature)
    ece = expected_calibration_error(predicted, logits.argmax(axis=1) == labels)
    return CalibrationError(temperature, nll, ece, perfect_calibration_error(predicted), float(predicted.mean()))


@dataclass(frozen=True)
class CalibrationFigures(Figures):
    """The calibration of a model on the images of an evaluation."""

    images: int
    accuracy: float
    uncalibrated: CalibrationError  # at temperature 1
    calibrated: CalibrationError | None  # at the model's temperature; None if it has none
    # the calibration fitted on these images, for a model without one; None if none was fitted
    fitted: Calibration | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON, without None values."""
        document = {**super().to_dict(), "fitted": None if self.fitted is None else self.fitted.to_dict()}
        return {name: value for name, value in document.items() if value is not None}


def evaluate_calibration(
    logits: FloatArray, labels: NDArray[np.int64], metadata: Metadata, *, fit: bool = False
) -> CalibrationFigures:
    """Measure how well calibrated a model is from its finite logits [N, C] for N images, at least one, and labels [N].

    With `fit` a model without a temperature gets one; it must not have been trained on these images.
    """
    temperature = metadata.temperature
    calibrated = None if temperature is None else measure_calibration(logits, labels, temperature)
    fitted = calibrate(logits, labels) if fit and temperature is None else None
    if fitted is not None and metadata.is_multi_label:
        fitted = Calibration(
            len(labels), reason="each class has a sigmoid of its own, and a temperature is a softmax's"
        )
    accuracy = float((logits.argmax(axis=1) == labels).mean())
    return CalibrationFigures(len(labels), accuracy, measure_calibration(logits, labels, 1.0), calibrated, fitted)


def format_calibration(figures: CalibrationFigures, metadata: Metadata) -> str:
    """Return the calibration of a model as a line."""
    if (error := figures.calibrated) is None:
        why = describe_calibration(metadata.calibration) if figures.fitted is None else figures.fitted.describe()
        return f"calibration: {why}"
    return (
        f"expected calibration error {error.ece:.1%} (perfectly calibrated: {error.ece_perfect:.1%}); mean probability "
        f"{error.mean_probability:.1%}, accuracy {figures.accuracy:.1%} on {figures.images:,} images"
    )


def _compute_probabilities(
    logits: FloatArray, labels: NDArray[np.int64], temperature: float
) -> tuple[DoubleArray, float]:
    """Return the probabilities of the predicted classes, float64 [N], and the mean of -log(p of the label)."""
    best = logits.argmax(axis=1)[:, None]
    predicted = compute_probabilities(logits, best, temperature)[:, 0]
    # log(p of the label) = log(p of the best) minus the logits' difference: no small probability underflows
    gaps = (np.take_along_axis(logits, best, axis=1)[:, 0] - logits[np.arange(len(labels)), labels]).astype(float)
    return predicted, float((gaps / temperature - np.log(predicted)).mean())


def expected_calibration_error(
    probabilities: DoubleArray, correct: NDArray[np.bool_], num_bins: int = NUM_BINS
) -> float:
    """Return the expected calibration error with bins of equal mass, 0 ... 1.

    The N images are sorted by the probability of their predicted class and cut into `num_bins` bins of equal size (the
    last ones may have one image less); ECE = sum over bins of n_b / N * |mean probability - accuracy|.
    Bins of equal mass give the better estimate (Roelofs et al., "Mitigating bias in calibration error estimation",
    AISTATS 2022); neither scikit-learn nor torchmetrics has them.

    Args:
        probabilities: [N].
        correct: bool [N], whether the prediction is the label.
    """
    gaps = (probabilities - correct)[np.argsort(probabilities, kind="stable")]
    first = [rows[0] for rows in np.array_split(np.arange(len(gaps)), min(num_bins, len(gaps)))]
    return float(np.abs(np.add.reduceat(gaps, first)).sum() / len(gaps))


def perfect_calibration_error(probabilities: DoubleArray) -> float:
    """Return the mean `expected_calibration_error` of a perfectly calibrated model with these probabilities.

    Simulates each prediction as correct with its own probability, 1,000 times, from a generator with a fixed seed. The
    result is above 0: the accuracy within a bin of n images deviates by chance.
    """
    ordered, generator = np.sort(probabilities), np.random.default_rng(0)
    draws = (generator.random(len(ordered)) < ordered for _ in range(_SIMULATIONS))
    return float(np.mean([expected_calibration_error(ordered, correct) for correct in draws]))
