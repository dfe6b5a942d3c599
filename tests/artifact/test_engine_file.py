"""Sidecars of engines: what is written is read back."""

import json
from dataclasses import replace

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.engine_file import read_sidecar, sidecar_path, write_sidecar
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


def test_keys_of_a_later_version_are_kept_where_the_sidecar_is_written_again(engine, sidecar):
    write_sidecar(engine, replace(sidecar, unknown={"invented": [1]}))
    write_sidecar(engine, replace(read_sidecar(engine), state={"state": "unverified", "why": "moved"}))
    assert json.loads(sidecar_path(engine).read_text("utf-8"))["invented"] == [1]
