"""The OPAL head's arithmetic outside the network."""

import math

import numpy as np
import pytest

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.opal_head import contributions

BLOCK = np.array([[0.5, 0.3, 0.1]])
A = 1 / math.sqrt(3)


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        ("l2", BLOCK.sum() * A),
        ("l1", sum(abs(b - A) for b in BLOCK[0])),
        ("l3", sum(abs(b - A) ** 3 for b in BLOCK[0])),
        ("kl", sum(b * (math.log(b + 1e-8) - math.log(A + 1e-8)) for b in BLOCK[0])),
    ],
)
def test_contributions_add_up_for_the_distances_that_are_sums(distance, expected):
    given = BLOCK, np.array([1]), ClassMap.blocks(2, 3)
    assert float(contributions(*given, distance).sum()) == pytest.approx(expected, abs=1e-12)
    assert contributions(*given, "linf") is contributions(*given, "tropical") is None
