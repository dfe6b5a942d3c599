"""Rates as options have them."""

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.options import parse_rate


@pytest.mark.parametrize(("text", "rate"), [("5%", 0.05), (" 0.5 %", 0.005), ("99%", 0.99)])
def test_rates_are_percentages(text, rate):
    assert parse_rate("--x", text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["5", "0.05", "0%", "100%", "-1%", "nan%", "many%", "%", ""])
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(UsageError, match=r"--x .*expected a percentage between 0 and 100, such as 5%"):
        parse_rate("--x", text)
