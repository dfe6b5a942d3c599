"""A tiny network as a checkpoint and as the files exported from it; another one."""

from types import SimpleNamespace

import pytest

from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.files import ExportTargets
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import ExportOptions
from tests.builders import build_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    checkpoint, out = build_checkpoint(), tmp_path_factory.mktemp("tiny") / "c.onnx"
    export(CheckpointSource(checkpoint, out), ExportTargets({"fp32": out}), ExportOptions(threads=2))
    return SimpleNamespace(checkpoint=checkpoint, path=out)


@pytest.fixture(scope="session")
def tiny_fp16(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("tiny16") / "c.fp16.onnx"
    export(OnnxSource(tiny.path), ExportTargets({"fp16": out}), ExportOptions(threads=2))
    return out


@pytest.fixture(scope="session")
def another(tmp_path_factory):
    out = tmp_path_factory.mktemp("another") / "other.onnx"
    export(CheckpointSource(build_checkpoint(seed=1), out), ExportTargets({"fp32": out}), ExportOptions(threads=2))
    return out
