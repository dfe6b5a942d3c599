"""`bench pipeline`: three rates over the same pictures, and ratios that follow from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opal_deploy.bench.measure import NOISY, Rate, machine
from opal_deploy.bench.pipeline import measure
from opal_deploy.errors import UsageError
from opal_deploy.pipeline.discover import Item
from opal_deploy.pipeline.engine import EngineOptions
from opal_deploy.runtime.onnx_session import OnnxSession


@pytest.fixture
def items(tmp_path: Path, make_pictures) -> list[Item]:  # type: ignore[no-untyped-def]
    return [Item(path, path.name) for path in make_pictures(tmp_path / "pictures", 12)]


def test_the_three_are_measured_as_often_as_asked(exact_model: Path, items: list[Item]) -> None:
    session = OnnxSession(exact_model, threads=1)

    result = measure(session, items, EngineOptions(batch=4, workers=1), repeats=2, say=lambda _: None)

    assert [len(rate.repeats) for rate in (result.bare, result.plain, result.overlays)] == [2, 2, 2]


def test_ratios_are_of_the_medians(exact_model: Path, items: list[Item]) -> None:
    session = OnnxSession(exact_model, threads=1)

    document = measure(session, items, EngineOptions(batch=4, workers=1), repeats=1, say=lambda _: None).to_dict()

    bare, plain, overlays = (rate["median"] for rate in document["rates"])
    assert document["ratio_without_overlays"] == plain / bare
    assert document["ratio_with_overlays"] == overlays / bare
    json.dumps(document)


def test_fewer_pictures_than_a_batch_are_refused(exact_model: Path, items: list[Item]) -> None:
    with pytest.raises(UsageError, match="12 usable pictures"):
        measure(OnnxSession(exact_model), items, EngineOptions(batch=16), repeats=1, say=lambda _: None)


def test_spread_is_relative_to_the_median() -> None:
    rate = Rate("x", (90.0, 100.0, 120.0))

    assert rate.median == 100.0
    assert rate.spread == pytest.approx(0.3)


@pytest.mark.parametrize(("repeats", "marked"), [((100.0, 104.0), False), ((100.0, 130.0), True)])
def test_a_noisy_measurement_says_so(repeats: tuple[float, ...], marked: bool) -> None:
    rate = Rate("x", repeats)

    assert (rate.spread > NOISY) is marked
    assert ("NOISY" in rate.line()) is marked
    assert rate.to_dict()["noisy"] is marked


def test_the_machine_is_recorded_with_what_the_figures_depend_on() -> None:
    found = machine()

    assert found["usable_cores"] >= 1
    assert {"numpy", "pillow"} <= found["versions"].keys()
