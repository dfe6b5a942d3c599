"""Part purity by hand; consistency, stability and purity of a perfect detector, a network and its export."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.networks import update_batch_norms
from opal_deploy.datasets import cub
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.evaluation.api import evaluate_model
from opal_deploy.evaluation.parts import TOP, PartMeter, patch_boxes, purity_by_channel
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.files import plan_targets
from opal_deploy.export.options import ExportOptions
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.synthetic import example_images
from tests.datasets.layouts import write_lines

M = 3
GRID = (7, 7)
FIGURES = ("prototype_consistency", "prototype_stability", "part_purity")
PARTS = (
    "back", "beak", "belly", "breast", "crown", "forehead", "left eye", "left leg", "left wing", "nape", "right eye",
    "right leg", "right wing", "tail", "throat",
)  # fmt: skip


# purity by hand


def test_patches_are_cells_on_the_papers_grid_and_overlap_on_finer_ones():
    expected = [[0, 0, 32, 32], [64, 32, 96, 64], [192, 192, 224, 224]]
    assert patch_boxes(np.array([0, 9, 48]), GRID).tolist() == expected
    # round(192 / 27) = 7 pixels a step; 27 steps are 189, and the last patch ends at 224 all the same
    finer = patch_boxes(np.array([1 * 28 + 26, 27 * 28 + 27]), (28, 28))
    assert finer.tolist() == [[182, 7, 214, 39], [192, 192, 224, 224]]
    assert patch_boxes(np.array([0]), (1, 1)).tolist() == [[192, 192, 224, 224]]


IN, OUT = (5.0, 5.0), (-9.0, -9.0)
EYES = ("left eye", "right eye")


@pytest.mark.parametrize(
    ("points", "visible", "names", "scores", "cells", "expected"),
    [
        ([[(0.0, 0.0)]], True, ("beak",), None, None, 1.0),
        ([[(32.0, 32.0)]], True, ("beak",), None, None, 1.0),
        ([[(32.01, 0.0)]], True, ("beak",), None, None, 0.0),
        ([[(0.0, -0.01)]], True, ("beak",), None, None, 0.0),
        # beak: 2 of 4; tail: 2 of 3, being invisible on the last image
        (
            [[IN, OUT], [OUT, IN], [IN, IN], [OUT, IN]], [[True, True]] * 3 + [[True, False]], ("beak", "tail"),
            None, None, 2 / 3,
        ),
        ([[IN]] * 3, False, ("beak",), None, None, 0.0),
        ([[OUT]] * 5 + [[IN]] * TOP, True, ("beak",), [0.1] * 5 + [0.9] * TOP, None, 1.0),
        ([[IN]] * TOP + [[OUT]] * 5, True, ("beak",), None, None, 1.0),
        ([[OUT]] * 5 + [[IN]] * TOP, True, ("beak",), None, None, 0.5),
        ([[(100.0, 40.0)], [(40.0, 100.0)]], True, ("beak",), None, [1 * 7 + 3, 3 * 7 + 1], 1.0),
        ([[(100.0, 40.0)], [(40.0, 100.0)]], True, ("beak",), None, [3 * 7 + 1, 1 * 7 + 3], 0.0),
        ([[IN, OUT], [OUT, IN]], True, EYES, None, None, 1.0),
        ([[IN, OUT], [OUT, IN]], True, ("left eye", "right leg"), None, None, 0.5),
        # the left eye's patch holds it, but it is hidden; the right one is visible elsewhere
        ([[IN, OUT]], [[False, True]], EYES, None, None, 0.0),
    ],
    ids=[
        "corner", "edge inside", "beyond the edge", "before the edge", "share where visible", "never visible",
        "highest scores", "equal scores", "equal scores, others first", "own cell", "another cell", "sides merge",
        "other parts do not", "hidden side",
    ],
)  # fmt: skip
def test_purity(points, visible, names, scores, cells, expected):
    where = np.array(points)
    purity = purity_by_channel(
        np.array(scores or [1.0] * len(points), np.float32)[:, None],
        np.array(cells or [0] * len(points), np.int32)[:, None],
        GRID,
        where,
        np.broadcast_to(np.array(visible), where.shape[:2]),
        names,
    )
    assert purity.tolist() == pytest.approx([expected])


# whole models


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    """CUB's layout: six classes of five training and two test images of noise, fifteen parts each."""
    root = tmp_path_factory.mktemp("birds")
    rng = np.random.default_rng(0)
    classes = [f"{number:03}.Bird" for number in range(1, 7)]
    names = [f"{name}/{number}.png" for name in classes for number in range(7)]
    locations = []
    for image, name in enumerate(names, 1):
        pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8).repeat(10, axis=0).repeat(10, axis=1)
        (root / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / "images" / name)
        for part in range(1, len(PARTS) + 1):
            x, y, visible = rng.integers(5, 65), rng.integers(10, 55), rng.integers(0, 4) > 0
            locations.append(f"{image} {part} {x}.0 {y}.0 1" if visible else f"{image} {part} 0.0 0.0 0")
    tables = {
        "images.txt": [f"{image} {name}" for image, name in enumerate(names, 1)],
        "image_class_labels.txt": [f"{image} {1 + (image - 1) // 7}" for image in range(1, 43)],
        "train_test_split.txt": [f"{image} {int((image - 1) % 7 < 5)}" for image in range(1, 43)],
        "bounding_boxes.txt": [f"{image} 5.0 10.0 60.0 45.0" for image in range(1, 43)],
        "classes.txt": [f"{label} {name}" for label, name in enumerate(classes, 1)],
        "parts/parts.txt": [f"{part} {name}" for part, name in enumerate(PARTS, 1)],
        "parts/part_locs.txt": locations,
    }
    for table, lines in tables.items():
        write_lines(root / table, lines)
    return root


@pytest.fixture(scope="module")
def data(birds):
    return read_dataset(birds)


def _network(num_classes, head):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", num_classes, (224, 224), head))
    update_batch_norms(network, example_images(4, 224, 224))
    return network


@pytest.fixture(scope="module")
def network(data):
    return _network(data.num_classes, HeadConfig(prototypes_per_class=M))


@pytest.fixture(scope="module")
def checkpoint(data, network, tmp_path_factory):
    path = tmp_path_factory.mktemp("parts") / "birds.pt"
    checkpoints.save(path, Checkpoint(network, data.class_names))
    return path


@pytest.fixture(scope="module")
def exported(checkpoint):
    """With all that the figures need; the comparison with PyTorch is what the tests make."""
    options = ExportOptions(threads=1, outputs="attention", input="float32", verify=False)
    source = CheckpointSource(checkpoints.load(checkpoint), checkpoint)
    return OnnxSession(export(source, plan_targets(source), options).onnx[0].path, threads=1)


def _measure(session, data, **options):
    parts = cub.read_parts(data.root, data.test)
    return evaluate_session(session, data.test, parts=parts, **options)


def _session(network, data):
    return TorchSession(Checkpoint(network, data.class_names), device="cpu", threads=1)


def _metadata(num_classes=6):
    names = tuple(str(number) for number in range(num_classes))
    return Metadata(names, M, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", GRID, (224, 224))


class _Detector:
    """Channel k of a 7 x 7 map shines where part `k % m` is, whatever the noise."""

    metadata, device, description = _metadata(), "cpu", "a rule"

    def __init__(self, parts, num_classes):
        cells = np.clip(parts.truncated_input_points(224)[:, :M] // 32, 0, 6)  # [N, m, (x, y)]
        self._attention = np.zeros((len(cells), num_classes * M, 7, 7), np.float32)
        for image, slots in enumerate(cells):
            for slot, (x, y) in enumerate(slots):
                self._attention[image, slot::M, y, x] = 1.0
        self._clean = self._noisy = 0

    def run(self, images):
        return self.run_with_attention(images)

    def run_with_attention(self, images):
        self._clean += len(images)
        return self._outputs(self._clean - len(images), self._clean)

    def run_normalised(self, images):
        self._noisy += len(images)
        return self._outputs(self._noisy - len(images), self._noisy)

    def _outputs(self, start, stop):
        attention = self._attention[start:stop]
        cells = attention.reshape(*attention.shape[:2], -1)
        argmax = cells.argmax(2).astype(np.int32)
        return Outputs(np.zeros((stop - start, 6), np.float32), argmax, cells.max(2), attention)


def test_a_perfect_detector_scores_a_hundred():
    rng = np.random.default_rng(0)
    names = ("beak", "tail", "back", "throat")
    points = rng.integers(0, 200, (40, 4, 2)).astype(np.float64)
    visible = rng.random((40, 4)) < 0.7
    parts = PartLocations(names, points, visible, np.tile([0.0, 0.0, 200.0, 200.0], (40, 1)))
    labels = np.arange(40) % 6
    detector = _Detector(parts, num_classes=6)
    meter = PartMeter(detector, parts, labels)
    scores, cells = [], []
    for first in range(0, 40, 16):
        pixels = np.zeros((min(16, 40 - first), 224, 224, 3), np.uint8)
        outputs = detector.run(pixels)
        meter.add(first, pixels, outputs)
        scores.append(outputs.scores)
        cells.append(outputs.argmax)

    seen = [Geometry.whole(200, 200)] * 40
    figures = meter.figures(np.concatenate(scores), np.concatenate(cells), seen)

    assert (figures.consistency, figures.stability, figures.purity, figures.purity_std) == (100.0, 100.0, 100.0, 0.0)
    assert (figures.prototypes, figures.images) == (18, 40)
    # the same boxes on images of 100 x 200 pixels: the model sees the left half of each, twice as wide
    clipped = meter.figures(np.concatenate(scores), np.concatenate(cells), [Geometry.whole(100, 200)] * 40)
    assert replace(clipped, purity=100.0, purity_std=0.0) == figures
    assert clipped.purity < 100.0


def test_checkpoint_and_export_agree(data, checkpoint, exported):
    reference = _measure(TorchSession(checkpoint, device="cpu", threads=1), data)
    deployed = _measure(exported, data)

    assert deployed.parts == reference.parts
    assert deployed.outputs.attention is None
    assert deployed.evaluation.accuracy == reference.evaluation.accuracy
    assert reference.parts.unavailable == {}
    # otherwise the agreement would be one of nothing with nothing
    assert 0.0 < reference.parts.consistency < 100.0
    assert reference.parts.purity > 0.0


def test_the_batch_changes_nothing_and_the_seed_only_the_noise(data, network):
    session = _session(network, data)
    figures = _measure(session, data, batch=32).parts
    assert _measure(session, data, batch=5).parts == figures
    other = _measure(session, data, seed=1).parts
    assert replace(other, stability=figures.stability) == figures


def test_average_pooling_has_maps_to_measure(data):
    network = _network(data.num_classes, HeadConfig(prototypes_per_class=M, pooling="avg", cws=False))
    figures = _measure(_session(network, data), data).parts
    assert figures.unavailable == {}
    assert None not in (figures.consistency, figures.stability, figures.purity)


AGAIN = (
    "evaluate birds.pt itself, or a file that has them: "
    "opal-deploy export birds.pt --out birds.attention.onnx --outputs attention"
)
NO_PROTOTYPES = "the model has no prototypes (evidence none); only models with anchors have"
OTHER_SIZE = "its input is 224x448, but the protocol's regions are defined on 224x224; train it with --size 224"
NO_FLOAT = f"no float32 input, which noise is added to; {AGAIN} --input float32"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            {"outputs": ("logits", "argmax", "scores"), "input_kind": "uint8"},
            {FIGURES[0]: f"the model has no output attention; {AGAIN}",
             FIGURES[1]: f"the model has no output attention and {NO_FLOAT}"},
        ),
        ({"input_kind": "uint8"}, {FIGURES[1]: f"the model has {NO_FLOAT}"}),
        ({"evidence": "none"}, dict.fromkeys(FIGURES, NO_PROTOTYPES)),
        ({"input_size": (224, 448)}, dict.fromkeys(FIGURES, OTHER_SIZE)),
    ],
    ids=["no attention", "normalised in the graph", "no prototypes", "another size"],
)  # fmt: skip
def test_a_figure_that_cannot_be_measured_has_a_reason(data, exported, changes, reasons):
    metadata = replace(exported.metadata, **changes)
    session = SimpleNamespace(metadata=metadata, run=exported.run, run_normalised=exported.run_normalised)
    assert PartMeter(session, cub.read_parts(data.root, data.test), np.zeros(12, np.int64)).unavailable == reasons


def test_what_can_be_measured_is_measured_all_the_same(data, exported):
    parts = _measure(exported, data, boxes=False).parts
    assert (parts.consistency, parts.stability, parts.purity) == (None, None, None)
    assert set(parts.unavailable.values()) == {"the protocol crops to the boxes; leave --no-boxes out"}
    metadata = replace(exported.metadata, input_kind="uint8")
    parts = _measure(SimpleNamespace(metadata=metadata, run=exported.run, description=""), data).parts
    assert parts == replace(_measure(exported, data).parts, stability=None, unavailable=parts.unavailable)
    assert parts.to_dict()["prototype_stability"] is None
    assert list(parts.to_dict()["unavailable"]) == ["prototype_stability"]


def test_the_function_gives_the_same_figures_as_shares(birds, data, checkpoint):
    options = {"device": "cpu", "threads": 1, "log": lambda line: None}
    document = evaluate_model(checkpoint, birds, dataset="cub", **options).to_dict()
    figures = _measure(TorchSession(checkpoint, device="cpu", threads=1), data).parts
    assert document.items() >= figures.to_dict().items()
    assert document["prototype_consistency"] == figures.consistency / 100
    assert "test_top5" in document

    without = evaluate_model(checkpoint, birds, parts=False, **options).to_dict()
    assert not {"prototype_consistency", "prototype_stability", "part_purity"} & without.keys()
    assert document.items() >= without.items()


@pytest.mark.data
def test_the_real_birds(cub_mini):
    data = read_dataset(cub_mini)
    few = replace(data, test=data.test[::16])
    figures = _measure(_session(_network(data.num_classes, HeadConfig()), data), few).parts
    assert figures.images == len(few.test) == 16
    assert figures.prototypes == 5 * len({sample.label for sample in few.test})
    assert all(0.0 <= figure <= 100.0 for figure in (figures.consistency, figures.stability, figures.purity))
    assert figures.purity
