"""Sidecars of engines: what is written is read back, and what is no sidecar of ours is refused in one line."""

import json
from dataclasses import replace

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import read_sidecar, sidecar_path, write_sidecar
from opal_deploy.errors import ArtifactError
from tests.builders import build_sidecar


@pytest.fixture
def engine(tmp_path):
    path = tmp_path / "c.engine"
    path.write_bytes(b"a plan")
    return path


@pytest.fixture
def sidecar(exported, engine):
    options = {"batch": [1, 2, 4]}
    return build_sidecar(engine, onnx_file.read_metadata(exported), options=options)


def test_it_is_read_back_and_names_the_command_that_builds_the_engine_again(engine, sidecar):
    write_sidecar(engine, sidecar)
    assert read_sidecar(engine) == sidecar
    command = f"export {engine.with_name('c.onnx')} --trt --rebuild --batch 1:2:4"
    assert sidecar.rebuild_command(engine) == f"opal-deploy {command}"


@pytest.mark.parametrize(
    "change",
    [{"built": {}}, {"state": {"state": "verified"}}, {"onnx": {"file": "c.onnx"}}, {"target": []}, {"engine": None},
     {"options": {"batch": "abc"}}, {"options": {"batch": [1, 2]}}, {"options": {"batch": [0, 1, 2]}},
     {"target": {"sm": "sm80", "gpu": float("nan")}}, {"key": json.loads("[" * 40 + "]" * 40)}],
    ids=str,
)  # fmt: skip
def test_parts_that_are_missing_or_wrong_are_one_line(engine, sidecar, change):
    write_sidecar(engine, replace(sidecar, **change))
    with pytest.raises(ArtifactError, match=r"of wrong type or missing|nested|not JSON compliant") as error:
        read_sidecar(engine)
    assert "\n" not in str(error.value)


def test_keys_of_a_later_version_are_kept_where_the_sidecar_is_written_again(engine, sidecar):
    write_sidecar(engine, replace(sidecar, unknown={"invented": [1]}))
    write_sidecar(engine, replace(read_sidecar(engine), state={"state": "unverified", "why": "moved"}))
    assert json.loads(sidecar_path(engine).read_text("utf-8"))["invented"] == [1]
