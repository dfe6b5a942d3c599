"""The OPAL head's arithmetic outside the network."""

import math

import numpy as np
import pytest

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.opal_head import contributions, cosines, embedding

BLOCK = np.array([[0.5, 0.3, 0.1]])
A = 1 / math.sqrt(3)


def test_contributions_add_up_for_the_distances_that_are_sums():
    block = BLOCK, np.array([1]), ClassMap.blocks(2, 3)
    sums = {
        "l2": BLOCK.sum() * A,
        "l1": np.abs(BLOCK - A).sum(),
        "l3": (np.abs(BLOCK - A) ** 3).sum(),
        "kl": (BLOCK * (np.log(BLOCK + 1e-8) - math.log(A + 1e-8))).sum(),
    }
    for distance, expected in sums.items():
        assert float(contributions(*block, distance).sum()) == pytest.approx(expected, abs=1e-12)
    assert contributions(*block, "linf") is contributions(*block, "tropical") is None


def test_a_cosine_is_the_embedding_times_the_anchor():
    scores = np.random.default_rng(0).random((3, 20), np.float32)
    anchors = np.kron(np.eye(4), np.full((1, 5), 1 / np.sqrt(5)))
    wide = scores.astype(np.float64)
    z = wide / (np.linalg.norm(wide, axis=1, keepdims=True) + 0.5)
    np.testing.assert_allclose(embedding(scores, 0.5), z, rtol=1e-14)
    np.testing.assert_allclose(cosines(scores, ClassMap.blocks(4, 5), 0.5), z @ anchors.T, rtol=1e-13)
