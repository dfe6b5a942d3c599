"""Consistency, stability and purity of whole models: a perfect detector, a network, and what was exported of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.bench.targets.networks import update_batch_norms
from opal_deploy.cli.evaluate import evaluate
from opal_deploy.datasets import cub
from opal_deploy.datasets.cub import PartLocations
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.attention_maps import MapSource, from_session
from opal_deploy.evaluation.parts import PartMeter, measure_parts
from opal_deploy.evaluation.session import EvaluationResult, evaluate_session
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.options import ExportOptions, plan_targets
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.session import ImageBatch, Session
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.synthetic import example_images

M = 3


@pytest.fixture(scope="module")
def data(birds: Path) -> DataSet:
    return read_dataset(birds)


def _network(num_classes: int, head: HeadConfig) -> OpalNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", num_classes, (224, 224), head))
    update_batch_norms(network, example_images(4, 224, 224))
    return network


@pytest.fixture(scope="module")
def network(data: DataSet) -> OpalNetwork:
    return _network(data.num_classes, HeadConfig(prototypes_per_class=M))


@pytest.fixture(scope="module")
def checkpoint(data: DataSet, network: OpalNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "birds.pt"
    checkpoints.save(path, Checkpoint(network, data.class_names))
    return path


@pytest.fixture(scope="module")
def exported(checkpoint: Path) -> OnnxSession:
    """With all that the figures need; the comparison with PyTorch is what the tests make."""
    options = ExportOptions(threads=1, attention=True, input_kind="float32", verify=False)
    source = CheckpointSource(checkpoints.load(checkpoint), checkpoint)
    return OnnxSession(export(source, plan_targets(source), options).onnx[0].path, threads=1)


def _measure(session: Session, data: DataSet, **options: object) -> EvaluationResult:
    parts = cub.read_parts(data.root, data.test)
    return evaluate_session(session, data.test, parts=parts, **options)  # type: ignore[arg-type]


class _Detector:
    """Channel k of a 7 x 7 map shines where part `k % m` is, whatever the noise."""

    def __init__(self, parts: PartLocations, num_classes: int) -> None:
        cells = np.clip(parts.truncated_input_points(224)[:, :M] // 32, 0, 6)  # [N, m, (x, y)]
        self._attention = np.zeros((len(cells), num_classes * M, 7, 7), np.float32)
        for image, slots in enumerate(cells):
            for slot, (x, y) in enumerate(slots):
                self._attention[image, slot::M, y, x] = 1.0
        self._clean = self._noisy = 0

    def run(self, images: ImageBatch) -> Outputs:
        self._clean += len(images)
        return self._outputs(self._clean - len(images), self._clean)

    def run_normalised(self, images: FloatArray) -> Outputs:
        self._noisy += len(images)
        return self._outputs(self._noisy - len(images), self._noisy)

    def _outputs(self, start: int, stop: int) -> Outputs:
        attention = self._attention[start:stop]
        cells = attention.reshape(*attention.shape[:2], -1)
        argmax = cells.argmax(2).astype(np.int32)
        return Outputs(np.zeros((stop - start, 6), np.float32), argmax, cells.max(2), attention)


def test_a_perfect_detector_scores_a_hundred() -> None:
    rng = np.random.default_rng(0)
    names = ("beak", "tail", "back", "throat")
    points = rng.integers(0, 200, (40, 4, 2)).astype(np.float64)
    visible = rng.random((40, 4)) < 0.7
    parts = PartLocations(names, points, visible, np.tile([0.0, 0.0, 200.0, 200.0], (40, 1)))
    labels = np.arange(40) % 6
    detector = _Detector(parts, num_classes=6)
    source = MapSource(M, (7, 7), (224, 224), (0.5,) * 3, (0.5,) * 3, detector.run, detector.run_normalised)
    meter = PartMeter(source, parts, labels)
    scores, cells = [], []
    for first in range(0, 40, 16):
        pixels = np.zeros((min(16, 40 - first), 224, 224, 3), np.uint8)
        outputs = detector.run(pixels)
        meter(first, pixels, outputs)
        scores.append(outputs.scores)
        cells.append(outputs.argmax)

    found = meter.figures(np.concatenate(scores), np.concatenate(cells))  # type: ignore[arg-type]

    assert (found.consistency, found.stability, found.purity, found.purity_std) == (100.0, 100.0, 100.0, 0.0)
    assert (found.prototypes, found.images) == (18, 40)


def test_network_checkpoint_and_export_agree(
    data: DataSet, network: OpalNetwork, checkpoint: Path, exported: OnnxSession
) -> None:
    expected = measure_parts(network, data)
    reference = _measure(TorchSession(checkpoint, device="cpu", threads=1), data)
    deployed = _measure(exported, data)

    assert reference.parts == expected
    assert deployed.parts == expected
    assert deployed.evaluation.accuracy == reference.evaluation.accuracy
    assert expected.unavailable == {}
    # otherwise the agreement would be one of nothing with nothing
    assert expected.consistency is not None
    assert expected.purity is not None
    assert 0.0 < expected.consistency < 100.0
    assert expected.purity > 0.0


def test_the_batch_changes_nothing_and_the_seed_only_the_noise(data: DataSet, network: OpalNetwork) -> None:
    found = measure_parts(network, data, batch=32)
    assert measure_parts(network, data, batch=5) == found
    other = measure_parts(network, data, seed=1)
    assert replace(other, stability=found.stability) == found


def test_attention_maps_are_not_kept(data: DataSet, exported: OnnxSession) -> None:
    assert _measure(exported, data).outputs.attention is None


def test_average_pooling_has_maps_to_measure(data: DataSet) -> None:
    network = _network(data.num_classes, HeadConfig(prototypes_per_class=M, pooling="avg", cws=False))
    found = measure_parts(network, data)
    assert found.unavailable == {}
    assert None not in (found.consistency, found.stability, found.purity)


class TestWhatAModelCannotBeMeasuredOn:
    """Each reason in one line, with what would help."""

    def test_an_export_without_attention(self, exported: OnnxSession) -> None:
        reasons = self._reasons(exported, outputs=("logits", "argmax", "scores"), input_kind="uint8")
        assert reasons == {
            "prototype_consistency": "the model has no output attention; export it again: "
            "opal-deploy export birds.pt --outputs attention",
            "prototype_stability": "the model has no output attention and no float32 input, which noise is added to; "
            "export it again: opal-deploy export birds.pt --outputs attention --input float32",
        }

    def test_an_export_that_normalises_itself(self, exported: OnnxSession) -> None:
        reasons = self._reasons(exported, input_kind="uint8")
        assert reasons == {
            "prototype_stability": "the model has no float32 input, which noise is added to; export it again: "
            "opal-deploy export birds.pt --outputs attention --input float32",
        }

    def test_no_prototypes(self, exported: OnnxSession) -> None:
        reasons = self._reasons(exported, evidence="none")
        assert set(reasons) == {"prototype_consistency", "prototype_stability", "part_purity"}
        assert "no prototypes (evidence none)" in reasons["part_purity"]

    def test_another_input_size(self, exported: OnnxSession) -> None:
        reasons = self._reasons(exported, input_size=(224, 448))
        assert set(reasons) == {"prototype_consistency", "prototype_stability", "part_purity"}
        assert "its input is 224x448" in reasons["prototype_consistency"]

    def test_pictures_that_are_not_cropped(self, data: DataSet, exported: OnnxSession) -> None:
        found = _measure(exported, data, boxes=False).parts
        assert found is not None
        assert (found.consistency, found.stability, found.purity) == (None, None, None)
        assert set(found.unavailable.values()) == {"the protocol crops to the boxes; leave --no-boxes out"}

    def test_what_is_left_is_measured(self, data: DataSet, exported: OnnxSession) -> None:
        everything = _measure(exported, data).parts
        metadata = replace(exported.metadata, input_kind="uint8")
        session = SimpleNamespace(metadata=metadata, run=exported.run, description="")
        found = _measure(cast(Session, session), data).parts
        assert everything is not None
        assert found is not None
        assert found == replace(everything, stability=None, unavailable=found.unavailable)
        assert found.to_dict()["prototype_stability"] is None
        assert list(found.to_dict()["unavailable"]) == ["prototype_stability"]

    @staticmethod
    def _reasons(exported: OnnxSession, **changes: object) -> dict[str, str]:
        metadata: Metadata = replace(exported.metadata, **changes)  # type: ignore[arg-type]
        session = SimpleNamespace(metadata=metadata, run=exported.run, run_normalised=exported.run_normalised)
        return from_session(cast(Session, session)).unavailable


@pytest.mark.parametrize(
    ("head", "size", "message"),
    [
        (HeadConfig(prototypes_per_class=M), 96, r"its input is 96x96 .* train it with --size 224"),
        (LINEAR_BASELINE, 224, r"no prototypes \(evidence none\)"),
    ],
)
def test_a_network_without_figures_is_refused(data: DataSet, head: HeadConfig, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure_parts(OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", data.num_classes, (size, size), head)), data)


def test_a_data_set_without_parts_is_refused(data: DataSet, network: OpalNetwork) -> None:
    with pytest.raises(UsageError, match=r"no part locations \(parts/part_locs.txt of CUB\)"):
        measure_parts(network, replace(data, layout="imagefolder"))
    with pytest.raises(UsageError, match="no test images"):
        measure_parts(network, replace(data, test=[]))


def test_the_command_gives_the_same_figures(
    birds: Path, data: DataSet, network: OpalNetwork, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(birds, [checkpoint], dataset="cub", device="cpu", threads=1, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document.items() >= measure_parts(network, data).to_dict().items()
    assert "test_top5" in document

    evaluate(birds, [checkpoint], device="cpu", threads=1, parts=False, as_json=True)
    without = json.loads(capsys.readouterr().out)
    assert not {"prototype_consistency", "prototype_stability", "part_purity"} & without.keys()
    assert document.items() >= without.items()


@pytest.mark.data
def test_the_real_birds(cub_mini: Path) -> None:
    data = read_dataset(cub_mini)
    few = replace(data, test=data.test[::16])
    found = measure_parts(_network(data.num_classes, HeadConfig()), few)
    assert found.images == len(few.test) == 16
    assert found.prototypes == 5 * len({sample.label for sample in few.test})
    for figure in (found.consistency, found.stability, found.purity):
        assert figure is not None
        assert 0.0 <= figure <= 100.0
    assert found.purity
