"""One real export of a tiny network."""

from dataclasses import replace

import pytest

from tests.builders import build_checkpoint, export_onnx

# the second spells the marker that the digest is found by
CLASS_NAMES = ["Sooty Albatross", 'a "file_sha256": "' + "0" * 64, "Äuklet \u2603", "<b>"]


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    checkpoint = replace(build_checkpoint(), class_names=CLASS_NAMES)
    return export_onnx(checkpoint, tmp_path_factory.mktemp("exported") / "c.onnx").path
