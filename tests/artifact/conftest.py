"""One real export of a tiny network."""

from dataclasses import replace

import pytest

from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.files import ExportTargets
from opal_deploy.export.options import ExportOptions
from tests.builders import build_checkpoint

# the second spells the marker that the digest is found by
CLASS_NAMES = ["Sooty Albatross", 'a "file_sha256": "' + "0" * 64, "Äuklet \u2603", "<b>"]


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    checkpoint, out = (
        replace(build_checkpoint(), class_names=CLASS_NAMES),
        tmp_path_factory.mktemp("exported") / "c.onnx",
    )
    export(CheckpointSource(checkpoint, out), ExportTargets({"fp32": out}), ExportOptions(threads=2))
    return out
