"""The OPAL head's arithmetic outside the network."""

import math

import numpy as np
import pytest

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.opal_head import contributions

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
