"""Temperature scaling: fit a temperature, and measure how well calibrated the probabilities are.

The probability of class c is softmax(logits / T)[c] (Guo et al., "On calibration of modern neural networks", ICML
2017). Logits are minus distances, within [-sqrt(2), 0] for the Euclidean head: their softmax is nearly flat at T = 1,
and fitted temperatures are far below 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.measurements import NUM_BINS, NUM_FOLDS, Calibration, describe_calibration
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import DoubleArray, FloatArray, compute_probabilities

MIN_IMAGES = 50
# the temperatures among which the best is sought
_LOWEST, _HIGHEST = 1e-4, 1e4
# images at a time, which bounds the memory with many classes
_ROWS = 4_096
_RESAMPLES = 1_000
_SEED = 0
# values drawn at a time, which bounds the memory with many images
_MAX_DRAWN = 1 << 21


def fit_temperature(logits: FloatArray, labels: NDArray[np.int64]) -> float | None:
    """Return the temperature with the lowest mean of -log softmax(logits / T)[label]; None if there is none.

    The mean is convex in 1 / T, so its derivative has at most one zero. It has none if every prediction is correct
    (lower is always better), or if the logits are worse than chance (higher is always better).

    Args:
        logits: [N, C], finite.
        labels: [N], class indices.
    """
    from scipy.optimize import brentq

    def slope(log_inverse: float) -> float:
        """Return the derivative with respect to 1 / T, times N: the expected logits minus the labels'."""
        inverse, total = math.exp(log_inverse), 0.0
        for first in range(0, len(labels), _ROWS):
            block, block_labels = logits[first : first + _ROWS], labels[first : first + _ROWS]
            shifted = block.astype(np.float64) - block.max(axis=1, keepdims=True)
            weights = np.exp(shifted * inverse)
            expected = np.einsum("nc,nc->n", weights, shifted) / weights.sum(axis=1)
            total += float((expected - shifted[np.arange(len(block)), block_labels]).sum())
        return total

    low, high = -math.log(_HIGHEST), -math.log(_LOWEST)
    if slope(low) >= 0 or slope(high) <= 0:
        return None
    return math.exp(-brentq(slope, low, high, xtol=1e-9))


def calibrate(logits: FloatArray, labels: NDArray[np.int64]) -> Calibration:
    """Fit a temperature on validation images, and measure it by cross-validation.

    Each of five folds, stratified by correctness, is measured with the temperature fitted on the other four; the
    returned temperature is fitted on all images.

    Args:
        logits: [N, C], finite, of images that the model was not trained on.
        labels: [N], class indices.
    """
    images = len(labels)
    if images < MIN_IMAGES:
        return Calibration(images, reason=f"{images} validation images, but at least {MIN_IMAGES} are needed")
    correct = logits.argmax(axis=1) == labels
    folds = np.empty(images, np.int64)
    folds[np.argsort(correct, kind="stable")] = np.arange(images) % NUM_FOLDS
    temperature = fit_temperature(logits, labels)
    fitted = [fit_temperature(logits[folds != fold], labels[folds != fold]) for fold in range(NUM_FOLDS)]
    temperatures = [value for value in fitted if value is not None]
    if temperature is None or len(temperatures) < NUM_FOLDS:
        wrong = images - int(correct.sum())
        few = "too few" if 2 * wrong < images else "too many"
        return Calibration(
            images, reason=f"{wrong} of {images:,} validation images are misclassified, {few} to fit a temperature"
        )
    probabilities = np.empty(images)
    nll = 0.0
    for fold, value in enumerate(temperatures):
        rows = np.flatnonzero(folds == fold)
        measured = _Probabilities.compute(logits[rows], labels[rows], value)
        probabilities[rows] = measured.predicted
        nll += measured.nll * len(rows) / images
    uncalibrated = _Probabilities.compute(logits, labels, 1.0)
    return Calibration(
        images,
        temperature,
        accuracy=float(correct.mean()),
        nll=nll,
        nll_uncalibrated=uncalibrated.nll,
        ece=expected_calibration_error(probabilities, correct),
        ece_uncalibrated=expected_calibration_error(uncalibrated.predicted, correct),
        ece_perfect=perfect_calibration_error(probabilities),
    )


@dataclass(frozen=True)
class CalibrationError:
    """How far the probabilities of N labelled images are from the share of correct predictions.

    Attributes:
        nll: mean of -log(probability of the label), in nats.
        ece: expected calibration error of the predicted class's probability, 0 ... 1.
        low, high: 95 % confidence interval of `ece`, basic bootstrap over images.
        mean_probability: of the predicted class, 0 ... 1; equals the accuracy if calibrated.
    """

    temperature: float
    nll: float
    ece: float
    low: float
    high: float
    ece_perfect: float
    mean_probability: float
    bins: int = NUM_BINS


def measure_calibration(logits: FloatArray, labels: NDArray[np.int64], temperature: float) -> CalibrationError:
    """Measure the calibration of softmax(logits / temperature) on labelled images.

    Args:
        logits: [N, C], N at least 1, finite.
        labels: [N], class indices.
        temperature: over 0.
    """
    measured = _Probabilities.compute(logits, labels, temperature)
    predicted, correct = measured.predicted, logits.argmax(axis=1) == labels
    return CalibrationError(
        temperature,
        measured.nll,
        expected_calibration_error(predicted, correct),
        *calibration_error_interval(predicted, correct),
        perfect_calibration_error(predicted),
        float(predicted.mean()),
    )


@dataclass(frozen=True)
class CalibrationFigures:
    """The calibration of a model on the images of an evaluation.

    Attributes:
        uncalibrated: at temperature 1.
        fitted: the calibration fitted on these images, for a model without one; None if none was fitted.
    """

    images: int
    accuracy: float
    uncalibrated: CalibrationError
    calibrated: CalibrationError | None
    fitted: Calibration | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for JSON, without None values."""
        document = {"images": self.images, "accuracy": self.accuracy, "uncalibrated": asdict(self.uncalibrated)}
        if self.calibrated is not None:
            document["calibrated"] = asdict(self.calibrated)
        return document if self.fitted is None else {**document, "fitted": self.fitted.to_dict()}


def evaluate_calibration(
    logits: FloatArray, labels: NDArray[np.int64], metadata: Metadata, *, fit: bool = False
) -> CalibrationFigures:
    """Measure how well calibrated a model is on labelled images.

    Args:
        logits: [N, C], N at least 1, finite.
        labels: [N], class indices.
        fit: fit a temperature if the model has none; the model must not have been trained on these images.
    """
    temperature = metadata.temperature
    return CalibrationFigures(
        len(labels),
        float((logits.argmax(axis=1) == labels).mean()),
        measure_calibration(logits, labels, 1.0),
        None if temperature is None else measure_calibration(logits, labels, temperature),
        calibrate(logits, labels) if fit and temperature is None else None,
    )


def format_calibration(figures: CalibrationFigures, metadata: Metadata) -> Iterator[str]:
    """Yield the calibration of a model in a line or two."""
    error = figures.calibrated
    if error is None:
        why = describe_calibration(metadata.calibration) if figures.fitted is None else figures.fitted.describe()
        yield f"calibration: {why}"
        return
    yield (
        f"expected calibration error {error.ece:.1%} [{100 * error.low:.1f}, {100 * error.high:.1f}] (perfectly "
        f"calibrated: {error.ece_perfect:.1%}); mean probability {error.mean_probability:.1%}, accuracy "
        f"{figures.accuracy:.1%} on {figures.images:,} images"
    )


@dataclass(frozen=True)
class _Probabilities:
    """The probabilities of the predicted classes, float64 [N], and the mean of -log(probability of the label)."""

    predicted: DoubleArray
    nll: float

    @staticmethod
    def compute(logits: FloatArray, labels: NDArray[np.int64], temperature: float) -> _Probabilities:
        best = logits.argmax(axis=1)[:, None]
        blocks = (slice(first, first + _ROWS) for first in range(0, len(logits), _ROWS))
        predicted = np.concatenate([compute_probabilities(logits[b], best[b], temperature)[:, 0] for b in blocks])
        # log(p of the label) = log(p of the best) minus the logits' difference: no small probability underflows
        gaps = (np.take_along_axis(logits, best, axis=1)[:, 0] - logits[np.arange(len(labels)), labels]).astype(float)
        return _Probabilities(predicted, float((gaps / temperature - np.log(predicted)).mean()))


def expected_calibration_error(
    probabilities: DoubleArray, correct: NDArray[np.bool_], num_bins: int = NUM_BINS
) -> float:
    """Return the expected calibration error with bins of equal mass, 0 ... 1.

    The N images are sorted by the probability of their predicted class and cut into `num_bins` bins of equal size (the
    last ones may have one image less); ECE = sum over bins of n_b / N * |mean probability - accuracy|.
    Bins of equal width (Guo et al.) are nearly empty where most probabilities are high; equal mass is the better
    estimate (Roelofs et al., "Mitigating bias in calibration error estimation", AISTATS 2022).

    Args:
        correct: bool [N], whether the prediction is the label.
    """
    order = np.argsort(probabilities, kind="stable")
    return float(_binned_errors(probabilities[order][None], correct[order][None].astype(np.float64), num_bins)[0])


def calibration_error_interval(
    probabilities: DoubleArray, correct: NDArray[np.bool_], num_bins: int = NUM_BINS, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the confidence interval of `expected_calibration_error` by the basic bootstrap over images.

    A sample's error exceeds the population's by chance, and a resample's exceeds the sample's: the basic bootstrap
    (2 * estimate - quantiles) removes that bias, which percentiles would double. The interval is cut at 0 and widened
    to hold the estimate. The generator's seed is fixed.
    """
    order = np.argsort(probabilities, kind="stable")
    sizes, hits = probabilities[order], correct[order].astype(np.float64)
    generator = np.random.default_rng(_SEED)

    def draw(count: int) -> DoubleArray:
        # sorted positions among sorted probabilities: the resample is sorted too
        rows = np.sort(generator.integers(0, len(sizes), (count, len(sizes))), axis=1)
        return _binned_errors(sizes[rows], hits[rows], num_bins)

    errors = np.concatenate([draw(count) for count in _chunks(len(sizes))])
    estimate = expected_calibration_error(probabilities, correct, num_bins)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(errors, (tail, 100 - tail))
    return max(2 * estimate - float(high), 0.0), max(2 * estimate - float(low), estimate)


def perfect_calibration_error(probabilities: DoubleArray, num_bins: int = NUM_BINS) -> float:
    """Return the mean `expected_calibration_error` of a perfectly calibrated model with these probabilities.

    Simulates each prediction as correct with its own probability, 1,000 times, from a generator with a fixed seed. The
    result is above 0: the accuracy within a bin of n images deviates by chance.
    """
    sizes = np.sort(probabilities)
    generator = np.random.default_rng(_SEED)

    def draw(count: int) -> DoubleArray:
        hits = generator.random((count, len(sizes))) < sizes
        return _binned_errors(np.broadcast_to(sizes, hits.shape), hits, num_bins)

    errors = [draw(count) for count in _chunks(len(sizes))]
    return float(np.concatenate(errors).mean())


def _chunks(images: int) -> list[int]:
    """Return how many resamples to draw at a time."""
    step = max(_MAX_DRAWN // images, 1)
    return [min(step, _RESAMPLES - first) for first in range(0, _RESAMPLES, step)]


def _binned_errors(probabilities: DoubleArray, correct: NDArray[Any], num_bins: int) -> DoubleArray:
    """Return the expected calibration error of each row, [R]; probabilities [R, N] rise along each row."""
    images = probabilities.shape[1]
    bins = min(num_bins, images)
    # as numpy.array_split cuts: the first bins have one image more
    sizes = images // bins + (np.arange(bins) < images % bins)
    gaps = np.add.reduceat(probabilities - correct, np.cumsum(sizes) - sizes, axis=1)
    errors: DoubleArray = np.abs(gaps).sum(axis=1) / images
    return errors
