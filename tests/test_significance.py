"""The tests of significance against SciPy's."""

import numpy as np
import pytest
from scipy import stats

from opal_deploy.significance import control_false_discoveries, fisher_exact, kolmogorov_smirnov


@pytest.mark.parametrize(("trials", "others"), [(1, 1), (10, 60), (214, 60), (5, 3000), (100_000, 50_000)])
def test_fishers_exact_test_is_that_of_scipy(trials, others):
    random = np.random.default_rng(0)
    for share in (0.0, 0.01, 0.5, 1.0):
        cases, rest = int(random.binomial(trials, share)), int(random.binomial(others, 0.3))
        expected = stats.fisher_exact([[cases, trials - cases], [rest, others - rest]]).pvalue
        assert fisher_exact((cases, trials), (rest, others)) == pytest.approx(expected, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize(("distance", "first", "second"), [(0.2, 60, 200), (0.5, 10, 40), (0.03, 5000, 5000)])
def test_the_asymptotic_test_of_distances_is_near_the_exact_one(distance, first, second):
    exact = stats.kstwo.sf(distance, round(first * second / (first + second)))
    assert kolmogorov_smirnov(distance, first, second) == pytest.approx(exact, rel=0.05)
    assert kolmogorov_smirnov(0.0, first, second) == 1
    assert kolmogorov_smirnov(1.0, first, second) < 1e-4


def test_false_discoveries_are_controlled_as_by_scipy():
    p = np.random.default_rng(0).random(50) ** 3
    assert np.allclose(control_false_discoveries(list(p)), stats.false_discovery_control(p))
