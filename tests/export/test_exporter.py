"""What an export writes from a checkpoint or one of our files, what it refuses, and that failures leave nothing."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto

from opal_deploy.artifact import onnx_file
from opal_deploy.errors import UsageError
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.plan import plan_export
from opal_deploy.model.config import PLAIN_CLASSIFIER
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_test_vectors
from tests.builders import SMALL_BACKBONE, build_checkpoint


@pytest.fixture(scope="module")
def fp16(fp32, write_onnx, tmp_path_factory):
    return write_onnx(fp32, tmp_path_factory.mktemp("fp16") / "c.fp16.onnx", "fp16").path


class TestFromOnnx:
    def test_fp16_reproduces_the_test_vectors_and_says_against_what_it_was_verified(self, fp16, fp32):
        metadata, source = onnx_file.read_metadata(fp16), onnx_file.read_metadata(fp32)
        assert (metadata.precision, source.precision) == ("fp16", "fp32")
        report = metadata.verification
        assert report["reference"].startswith("c.onnx in ONNX Runtime")
        assert report["candidate"].endswith("fp16 emulated: rounded after every operation")
        assert report["worst_image"].startswith("creature ")
        assert 1e-6 < report["max_cosine"] < 2e-2
        assert metadata.test_vectors == source.test_vectors
        assert metadata.source == source.source
        assert verify_test_vectors(OnnxSession(fp16, device="cpu", threads=2), "c.fp16.onnx")

    @pytest.mark.parametrize(
        ("source", "precision", "options", "message"),
        [
            ("fp32", "fp32", {}, "already fp32"),
            ("fp32", "fp16", {"outputs": "attention"}, "fixed"),
            ("fp32", "fp16", {"input": "float32"}, "fixed"),
            ("fp32", "int8", {}, "--calibrate"),
            ("fp16", "fp32", {}, "already fp16"),
        ],
    )
    def test_what_a_file_cannot_become_is_refused(
        self, request, write_onnx, tmp_path, source, precision, options, message
    ):
        with pytest.raises(UsageError, match=message):
            write_onnx(request.getfixturevalue(source), tmp_path / "x.onnx", precision, **options)
        assert list(tmp_path.iterdir()) == []


class TestFromACheckpoint:
    def test_its_body_is_cast_and_verified_against_pytorch(self, write_onnx, tmp_path):
        done = write_onnx(build_checkpoint(seed=8), tmp_path / "c.onnx", "fp16", input="float32")
        assert done.metadata.verification["reference"].startswith("PyTorch")
        weights = {t.data_type for t in onnx.load(done.path).graph.initializer if "body" in t.name}
        assert weights == {TensorProto.FLOAT16}

    def test_a_networks_own_classifier_exports_in_every_precision_that_runs_here(self, write_onnx, tmp_path):
        checkpoint = build_checkpoint(SMALL_BACKBONE, PLAIN_CLASSIFIER, (64, 64), sharp=False)
        done = write_onnx(checkpoint, tmp_path / "c.onnx")
        assert (done.metadata.outputs, done.metadata.evidence) == (("logits",), "none")
        half = write_onnx(done.path, tmp_path / "c.fp16.onnx", "fp16")
        weights = {t.name: t.data_type for t in onnx.load(half.path).graph.initializer if t.name.endswith("weight")}
        assert {kind for name, kind in weights.items() if "classifier" in name} == {TensorProto.FLOAT}
        assert {kind for name, kind in weights.items() if "classifier" not in name} == {TensorProto.FLOAT16}


def test_a_checkpoint_that_is_named_like_a_precision_is_refused():
    with pytest.raises(UsageError, match="ends like a precision"):
        plan_export(CheckpointSource(build_checkpoint(), Path("c.fp16.pt")), ExportOptions())


def test_too_few_images_to_verify_on_are_refused(fp32, write_onnx, make_pictures, tmp_path):
    make_pictures(tmp_path / "images", 9)
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match="9 readable images; at least 10"):
        write_onnx(fp32, tmp_path / "c.fp16.onnx", "fp16", images=tmp_path / "images")
