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
from opal_deploy.export.api import export_engines
from opal_deploy.export.builder import Network
from opal_deploy.export.checkpoint_source import ExportGraph, trace
from opal_deploy.export.images import choose_images
from opal_deploy.export.int8 import quantised_layers, refinements, to_int8
from opal_deploy.export.options import EngineOptions, ExportOptions
from opal_deploy.model.checkpoint import build_metadata
from opal_deploy.runtime.openvino_session import OpenvinoSession
from opal_deploy.runtime.tensorrt import TENSORRT_RTX
from opal_deploy.synthetic import example_images
from tests.builders import SMALL_BACKBONE, build_checkpoint, export_onnx
from tests.export.conftest import SM80, needs_rtx

IMAGES = example_images(16, 64, 64)


@pytest.fixture(scope="module")
def traced():
    checkpoint = build_checkpoint("resnet18", size=(64, 64))
    model = trace(ExportGraph(checkpoint.network, "uint8", IMAGENET_MEAN, IMAGENET_STD))
    return model, build_metadata(checkpoint)


@pytest.fixture(scope="module")
def quantised(traced):
    model, metadata = traced
    return model, to_int8(model, IMAGES, metadata, threads=1)


@pytest.fixture(scope="module")
def for_engines(traced):
    model, metadata = traced
    return model, to_int8(model, IMAGES, metadata, activations="int8", threads=1)


class TestGraph:
    def test_weights_and_activations_have_quantise_and_dequantise_nodes(self, quantised):
        before, model = quantised
        assert list(before.graph.input) == list(model.graph.input)
        assert list(before.graph.output) == list(model.graph.output)
        assert model.ir_version == 8
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

    def test_engines_get_weights_scaled_by_channel_and_zero_points_of_zero(self, for_engines):
        _, model = for_engines
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        zero_points = [weights[n.input[2]] for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert zero_points
        assert {point.dtype for point in zero_points} == {np.dtype(np.int8)}
        assert not any(point.any() for point in zero_points)
        scales = [weights[n.input[1]].size for n in model.graph.node if n.op_type == "DequantizeLinear"]
        assert {64, 128, 256, 512} <= set(scales)

    @needs_rtx
    def test_tensorrt_builds_it_smaller(self, rtx, for_engines):
        networks = [Network(rtx, model.SerializeToString(), "m") for model in for_engines]
        before, after = (len(network.build(SM80, EngineOptions())) for network in networks)
        assert after < 0.45 * before

    def test_refinements_come_nearer_to_float(self, quantised, traced):
        before, model = quantised
        tried = list(refinements(model, before, IMAGES, traced[1], threads=1))
        assert [text for text, _ in tried] == [
            "19 of 19 layers", "17 of 19 layers",
            *(f"{number} of 19 layers, sums in float32" for number in (17, 14, 9)),
        ]  # fmt: skip
        assert [len(quantised_layers(graph)) for _, graph in tried] == [19, 17, 17, 14, 9]

        def scores(graph: onnx.ModelProto) -> np.ndarray:
            onnx.checker.check_model(graph, full_check=True)
            session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
            return session.run(["scores"], {"images": IMAGES})[0]

        reference = scores(before)
        errors = [float(np.abs(scores(graph) - reference).mean()) for _, graph in tried]
        assert errors[0] > errors[2] > errors[-1]
        assert errors[-1] < 0.7 * errors[0]


class TestImages:
    def test_too_few_to_calibrate_with_are_refused(self, fp32, write_onnx, tmp_path):
        with pytest.raises(UsageError, match=r"0 readable images .*int8 needs 16"):
            write_onnx(fp32, tmp_path / "c.onnx", "int8", calibrate=tmp_path)

    @pytest.mark.data
    def test_those_that_judge_are_not_those_that_it_was_calibrated_with_by_any_name(self, fp32, cub_mini, tmp_path):
        judging = tmp_path / "link"
        judging.symlink_to(cub_mini / "images")
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
    @pytest.mark.slow
    def test_a_network_that_int8_ruins_is_quantised_less(self, cub_mini, tmp_path):
        checkpoint = build_checkpoint("resnet18", size=(64, 64))
        norms = checkpoint.network.named_modules()
        (norm,) = (module for name, module in norms if name.endswith("layer1.0.bn1"))
        # one channel sets the range, and its values leave few steps for the others
        norm.weight.data[0] *= 30
        path, messages = tmp_path / "c.int8.onnx", []
        written = export_onnx(checkpoint, path, "int8", calibrate=cub_mini / "images", log=messages.append)
        refused = next(line for line in messages if line.startswith("Refused"))
        assert re.search(r"at least 97 % must.*worst on .*\.jpg", refused)
        assert messages[messages.index(refused) + 1] == "Trying again, quantised: 17 of 19 layers"
        layers = len(quantised_layers(onnx.load(path)))
        assert layers == 17
        assert written.metadata.exporter["quantised"] == f"{layers} of 19 layers, sums in float32"
        assert written.metadata.int8_activations == "uint8"
        assert path.stat().st_size < 0.4 * export_onnx(checkpoint, tmp_path / "c.onnx").path.stat().st_size

    @pytest.mark.data
    def test_a_file_for_processors_runs_in_openvino_and_is_no_engine(self, cub_mini, tmp_path):
        checkpoint, path = build_checkpoint(SMALL_BACKBONE, size=(64, 64)), tmp_path / "c.int8.onnx"
        export_onnx(checkpoint, path, "int8", calibrate=cub_mini / "images", verify=False)
        with pytest.raises(UsageError, match="uint8 activations"):
            export_engines(path, builder=TENSORRT_RTX, target="sm80")
        # more images than classes: OpenVINO has read constants by the image's place in the batch
        session, images = OpenvinoSession(path, threads=1), example_images(9, 64, 64)
        alone = [session.run(images[number][None]).logits[0] for number in range(9)]
        np.testing.assert_allclose(session.run(images).logits, alone, atol=1e-4)
