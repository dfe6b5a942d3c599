"""int8: quantise and dequantise nodes, and the images that int8 is calibrated with and judged on."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD
from opal_deploy.errors import UsageError
from opal_deploy.export.builder import EngineTarget, Network
from opal_deploy.export.checkpoint_source import ExportGraph, trace
from opal_deploy.export.images import choose_images
from opal_deploy.export.options import EngineOptions, ExportOptions
from opal_deploy.export.precision import quantised_layers, refinements, to_int8
from opal_deploy.model.checkpoint import build_metadata
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version, load
from opal_deploy.synthetic import example_images
from tests.builders import build_checkpoint, export_onnx


@pytest.fixture(scope="module")
def quantised():
    checkpoint = build_checkpoint("resnet18", size=(64, 64))
    model = trace(ExportGraph(checkpoint.network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    return model, to_int8(model, example_images(16, 64, 64), build_metadata(checkpoint))


class TestGraph:
    def test_weights_and_activations_have_quantise_and_dequantise_nodes(self, quantised):
        before, model = quantised
        assert list(before.graph.input) == list(model.graph.input)
        assert list(before.graph.output) == list(model.graph.output)
        assert model.ir_version == 10
        onnx.checker.check_model(model, full_check=True)
        made_by = {name: node for node in model.graph.node for name in node.output}
        inputs = [
            [made_by[name].op_type if name in made_by else "weight" for name in node.input[:2]]
            for node in model.graph.node
            if node.op_type == "Conv"
        ]
        # all but the first convolution and the projection
        assert inputs.count(["DequantizeLinear", "DequantizeLinear"]) == len(inputs) - 2
        assert inputs[0][1] == inputs[-1][1] == "weight"

    def test_weights_are_scaled_by_channel_and_zero_stays_zero(self, quantised):
        _, model = quantised
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        zero_points = [weights[n.input[2]] for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert zero_points
        assert {point.dtype for point in zero_points} == {np.dtype(np.int8)}
        assert not any(point.any() for point in zero_points)
        scales = [weights[n.input[1]].size for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert {64, 128, 256, 512} <= set(scales)

    @pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")
    def test_tensorrt_builds_it_smaller(self, quantised):
        library, target = load(TENSORRT_RTX, "a test"), EngineTarget(TENSORRT_RTX, "sm80", None, "a test")
        sizes = [
            len(Network(library, model.SerializeToString(), "m").build(target, EngineOptions()).content)
            for model in quantised
        ]
        assert sizes[1] < 0.45 * sizes[0]

    def test_refinements_come_nearer_to_float(self, quantised):
        before, model = quantised
        layers, tried = quantised_layers(model), list(refinements(model))
        assert [text for text, _ in tried] == [
            "19 of 19 layers",
            *(f"{number} of 19 layers, sums in float32" for number in (19, 17, 14, 9)),
        ]
        assert [quantised_layers(graph) for _, graph in tried] == [layers, layers, layers[2:], layers[5:], layers[10:]]
        made_by = {name: node.op_type for node in tried[1][1].graph.node for name in node.output}
        added = [made_by.get(name) for node in tried[1][1].graph.node if node.op_type == "Add" for name in node.input]
        assert added
        assert "DequantizeLinear" not in added
        images = example_images(8, 64, 64)

        def scores(graph: onnx.ModelProto) -> np.ndarray:
            onnx.checker.check_model(graph, full_check=True)
            session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
            return session.run(["scores"], {"images": images})[0]

        reference = scores(before)
        errors = [float(np.abs(scores(graph) - reference).mean()) for _, graph in tried]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.7 * errors[0]


class TestImages:
    def test_too_few_to_calibrate_with_are_refused(self, fp32, write_onnx, tmp_path):
        with pytest.raises(UsageError, match=r"0 readable images to calibrate with .*at least 16 are needed"):
            write_onnx(fp32, tmp_path / "c.onnx", "int8", calibrate=tmp_path)

    @pytest.mark.data
    @pytest.mark.parametrize("way", ["none", "a link", "relative"])
    def test_those_that_judge_are_not_those_that_it_was_calibrated_with_by_any_name(
        self, fp32, cub_mini, tmp_path, monkeypatch, way
    ):
        (tmp_path / "link").symlink_to(cub_mini / "images")
        monkeypatch.chdir(cub_mini / "images")
        judging = {"none": None, "a link": tmp_path / "link", "relative": Path()}[way]
        options = ExportOptions(calibrate=cub_mini / "images", images=judging)
        choice = choose_images(onnx_file.read_metadata(fp32), options, calibrate=True)
        judges, calibration = choice.verification.first(64), choice.calibration
        assert calibration is not None
        assert (len(calibration.names), len(judges.names)) == (128, 64)
        used, judged = ({Path(name).resolve() for name in images.names} for images in (calibration, judges))
        assert not used & judged
        # spread over all classes, not the first of them
        assert len({path.parent for path in judged}) == 10

    @pytest.mark.data
    def test_a_network_that_int8_ruins_is_quantised_less(self, cub_mini, tmp_path):
        checkpoint, path, messages = build_checkpoint("resnet18", size=(64, 64)), tmp_path / "c.int8.onnx", []
        written = export_onnx(checkpoint, path, "int8", calibrate=cub_mini / "images", log=messages.append)
        refused = next(line for line in messages if line.startswith("Refused"))
        assert re.search(r"at least 97 % must.*worst on .*\.jpg, where .* is furthest off", refused)
        assert messages[messages.index(refused) + 1] == "Trying again, quantised: 19 of 19 layers, sums in float32"
        layers = len(quantised_layers(onnx.load(path)))
        assert written.metadata.exporter["quantised"] == f"{layers} of 19 layers, sums in float32"
