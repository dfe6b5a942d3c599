"""Files that resize by themselves: their pixels are Pillow's, and everything else stays as it was."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from PIL import Image

import opal_deploy
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.preprocessing import InputForm, ResizeRule
from opal_deploy.errors import UsageError, VerificationError
from opal_deploy.export import resizing
from opal_deploy.export.resizing import with_resizing
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.preprocess.resize import fit_input
from opal_deploy.synthetic import draw_example
from tests.builders import build_checkpoint, export_onnx

SIZE = (64, 96)


@pytest.mark.parametrize("rule", ["squash", "letterbox"])
@pytest.mark.parametrize("size", [(64, 96), (1, 1), (40, 37), (500, 96), (301, 200), (64, 2000), (3, 2000)])
def test_pixels_are_those_of_the_pipeline(size, rule):
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", *SIZE, 3])
    cast = helper.make_tensor_value_info("cast", TensorProto.FLOAT, ["N", *SIZE, 3])
    graph = helper.make_graph([helper.make_node("Cast", ["images"], ["cast"], to=1)], "cast", [images], [cast])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    changed = with_resizing(model, form := InputForm(*SIZE, ResizeRule(rule)))
    onnx.checker.check_model(changed)
    session = onnxruntime.InferenceSession(changed.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels = np.random.default_rng(0).integers(0, 256, (2, *size, 3), dtype=np.uint8)
    fitted = [fit_input(Image.fromarray(image), Geometry.whole(*size[::-1]), form)[0] for image in pixels]
    (computed,), expected = session.run(None, {"images": pixels}), np.stack(fitted)
    difference = np.abs(computed - expected)
    assert difference.max() <= (0 if size == SIZE else 1)
    assert difference.mean() < 0.2


@pytest.mark.parametrize("rule", ["squash", "letterbox"])
def test_the_file_answers_as_the_one_of_fixed_size_does(tmp_path, rule):
    checkpoint = build_checkpoint(resize=f"{rule}-bilinear")
    fixed, image = tmp_path / "fixed.onnx", tmp_path / "image.onnx"
    export_onnx(checkpoint, fixed)
    exported = export_onnx(checkpoint, image, input="image")
    assert exported.metadata.verification["resizing"]["images"] == 64
    images = [draw_example(number, 130, 211) for number in range(3)]
    records = [opal_deploy.load(path).predict(images) for path in (fixed, image)]
    for before, after in zip(*records, strict=True):
        assert (after.record.prediction, after.record.evidence) == (before.record.prediction, before.record.evidence)
    from_onnx = export_onnx(fixed, tmp_path / "again.fp16.onnx", "fp16", input="image")
    assert (from_onnx.metadata.input_kind, from_onnx.metadata.verification["resizing"]["failures"]) == ("image", [])


def test_a_graph_that_resizes_otherwise_than_the_pipeline_is_not_written(tmp_path, monkeypatch):
    pipeline = resizing.fit_input
    monkeypatch.setattr(resizing, "fit_input", lambda *image: (pipeline(*image)[0][:, ::-1],))
    with pytest.raises(VerificationError, match=r"image\.onnx was not written: resized in the graph, a "):
        export_onnx(build_checkpoint(), tmp_path / "image.onnx", input="image")
    assert not list(tmp_path.iterdir())


def test_what_needs_one_size_says_so(tmp_path):
    path = tmp_path / "image.onnx"
    export_onnx(build_checkpoint(), path, input="image")
    assert onnx_file.read_metadata(path).input_kind == "image"
    with pytest.raises(UsageError, match="any size, Triton of one"):
        opal_deploy.export_triton(path, tmp_path / "models")
    with pytest.raises(UsageError, match="any size, TensorRT of one"):
        opal_deploy.export_engines(path)
    with pytest.raises(UsageError, match="crops"):
        export_onnx(build_checkpoint(resize="shortest_edge-110-bilinear"), tmp_path / "c.onnx", input="image")
    with pytest.raises(UsageError, match="--input image: "):
        opal_deploy.export_engines(path, input="image")
