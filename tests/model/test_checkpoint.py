"""Checkpoints: ours, and the authors' own as they are; what does not fit is refused with every reason at once."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model import backbones, checkpoint
from opal_deploy.model.checkpoint import PAPER_BACKBONES, Assumptions, Checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig
from opal_deploy.model.head import build_anchors
from opal_deploy.model.network import OpalNetwork

SMALL = "shufflenet_v2_x0_5"
NAMES = ["Sooty Albatross", "Crested Auklet", "Äußerer Käuz"]


def _checkpoint(head: HeadConfig | None = None, seed: int = 0) -> Checkpoint:
    torch.manual_seed(seed)
    network = OpalNetwork(NetworkConfig(SMALL, 3, (64, 96), head or HeadConfig(prototypes_per_class=2)))
    return Checkpoint(network, list(NAMES), crop="boxes", metrics={"test_accuracy": 0.75}, training={"epochs": 3})


def _authors(name: str, num_classes: int = 4, m: int = 3, *, seed: int = 0) -> dict[str, Tensor]:
    """A state dict as the authors' training writes it: random weights, the body's names under `backbone.`."""
    torch.manual_seed(seed)
    backbone = backbones.build(name)
    state = {f"backbone.{key}": value for key, value in backbone.body.state_dict().items()}
    convolution = torch.nn.Conv2d(backbone.num_features, num_classes * m, 1)
    state["final_conv_layer.weight"] = convolution.weight.detach()
    state["final_conv_layer.bias"] = convolution.bias.detach()
    state["classifier.prototypes"] = build_anchors(num_classes, m)
    return state


@pytest.fixture(scope="module")
def authors_state() -> dict[str, Tensor]:
    return _authors("resnet50")


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Any], Path]:
    def write(document: Any) -> Path:
        path = tmp_path / "c.pt"
        torch.save(document, path)
        return path

    return write


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Path]:
    written = _checkpoint()
    path = tmp_path_factory.mktemp("ours") / "c.pt"
    checkpoint.save(path, written)
    return written, path


class TestOurs:
    def test_what_is_written_is_read_back(self, ours):
        written, path = ours
        read = checkpoint.load(path)
        assert not read.network.training
        assert read.network.config == written.network.config
        assert (read.class_names, read.crop) == (NAMES, "boxes")
        assert (read.metrics, read.training) == ({"test_accuracy": 0.75}, {"epochs": 3})
        state = written.network.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in read.network.state_dict().items())
        assert torch.load(path, weights_only=True)["config"]["backbone"] == SMALL

    def test_its_source_names_file_and_digest(self, ours):
        source = checkpoint.load(ours[1]).source
        assert (source["file"], source["format"]) == ("c.pt", "opal-deploy")
        assert source["sha256"] == hashlib.sha256(ours[1].read_bytes()).hexdigest()

    def test_the_linear_baseline_keeps_its_dense_layer(self, tmp_path):
        written = _checkpoint(LINEAR_BASELINE)
        checkpoint.save(tmp_path / "c.pt", written)
        read = checkpoint.load(tmp_path / "c.pt")
        assert read.network.config.head == LINEAR_BASELINE
        assert torch.equal(read.network.head.classifier.weight, written.network.head.classifier.weight)

    def test_other_class_names_replace_its_own(self, ours):
        assert checkpoint.load(ours[1], class_names=["a", "b", "c"]).class_names == ["a", "b", "c"]

    @pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c", "d"]])
    def test_a_wrong_number_of_class_names_is_refused(self, ours, names):
        with pytest.raises(CheckpointError, match=f"{len(names)} class names for 3 classes"):
            checkpoint.load(ours[1], class_names=names)

    def test_every_wrong_key_is_listed_in_one_error(self, ours, save):
        document = torch.load(ours[1], weights_only=True)
        state = document["state_dict"]
        del state["head.projection.bias"], state["backbone.body.conv1.0.weight"]
        state["extra.one"], state["extra.two"] = torch.zeros(1), torch.zeros(1)
        state["head.projection.weight"] = torch.zeros(9, 1024, 1, 1)
        with pytest.raises(CheckpointError) as refusal:
            checkpoint.load(save(document))
        for part in (
            "2 missing", "head.projection.bias", "backbone.body.conv1.0.weight",
            "2 unexpected", "extra.one", "extra.two",
            "1 of another shape", "head.projection.weight [9, 1024, 1, 1] instead of [6, 1024, 1, 1]",
        ):  # fmt: skip
            assert part in str(refusal.value)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"schema": 99}, "schema 99, expected 1"),
            ({"config": {}}, "damaged"),
            ({"config": None}, "damaged"),
            ({"class_names": ["a"]}, "names 1 classes but its network has 3"),
            ({"class_names": None}, "damaged"),
            ({"state_dict": torch.zeros(3)}, "damaged"),
            ({"state_dict": {}}, "missing"),
        ],
        ids=str,
    )
    def test_a_document_that_does_not_hang_together_is_refused(self, ours, save, change, says):
        with pytest.raises(CheckpointError, match=says):
            checkpoint.load(save({**torch.load(ours[1], weights_only=True), **change}))


class TestSaving:
    def test_a_failure_leaves_the_old_file_and_nothing_else(self, tmp_path, monkeypatch):
        path = tmp_path / "c.pt"
        checkpoint.save(path, _checkpoint())
        before = path.read_bytes()

        def failing(document: Any, stream: Any) -> None:
            stream.write(b"half a file")
            raise RuntimeError("out of memory")

        monkeypatch.setattr(torch, "save", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            checkpoint.save(path, _checkpoint(seed=1))
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]

    def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(self, tmp_path):
        resource = pytest.importorskip("resource", reason="this system has no limits on files")
        written = _checkpoint()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        try:
            with pytest.raises(UsageError, match="cannot be written"):
                checkpoint.save(tmp_path / "c.pt", written)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_cannot_be_made_is_one_line(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match="cannot be written") as refusal:
            checkpoint.save(tmp_path / "file" / "c.pt", _checkpoint())
        assert "\n" not in str(refusal.value)

    def test_missing_folders_are_made(self, tmp_path):
        checkpoint.save(tmp_path / "a" / "b" / "c.pt", _checkpoint())
        assert (tmp_path / "a" / "b" / "c.pt").is_file()


class TestAuthors:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[] if name in ("resnet50", "convnext_tiny") else [pytest.mark.slow])
            for name in PAPER_BACKBONES
        ],
    )
    def test_backbone_classes_and_prototypes_are_inferred(self, name, save):
        state = _authors(name, num_classes=4, m=3)
        read = checkpoint.load(save(state))
        config = read.network.config
        assert (config.backbone, config.num_classes, config.head.prototypes_per_class) == (name, 4, 3)
        assert torch.equal(read.network.head.projection.weight, state["final_conv_layer.weight"])
        own = read.network.backbone.body.state_dict()
        assert all(torch.equal(value, state[f"backbone.{key}"]) for key, value in own.items())

    def test_a_backbone_beyond_the_papers_is_inferred_too(self, save):
        assert checkpoint.load(save(_authors(SMALL))).network.config.backbone == SMALL

    def test_it_answers_as_its_parts_do(self, save):
        # the authors' forward pass, written out
        state = _authors(SMALL)
        network = checkpoint.load(save(state)).network
        images = torch.randn(2, 3, 64, 64)
        with torch.no_grad():
            features = network.backbone(images)
            attention = torch.nn.functional.conv2d(
                features, state["final_conv_layer.weight"], state["final_conv_layer.bias"]
            ).softmax(1)
            s = attention.flatten(2).amax(2)
            z = s / (s.norm(dim=1, keepdim=True) + 1e-8)
            expected = -torch.cdist(z.double(), state["classifier.prototypes"].double())
            found = network(images)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

    def test_what_it_does_not_record_is_noted_as_assumed(self, authors_state, save):
        read = checkpoint.load(save(authors_state))
        assert read.class_names == ["class 0", "class 1", "class 2", "class 3"]
        assert read.source["format"] == "authors"
        assert read.source["assumed"] == {
            "distance": "l2", "pooling": "max", "cws": True, "input_size": [224, 224], "class_names": "numbered",
        }  # fmt: skip

    def test_assumptions_can_be_given(self, authors_state, save):
        given = Assumptions(HeadConfig(distance="l1", pooling="avg", prototypes_per_class=9), (64, 96), "boxes")
        read = checkpoint.load(save(authors_state), class_names=list("abcd"), assumptions=given)
        config = read.network.config
        assert (config.head.distance, config.head.pooling, config.input_size) == ("l1", "avg", (64, 96))
        assert config.head.prototypes_per_class == 3, "m is recorded in the file, not assumed"
        assert (read.class_names, read.crop) == (list("abcd"), "boxes")
        assert "class_names" not in read.source["assumed"]
        with pytest.raises(CheckpointError, match="3 class names for 4 classes"):
            checkpoint.load(save(authors_state), class_names=list("abc"))

    def test_the_prefix_of_parallel_training_is_dropped(self, authors_state, save):
        read = checkpoint.load(save({f"module.{key}": value for key, value in authors_state.items()}))
        assert read.network.config.backbone == "resnet50"

    def test_every_wrong_key_is_listed_in_one_error(self, authors_state, save):
        state = dict(authors_state)
        gone = ["backbone.conv1.weight", "backbone.layer4.2.bn3.bias", "final_conv_layer.bias"]
        for key in gone:
            del state[key]
        added = ["backbone.layer5.weight", "temperature"]
        state.update(dict.fromkeys(added, torch.zeros(2)))
        state["backbone.bn1.weight"] = torch.zeros(3)
        with pytest.raises(CheckpointError) as refusal:
            checkpoint.load(save(state))
        for part in (*gone, *added, "3 missing", "2 unexpected", "backbone.bn1.weight [3] instead of [64]", "resnet50"):
            assert part in str(refusal.value)

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            (build_anchors(4, 3) * 2, "not the paper's orthonormal anchors"),
            (build_anchors(4, 3).flip(0), "not the paper's orthonormal anchors"),
            (torch.eye(12)[:4], "not the paper's orthonormal anchors"),
            (torch.randn(4, 12), "not the paper's orthonormal anchors"),
            (torch.zeros(4, 13), "do not fit together"),
            (torch.zeros(5, 12), "12 channels are no multiple of 5 classes"),
            (torch.zeros(12), "do not fit together"),
            (torch.zeros(4, 12, 1), "do not fit together"),
        ],
        ids=["scaled", "permuted", "one slot each", "learned", "13 channels", "5 classes", "a row", "3 dimensions"],
    )
    def test_anchors_that_are_not_the_papers_are_refused(self, authors_state, save, wrong, says):
        with pytest.raises(CheckpointError, match=says):
            checkpoint.load(save({**authors_state, "classifier.prototypes": wrong}))

    def test_a_classifier_that_is_not_opals_is_refused_with_what_was_expected(self, authors_state, save):
        plain = {k.removeprefix("backbone."): v for k, v in authors_state.items() if k.startswith("backbone.")}
        with pytest.raises(CheckpointError, match=r"final_conv_layer\.weight"):
            checkpoint.load(save(plain))

    def test_a_body_that_is_like_no_network_of_torchvisions_is_refused(self, save):
        state = {f"backbone.stage{i}.weight": torch.zeros(3, 3) for i in range(5)}
        state.update(
            {"final_conv_layer.weight": torch.zeros(12, 3, 1, 1), "final_conv_layer.bias": torch.zeros(12)},
            **{"classifier.prototypes": build_anchors(4, 3)},
        )
        with pytest.raises(CheckpointError, match=r"no torchvision network.*backbone parameters"):
            checkpoint.load(save(state))


class _Payload:
    """Unpickling it would make a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


class TestDamagedAndForeignFiles:
    def test_code_in_a_pickle_is_refused_and_not_run(self, tmp_path, save):
        proof = tmp_path / "executed"
        path = save({"format": checkpoint.FORMAT, "payload": _Payload(proof)})
        with pytest.raises(CheckpointError, match="refused"):
            checkpoint.load(path)
        assert not proof.exists()
        torch.load(save(_Payload(proof)), weights_only=False)
        assert proof.exists(), "the payload does run under unsafe loading"

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_a_truncated_file_is_refused_in_one_line(self, ours, tmp_path, share):
        whole = ours[1].read_bytes()
        path = tmp_path / "c.pt"
        path.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(CheckpointError) as refusal:
            checkpoint.load(path)
        assert "\n" not in str(refusal.value)

    def test_random_bytes_are_refused_whatever_they_spell(self, tmp_path):
        # short strings of bytes are often valid beginnings of a pickle, which fail in many ways
        source = random.Random(0)
        path = tmp_path / "c.pt"
        for length in (1, 2, 3, 5, 10, 100, 1000) * 40:
            path.write_bytes(source.randbytes(length))
            with pytest.raises(CheckpointError):
                checkpoint.load(path)

    def test_a_flipped_bit_never_ends_in_another_error(self, save, tmp_path):
        # flips within a weight go unnoticed here: the format has no digest
        whole = bytearray(save({"a": torch.arange(6.0), "b": [1, "x"]}).read_bytes())
        source = random.Random(0)
        path = tmp_path / "flipped.pt"
        refused = 0
        for position in range(0, len(whole), 3):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << source.randrange(8)
            path.write_bytes(flipped)
            try:
                backbones.load_torch_file(path)
            except CheckpointError:
                refused += 1
        assert refused > 100

    @pytest.mark.parametrize("document", [[1, 2], "text", torch.zeros(3), {}, {"a": 1}, {3: torch.zeros(1)}], ids=str)
    def test_a_file_of_something_else_is_refused(self, save, document):
        with pytest.raises(CheckpointError):
            checkpoint.load(save(document))
        with pytest.raises(UsageError, match=r"nowhere\.pt"):
            checkpoint.load(save(document).with_name("nowhere.pt"))


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("Äuklet \n Tern\n\n\n".encode(), ["Äuklet", "Tern"]),
        (b"\xef\xbb\xbfAuklet\r\nTern\r\n", ["Auklet", "Tern"]),
        (b"a\n\nb\n", "blank line 2"),
        (b"a\nb\na\n", "a more than once"),
        (b"", "blank line 1"),
        (b"\xff\xfe", "UTF-8"),
        (None, r"names\.txt"),
    ],
    ids=["plain", "Windows", "blank", "doubled", "empty", "not UTF-8", "missing"],
)
def test_class_names_are_read_one_a_line(tmp_path, content, names):
    path = tmp_path / "names.txt"
    if content is not None:
        path.write_bytes(content)
    if isinstance(names, list):
        assert checkpoint.read_class_names(path) == names
        return
    with pytest.raises(UsageError, match=names):
        checkpoint.read_class_names(path)


def test_a_description_holds_what_infer_needs(ours):
    described = checkpoint.build_metadata(checkpoint.load(ours[1]))
    assert described.class_names == tuple(NAMES)
    assert (described.grid, described.input_size, described.crop) == ((2, 3), (64, 96), "boxes")
    assert (described.evidence, described.prototypes_per_class) == ("exact", 2)
    assert described.training["metrics"] == {"test_accuracy": 0.75}
