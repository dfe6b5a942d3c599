"""The table of engines: figures of the verification and of the builder, whether or not the graph passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.bench.engines import TABLE_HEADER
from opal_deploy.runtime.tensorrt.bindings import TENSORRT_RTX, installed_version

pytestmark = pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")


def test_a_row_a_precision_and_an_engine_a_target(
    opal: Any, exact_model: Path, make_pictures: Any, tmp_path: Path
) -> None:
    make_pictures(tmp_path, 40)
    call = ["bench", "engines", exact_model.with_suffix(".pt"), "--pictures", tmp_path, "--calibrate", tmp_path]
    done = opal(*call, "--precision", "fp32", "--precision", "int8", "--target", "l4", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["precision"] for row in rows] == ["fp32", "int8"]
    for row in rows:
        (engine,) = row["engines"]
        # the rest of the folder went into int8's ranges
        assert (row["gate"]["images"], engine["target"], engine["problem"]) == (14, "sm89", "")
        assert engine["seconds"] > 0
        assert engine["megabytes"] > 1
    fp32, int8 = (row["gate"] for row in rows)
    assert fp32["passed"]
    assert fp32["block_cells_different"] == 0
    # a random network that int8 ruins is still built, and the table shows it
    assert int8["max_cosine"] > fp32["max_cosine"]
    assert int8["passed"] is (not int8["failures"])
    lines = [line for line in done.stderr.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2
    assert {line.count("|") for line in lines} == {TABLE_HEADER.splitlines()[0].count("|")}


def test_an_unknown_precision_is_refused(opal: Any, tmp_path: Path) -> None:
    done = opal("bench", "engines", "resnet18", "--pictures", tmp_path, "--precision", "fp8")
    assert done.returncode == 2
    assert "--precision 'fp8': expected fp32, fp16, bf16, int8" in done.stderr
