"""The table of engines: figures of the gate and of the builder, whatever the gate says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.bench.engines import TABLE_HEADER
from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, installed_version

pytestmark = pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")


@pytest.fixture(scope="module")
def table(opal: Any, exact_model: Path, make_pictures: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pictures")
    make_pictures(folder, 40)
    call = ["bench", "engines", exact_model.with_suffix(".pt"), "--pictures", folder, "--calibrate", folder]
    wanted = ["--precision", "fp32", "--precision", "int8", "--target", "a100", "--target", "l4", "--batch", "1:2:4"]
    return opal(*call, *wanted, "--threads", "1", "--json")


def test_a_row_a_precision_and_an_engine_a_target(table: Any) -> None:
    assert table.returncode == 0, table.stderr
    rows = json.loads(table.stdout)["rows"]
    assert [row["precision"] for row in rows] == ["fp32", "int8"]
    assert [[engine["target"] for engine in row["engines"]] for row in rows] == [["sm80", "sm89"]] * 2
    for row in rows:
        # the rest of the folder went into int8's ranges
        assert row["gate"]["images"] == 14
        for engine in row["engines"]:
            assert engine["seconds"] > 0
            assert engine["megabytes"] > 1
            assert engine["problem"] == ""


def test_the_gates_figures_are_its_own(table: Any) -> None:
    fp32, int8 = (row["gate"] for row in json.loads(table.stdout)["rows"])
    assert fp32["passed"]
    assert fp32["block_cells_different"] == 0
    # a random network that int8 ruins is still built, and the table says what it is worth
    assert int8["max_cosine"] > fp32["max_cosine"]
    assert int8["passed"] is (not int8["failures"])


def test_people_get_a_table_of_which_every_line_is_whole(table: Any) -> None:
    lines = [line for line in table.stderr.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    assert {line.count("|") for line in lines} == {TABLE_HEADER.splitlines()[0].count("|")}


def test_a_precision_that_does_not_exist_is_one_line(opal: Any, tmp_path: Path) -> None:
    done = opal("bench", "engines", "resnet18", "--pictures", tmp_path, "--precision", "fp8")
    assert done.returncode == 2
    assert "--precision 'fp8': expected fp32, fp16, bf16, int8" in done.stderr
