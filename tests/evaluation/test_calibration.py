"""The fit of a temperature and calibration errors, against definitions, torch's minimiser and simulated labels."""

import numpy as np
import pytest
import torch

from opal_deploy.artifact.measurements import Calibration
from opal_deploy.errors import ArtifactError
from opal_deploy.evaluation.calibration import (
    calibrate,
    expected_calibration_error,
    fit_temperature,
    measure_calibration,
    perfect_calibration_error,
)

TRUE_TEMPERATURE = 0.05


def draw(images, classes=5, seed=0):
    """Return logits such as the Euclidean head's and labels drawn with softmax(logits / TRUE_TEMPERATURE)."""
    rng = np.random.default_rng(seed)
    logits = rng.uniform(-1.4, -1.1, (images, classes)).astype(np.float32)
    scaled = logits.astype(np.float64) / TRUE_TEMPERATURE
    return logits, (scaled + rng.gumbel(size=scaled.shape)).argmax(axis=1)


def test_the_temperature_that_drew_the_labels_is_found():
    logits, labels = draw(20_000)
    fitted = fit_temperature(logits, labels)
    assert fitted == pytest.approx(TRUE_TEMPERATURE, rel=0.02)
    # a minimum of the cross-entropy
    logits = torch.from_numpy(logits).double()
    nearby = [
        torch.nn.functional.cross_entropy(logits / (fitted * k), torch.from_numpy(labels)) for k in (0.99, 1, 1.01)
    ]
    assert nearby[1] < min(nearby[0], nearby[2])
    assert measure_calibration(logits.numpy(), labels, fitted).nll == pytest.approx(nearby[1].item(), abs=1e-9)


def test_the_expected_calibration_error_is_the_weighted_gap_of_bins_of_equal_mass():
    probabilities = np.array([0.9, 0.2, 0.8, 0.4, 0.6])
    correct = np.array([True, False, True, True, False])
    # the two bins, sorted: 0.2, 0.4, 0.6 with one right, 0.8 and 0.9 with both
    expected = 3 / 5 * abs(0.4 - 1 / 3) + 2 / 5 * abs(0.85 - 1)
    assert expected_calibration_error(probabilities, correct, num_bins=2) == pytest.approx(expected)
    single = np.abs(probabilities - correct).mean()
    assert expected_calibration_error(probabilities, correct, num_bins=99) == pytest.approx(single)


def test_exact_probabilities_show_only_what_chance_makes_and_wrong_ones_more():
    logits, labels = draw(600, seed=3)
    exact = measure_calibration(logits, labels, TRUE_TEMPERATURE)
    assert exact.ece == pytest.approx(exact.ece_perfect, abs=0.02)
    sharp = measure_calibration(logits, labels, TRUE_TEMPERATURE / 4)
    accuracy = (logits.argmax(axis=1) == labels).mean()
    assert sharp.mean_probability > accuracy + 0.1
    assert sharp.ece > 2 * exact.ece
    # 40 images a bin, the standard deviation of the share of right ones is at most sqrt(0.25 / 40) = 0.08
    assert 0 < perfect_calibration_error(np.full(600, 0.5)) < 0.08


def test_a_calibration_is_measured_on_images_left_out_of_its_fit():
    logits, labels = draw(200, seed=1)
    calibration = calibrate(logits, labels)
    inside = measure_calibration(logits, labels, calibration.temperature)
    assert calibration.temperature == fit_temperature(logits, labels)
    assert calibration.nll > inside.nll
    assert calibration.ece < calibration.ece_uncalibrated
    assert calibration.accuracy == (logits.argmax(axis=1) == labels).mean()
    assert Calibration.from_dict(calibration.to_dict()) == calibration
    assert calibrate(logits, labels) == calibration


@pytest.mark.parametrize(
    ("images", "label", "reason"),
    [
        (49, None, "49 validation images, but at least 50"),
        (80, np.argmax, "0 of 80 validation"),
        (80, np.argmin, "80 of 80 validation"),
    ],
    ids=["too few", "all right", "worse than chance"],
)
def test_no_temperature_is_given_where_none_can_be_told(images, label, reason):
    logits, labels = draw(images)
    calibration = calibrate(logits, labels if label is None else label(logits, axis=1))
    assert calibration.temperature is None
    assert calibration.describe().startswith(f"not calibrated: {reason}")
    assert Calibration.from_dict(calibration.to_dict()) == calibration


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"temperature": None}, {"method": "platt"}, {"ece": True}])
def test_a_damaged_calibration_is_refused(wrong):
    document = {"method": "temperature", "images": 60, "temperature": 0.1, "ece": 0.02, "later": "is ignored"}
    assert Calibration.from_dict(document).temperature == 0.1
    with pytest.raises(ArtifactError, match=next(iter(wrong))):
        Calibration.from_dict({**document, **wrong})
