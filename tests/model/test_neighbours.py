"""The OOD score of features against its definition, computed with a whitening matrix."""

import math

import numpy as np
import pytest
import torch

from opal_deploy.model.neighbours import NUM_NEAREST, Neighbours

D, CLASSES, M = 96, 4, 120


def draw(images, seed=0, spread=1.0):
    """Return features [N, D] around the means of four classes, with more spread in some directions, and labels."""
    rng = np.random.default_rng(seed)
    means = np.random.default_rng(99).normal(size=(CLASSES, D))
    labels = rng.integers(0, CLASSES, images)
    features = means[labels] + spread * rng.normal(size=(images, D)) * np.geomspace(3, 0.1, D)
    return torch.from_numpy(features), torch.from_numpy(labels)


def compute(training, labels, features, background=None):
    """Return the OOD score, [N], with a matrix [D, D]: 64 measured directions, equal variance in the others."""
    training, labels, features = (tensor.numpy() for tensor in (training, labels, features))
    within = training - np.stack([training[labels == label].mean(0) for label in range(CLASSES)])[labels]
    variances, directions = np.linalg.eigh(within.T @ within / len(within))
    mean_variance = variances.mean()
    variances[:-64] = variances[:-64].mean()
    # shrunk half way towards the mean variance; the factor does not matter
    whitening = directions / np.sqrt(variances + mean_variance)
    asked = (features - training.mean(0)) @ whitening

    def similarity(images):
        bank = (images - training.mean(0)) @ whitening
        cosines = (asked / np.linalg.norm(asked, axis=1)[:, None]) @ (bank / np.linalg.norm(bank, axis=1)[:, None]).T
        return np.sort(cosines, axis=1)[:, -NUM_NEAREST:].mean(1)

    known = similarity(training)
    return 1 - known + (0 if background is None else 2 * np.maximum(similarity(background.numpy()) - known, 0))


def as_map(features, cells=(2, 3)):
    """Return a feature map [N, D, H, W], float64, whose mean over cells is `features`."""
    noise = torch.randn(*features.shape, *cells, dtype=torch.float64)
    return features[:, :, None, None] + noise - noise.mean((2, 3), keepdim=True)


def test_the_ood_score_is_one_minus_the_mean_whitened_cosine_to_the_five_nearest():
    torch.manual_seed(0)
    training, labels = draw(M)
    near, far = draw(20, seed=1)[0], 4 * torch.randn(20, D, dtype=torch.float64)
    features = torch.cat([near, far])
    neighbours = Neighbours.fit(training, labels)
    ood_score = neighbours(as_map(features).float())
    expected = compute(training, labels, features)
    assert ood_score.dtype == torch.float32
    np.testing.assert_allclose(ood_score, expected, atol=2e-5)
    # no rounding that grows with the length of the features
    np.testing.assert_allclose(neighbours.double()(as_map(features)), expected, atol=1e-6)
    assert ood_score[:20].max() < ood_score[20:].min()


def test_images_nearer_to_the_background_score_higher_and_others_stay():
    training, labels = draw(M)
    background, asked = draw(30, seed=1)[0] + 2, torch.cat([draw(30, seed=2)[0] + 2, draw(30, seed=3)[0]])
    neighbours = Neighbours.fit(training, labels, background)
    ood_score = neighbours(as_map(asked).float())
    np.testing.assert_allclose(ood_score, compute(training, labels, asked, background), atol=5e-5)
    without = Neighbours.fit(training, labels)(as_map(asked).float())
    assert (ood_score[:30] > without[:30]).all()
    torch.testing.assert_close(ood_score[30:], without[30:], atol=1e-5, rtol=0)


def test_fewer_images_than_features_are_enough():
    training, labels = draw(12)
    expected = compute(training, labels, training)
    np.testing.assert_allclose(Neighbours.fit(training, labels)(as_map(training).float()), expected, atol=2e-5)


@pytest.mark.parametrize("features", [draw(NUM_NEAREST - 1)[0], torch.zeros(20, D)], ids=["too few", "dead features"])
def test_without_a_spread_there_are_no_neighbours(features):
    assert Neighbours.fit(features, torch.zeros(len(features), dtype=torch.int64)) is None


def test_a_checkpoint_gives_back_what_it_was_given_and_nothing_else():
    neighbours = Neighbours.fit(*draw(M), draw(7)[0])
    tensors = neighbours.to_dict()
    read = Neighbours.from_dict(tensors, D, CLASSES)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.to_dict().items())
    assert Neighbours.from_dict({}, D, CLASSES) is None
    # earlier versions kept no background images
    del tensors["background"]
    early = Neighbours.from_dict(tensors, D, CLASSES)
    assert (early.num_background, torch.equal(early.bank, neighbours.bank)) == (0, True)
    tensors = neighbours.to_dict()
    with pytest.raises(ValueError, match="shapes"):
        Neighbours.from_dict(tensors, D + 1, CLASSES)
    # five images of each of many classes
    assert Neighbours.from_dict({**tensors, "bank": torch.zeros(D, 5_000)}, D, 1_000) is not None
    with pytest.raises(ValueError, match="finite"):
        Neighbours.from_dict({**tensors, "bank": tensors["bank"] * math.nan}, D, CLASSES)
