"""Checkpoints: ours, and the authors' own as they are; what does not fit is refused with every reason at once."""

import hashlib
import random

import pytest
import torch

from opal_deploy.errors import CheckpointError, UsageError
from opal_deploy.model import authors_checkpoint, checkpoint
from opal_deploy.model.authors_checkpoint import PAPER_BACKBONES, Assumptions
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig
from opal_deploy.model.network import OpalNetwork
from tests.authors import AuthorsModel
from tests.builders import Payload, build_anchors

SMALL = "shufflenet_v2_x0_5"
# the authors' command for the linear head
LINEAR = {"ch_last_conv": 0, "classifier": "linear", "softmax": False, "pooling": "avg"}
NAMES = ["Sooty Albatross", "Crested Auklet", "Äußerer Käuz"]


@pytest.fixture(autouse=True)
def few_networks(monkeypatch):
    """Infer among the paper's backbones and three more: to build all of torchvision's takes seconds."""
    monkeypatch.setattr(authors_checkpoint, "list_torchvision_networks", lambda: ["resnet18", SMALL, *PAPER_BACKBONES])


def build_checkpoint(head=None):
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig(SMALL, 3, (64, 96), head or HeadConfig(prototypes_per_class=2)))
    return Checkpoint(network, list(NAMES), crop="boxes", metrics={"test_accuracy": 0.75}, training={"epochs": 3})


@pytest.fixture(scope="module")
def authors():
    return AuthorsModel(SMALL).state_dict()


@pytest.fixture(scope="module")
def written():
    return build_checkpoint()


@pytest.fixture(scope="module")
def ours(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("ours") / "c.pt"
    checkpoint.save(path, written)
    return path


@pytest.fixture
def save(tmp_path):
    def write(document):
        torch.save(document, tmp_path / "c.pt")
        return tmp_path / "c.pt"

    return write


def refusal(path, error=CheckpointError, **options):
    with pytest.raises(error) as raised:
        checkpoint.load(path, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


class TestOurs:
    def test_a_checkpoint_is_read_back_with_its_source(self, ours, written):
        read = checkpoint.load(ours)
        assert not read.network.training
        assert read.network.config == written.network.config
        assert (read.class_names, read.crop) == (NAMES, "boxes")
        assert (read.metrics, read.training) == ({"test_accuracy": 0.75}, {"epochs": 3})
        state = written.network.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in read.network.state_dict().items())
        assert torch.load(ours, weights_only=True)["config"]["backbone"] == SMALL
        assert (read.source["file"], read.source["format"]) == ("c.pt", "opal-deploy")
        assert read.source["sha256"] == hashlib.sha256(ours.read_bytes()).hexdigest()

    def test_the_linear_baseline_keeps_its_dense_layer(self, tmp_path):
        baseline, path = build_checkpoint(LINEAR_BASELINE), tmp_path / "a" / "b" / "c.pt"
        checkpoint.save(path, baseline)  # folders are made
        read = checkpoint.load(path)
        assert read.network.config.head == LINEAR_BASELINE
        assert torch.equal(read.network.head.classifier.weight, baseline.network.head.classifier.weight)

    def test_wrong_keys_are_listed(self, ours, save):
        document = torch.load(ours, weights_only=True)
        state = document["state_dict"]
        del state["head.projection.bias"]
        state["extra"], state["head.projection.weight"] = torch.zeros(1), torch.zeros(9, 1024, 1, 1)
        line = refusal(save(document))
        for part in ("1 missing: head.projection.bias", "1 unexpected: extra", "[9, 1024, 1, 1] instead of [6, 1024"):
            assert part in line

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"schema": 99}, "schema 99"), ({"config": None}, "damaged"), ({"class_names": ["a"]}, "1 class names"),
            ({"state_dict": torch.zeros(3)}, "damaged"), ({"state_dict": {"a": [None]}}, "not a tensor"),
            ({"training": {"linear_accuracy": torch.zeros(3)}}, "not JSON"), ({"crop": 3}, "crop 3"),
            ({"metrics": {"val_risk": {"images": 3}}}, "metrics.val_risk"), ({"edits": [1]}, "edits[0] 1"),
        ],
        ids=str,
    )  # fmt: skip
    def test_an_inconsistent_document_is_refused(self, ours, save, change, message):
        assert message in refusal(save({**torch.load(ours, weights_only=True), **change}))

    def test_a_head_with_other_values_than_declared_is_refused(self, ours, save):
        document = torch.load(ours, weights_only=True)
        for name, value in (("epsilon", float("nan")), ("dropped", [6])):
            changed = {**document["config"], "head": {**document["config"]["head"], name: value}}
            assert "damaged" in refusal(save({**document, "config": changed}))

    def test_keys_that_earlier_versions_did_not_write_may_be_missing(self, ours, save, written):
        document = torch.load(ours, weights_only=True)
        for key in ("edits", "evaluation", "receptive_field", "calibration", "baseline", "neighbours"):
            del document[key]
        for key in ("stride", "keep_layers", "mean", "std"):
            del document["config"][key]
        for key in ("plain", "dropped"):
            del document["config"]["head"][key]
        read = checkpoint.load(save(document))
        assert read.network.config == written.network.config
        assert (read.receptive_field, read.calibration, read.baseline, read.network.neighbours) == (None,) * 4

    def test_keys_of_a_later_version_are_kept_and_the_state_of_training_is_not(self, ours, save, tmp_path):
        document = {**torch.load(ours, weights_only=True), "invented": {"a": 1}, "resume": {"progress": {}}}
        edited = checkpoint.with_dropped_slots(checkpoint.load(save(document)), (0,))
        checkpoint.save(tmp_path / "edited.pt", edited)
        again = torch.load(tmp_path / "edited.pt", weights_only=True)
        assert again.keys() == document.keys() - {"resume"}
        assert again["invented"] == {"a": 1}

    def test_a_setting_of_the_network_that_is_not_known_is_refused(self, ours, save):
        document = torch.load(ours, weights_only=True)
        document["config"]["head"]["temperature"] = 2.0
        assert "unknown settings, temperature; use opal-deploy" in refusal(save(document))


class TestAuthors:
    @pytest.mark.parametrize(
        "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "resnet50")) for n in PAPER_BACKBONES]
    )
    def test_backbone_classes_and_prototypes_are_inferred(self, name, save):
        state = AuthorsModel(name).state_dict()
        read = checkpoint.load(save(state))
        config = read.network.config
        assert (config.backbone, config.num_classes, config.head.prototypes_per_class) == (name, 4, 3)
        assert torch.equal(read.network.head.projection.weight, state["final_conv_layer.weight"])
        body = read.network.backbone.body.state_dict()
        assert all(torch.equal(value, state[f"backbone.{key}"]) for key, value in body.items())

    @pytest.mark.parametrize(
        ("options", "assumptions", "evidence"),
        [
            pytest.param({}, Assumptions(), "exact", id="opal"),
            pytest.param(LINEAR, Assumptions(), "none", id="linear head"),
            pytest.param(
                {**LINEAR, "ch_last_conv": 3, "softmax": True}, Assumptions(cws=True), "none", id="projection and CWS"
            ),
        ],
    )
    def test_the_logits_are_those_of_the_authors_forward_pass(self, options, assumptions, evidence, save):
        theirs = AuthorsModel("resnet18", **options).eval()
        path = save({f"module.{key}": value for key, value in theirs.state_dict().items()})
        read = checkpoint.load(path, assumptions=assumptions)
        config = read.network.config
        assert config.backbone == "resnet18", "a backbone beyond the paper's, with parallel training's prefix"
        assert config.head.evidence == evidence
        assert (config.head == LINEAR_BASELINE) == (options == LINEAR)
        images = torch.randn(2, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(read.network(images), theirs(images), rtol=1e-5, atol=1e-5)

    def test_a_head_that_the_file_cannot_have_is_refused(self, save):
        path = save(AuthorsModel(SMALL, **LINEAR).state_dict())
        assumed = checkpoint.load(path).source["assumed"]
        assert assumed == {"pooling": "avg", "cws": False, "input_size": [224, 224], "class_names": "numbered"}
        assert "no distance; leave --distance out" in refusal(path, UsageError, assumptions=Assumptions("l1"))
        state = AuthorsModel(SMALL, **{**LINEAR, "ch_last_conv": 3}).state_dict()
        assert "2 missing: classifier.bias, final_conv_layer.bias" in refusal(
            save({key: value for key, value in state.items() if not key.endswith(("r.bias",))})
        )
        assert "[4, 13]" in refusal(save({**state, "classifier.weight": torch.zeros(4, 13)}))

    def test_settings_that_the_file_lacks_are_noted_as_assumed_and_can_be_given(self, authors, save):
        path = save(authors)
        read = checkpoint.load(path)
        assert read.class_names == ["class 0", "class 1", "class 2", "class 3"]
        assert read.source["format"] == "authors"
        assert read.source["assumed"] == {
            "distance": "l2", "pooling": "max", "cws": True, "input_size": [224, 224], "class_names": "numbered",
        }  # fmt: skip
        assumptions = Assumptions("l1", "avg", input_size=(64, 96), crop="boxes")
        read = checkpoint.load(path, class_names=list("abcd"), assumptions=assumptions)
        config = read.network.config
        assert (config.head.distance, config.head.pooling, config.input_size) == ("l1", "avg", (64, 96))
        assert config.head.prototypes_per_class == 3, "m is recorded in the file, not assumed"
        assert (read.class_names, read.crop) == (list("abcd"), "boxes")
        assert "class_names" not in read.source["assumed"]
        assert "3 class names for 4 classes" in refusal(path, class_names=list("abc"))

    def test_anchors_that_are_not_the_papers_are_refused(self, authors, save):
        anchors = build_anchors(4, 3)
        for prototypes in (anchors * 2, anchors.flip(0)):
            assert "paper's" in refusal(save({**authors, "classifier.prototypes": prototypes}))
        for prototypes in (torch.zeros(4, 13), torch.zeros(12), torch.zeros(5, 12)):
            assert "expected [C, C * m]" in refusal(save({**authors, "classifier.prototypes": prototypes}))

    def test_another_body_is_refused(self, authors, save):
        head = {key: value for key, value in authors.items() if not key.startswith("backbone.")}
        body = {f"backbone.block{i}.weight": torch.zeros(3, 3) for i in range(5)}
        assert "no torchvision network" in refusal(save(head | body))


class TestDamagedAndForeignFiles:
    def test_code_in_a_pickle_is_refused_and_not_run(self, tmp_path, save):
        proof = tmp_path / "executed"
        message = refusal(save({"format": checkpoint.FORMAT, "payload": Payload(proof)}))
        assert "refused" in message
        assert message.isprintable(), "PyTorch's own text has terminal codes"
        assert not proof.exists()
        torch.load(save(Payload(proof)), weights_only=False)
        assert proof.exists(), "the payload does run under unsafe loading"

    def test_truncated_and_random_bytes_and_a_flipped_bit_are_refused_in_one_line(self, ours, tmp_path):
        whole, source = ours.read_bytes(), random.Random(0)
        truncated = [whole[: int(share * len(whole))] for share in (0.0, 0.1, 0.5, 0.9, 0.999)]
        # short strings of bytes are often valid beginnings of a pickle, which fail in many ways
        for content in (*truncated, *(source.randbytes(length) for length in (1, 2, 3, 5, 10, 100) * 20)):
            (tmp_path / "c.pt").write_bytes(content)
            refusal(tmp_path / "c.pt")
        # in the middle of the weights, where PyTorch would load it in silence
        middle = len(whole) // 2
        (tmp_path / "c.pt").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
        assert "damaged in " in refusal(tmp_path / "c.pt")

    def test_a_file_of_something_else_and_a_missing_one_are_refused(self, save, tmp_path):
        for document in ([1, 2], torch.zeros(3), {}, {"a": 1}, {3: torch.zeros(1)}):
            with pytest.raises(CheckpointError):
                checkpoint.load(save(document))
        assert "nowhere.pt" in refusal(tmp_path / "nowhere.pt", UsageError)

    def test_another_networks_weights_are_named_as_what_they_are_for(self, save):
        path = save(torch.nn.Linear(2, 2).state_dict())
        assert f"train DATA --backbone NAME --weights {path}" in refusal(path)


def test_class_names_are_read_one_a_line(tmp_path):
    path = tmp_path / "names.txt"
    for content in ("Äuklet \n Tern\n\n\n".encode(), "\ufeffÄuklet\r\nTern\r\n".encode()):
        path.write_bytes(content)
        assert checkpoint.read_class_names(path) == ["Äuklet", "Tern"]
    for content, message in ((b"a\n\nb\n", "blank line 2"), (b"a\nb\na\n", "more than once"), (b"\xff\xfe", "UTF-8")):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message):
            checkpoint.read_class_names(path)
