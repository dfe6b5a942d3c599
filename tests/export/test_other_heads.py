"""PIP-Net, ProtoPNet and CaBRNet checkpoints: what their exported files answer, against their formulas written here."""

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torchvision.models import get_model

from opal_deploy.artifact import onnx_file
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.synthetic import example_images
from tests.cli.calls import check, one_line, read_results

SIDE, CLASSES, NET = 96, 4, "shufflenet_v2_x0_5"
OPTIONS = ("--size", str(SIDE), "--threads", "1")
CPU = ("--device", "cpu", "--threads", "1")
INFER = ("infer", "--no-isolate")


def _normalise(images: np.ndarray) -> torch.Tensor:
    mean, std = (torch.tensor(v).reshape(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std


class Theirs:
    """A network as CaBRNet builds it, with random weights: a body, add-on layers, a head; and its answers."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        full, channels = get_model(NET, weights=None).eval(), 48
        self.body = nn.Sequential(full.conv1, full.maxpool, full.stage2)
        self.keys = {key: value for key, value in full.state_dict().items() if key.startswith(("conv1.", "stage2."))}
        # features of images differ, as after training
        layers = [layer for layer in self.body.modules() if isinstance(layer, nn.BatchNorm2d)]
        for layer in layers:
            layer.train()
            layer.momentum = None
        with torch.no_grad():
            self.body(_normalise(example_images(32, SIDE, SIDE)))
        for layer in layers:
            layer.eval()
        self.kind, width = kind, channels if kind == "pip" else 16
        self.add_on = nn.Sequential() if kind == "pip" else nn.Sequential(
            nn.Conv2d(channels, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Sigmoid()
        )  # fmt: skip
        self.count = width if kind == "pip" else 3 * CLASSES
        self.prototypes = torch.rand(self.count, 16, 1, 1)
        # some of them negative, which PIP-Net takes for 0
        self.weights = torch.randn(CLASSES, self.count)

    def answer(self, images: np.ndarray, threshold: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return logits, scores and cells of uint8 images."""
        with torch.no_grad():
            cells = self.add_on(self.body(_normalise(images))).flatten(2)
            if self.kind == "pip":
                best, where = cells.softmax(1).max(2)
                scores, weights = best * (best >= threshold), self.weights.relu()
            else:
                # the definition, not the product form that the graph has
                distances = ((cells[:, None] - self.prototypes.flatten(1)[None, :, :, None]) ** 2).sum(2)
                nearest, where = distances.min(2)
                scores, weights = torch.log((nearest + 1) / (nearest + 1e-4)), self.weights
        return (scores @ weights.T).numpy(), scores.numpy(), where.numpy()

    def save_cabrnet(self, folder, similarity="ProtoPNetSimilarity", params=None, **changes) -> None:
        """Write model_state.pth and model_arch.yml; `changes` go into the architecture's classifier."""
        state = {f"extractor.convnet.{key}": value for key, value in self.keys.items()}
        for name, layer in zip(("c1", "r1", "c2", "s1"), self.add_on, strict=False):
            state |= {f"extractor.add_on.{name}.{key}": value for key, value in layer.state_dict().items()}
        head = {"prototypes": self.prototypes, "proto_class_map": torch.zeros(1), "last_layer.weight": self.weights}
        torch.save(state | {f"classifier.{key}": value for key, value in head.items()}, folder / "model_state.pth")
        conv = {"type": "Conv2d", "params": {"out_channels": 16, "kernel_size": 1}}
        layers = {"init_mode": "PROTOPNET", "c1": conv, "r1": {"type": "ReLU"}, "c2": conv, "s1": {"type": "Sigmoid"}}
        name = "PIPNetClassifier" if self.kind == "pip" else "ProtoPNetClassifier"
        document = {
            "extractor": {
                "backbone": {"arch": NET, "weights": "None"},
                "convnet": {"source_layer": "stage2", **({} if self.kind == "pip" else {"add_on": layers})},
            },
            "classifier": {"name": name, "module": "x", "params": {"num_classes": CLASSES}, **changes},
            "similarity": {"name": similarity, **({"params": params} if params else {})},
        }
        (folder / "model_arch.yml").write_text(yaml.safe_dump(document, sort_keys=False))


@pytest.fixture(scope="module", params=("pip", "proto"))
def exported(request, tmp_path_factory, opal):
    """A network, and the folder with its checkpoint and its exported file."""
    folder, theirs = tmp_path_factory.mktemp(request.param), Theirs(request.param)
    theirs.save_cabrnet(folder)
    (folder / "classes.txt").write_text("Albatross\nGull\nTern\nSkua\n")
    call = ("export", "model_state.pth", "--arch", "model_arch.yml", "--classes", "classes.txt", *OPTIONS)
    check(opal(*call, cwd=folder))
    return theirs, folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, make_pictures):
    folder = tmp_path_factory.mktemp("pictures")
    make_pictures(folder, 6)
    return folder


def test_the_file_answers_as_the_formula(exported):
    theirs, folder = exported
    session, images = OnnxSession(folder / "model_state.onnx", device="cpu", threads=1), example_images(12, SIDE, SIDE)
    # more images than classes and, one by one, fewer
    outputs, (logits, scores, cells) = session.run(images), theirs.answer(images)
    np.testing.assert_allclose(outputs.logits, logits, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(outputs.scores, scores, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(outputs.argmax, cells)
    np.testing.assert_allclose(session.run(images[:1]).logits, logits[:1], rtol=1e-5, atol=2e-5)


def test_a_record_adds_up_to_the_logit(exported, pictures, opal):
    theirs, folder = exported
    check(opal(*INFER, pictures, "--explain", "--model", "model_state.onnx", "--out", "out", *CPU, cwd=folder))
    records = read_results(folder / "out")
    weights = theirs.weights.relu() if theirs.kind == "pip" else theirs.weights
    for record in records:
        prediction, evidence = record["prediction"], record["evidence"]
        parts = [slot["contribution"] for slot in evidence]
        assert sum(parts) + record["rest"] + record["bias"] == pytest.approx(prediction["logit"], abs=1e-5)
        assert prediction["cosine"] is None
        assert record["margin"] == pytest.approx(record["top"][0]["logit"] - record["top"][1]["logit"], abs=1e-5)
        assert [abs(part) for part in parts] == sorted(map(abs, parts), reverse=True)
        assert len(parts) == min(10, int((weights[prediction["class_id"]] != 0).sum()))
        for slot in evidence:
            weight = float(weights[prediction["class_id"], slot["channel"]])
            assert slot["contribution"] == pytest.approx(weight * slot["score"], rel=1e-6)
    page = (folder / "out" / "report.html").read_text()
    # the meaning of the bars is a contribution to the logit
    assert '"cosine":false' in page
    assert '"meaning":3' in page
    check(opal("verify", "out", "--model", "model_state.onnx", "--all", *CPU, cwd=folder))


@pytest.mark.slow
def test_the_best_classes_and_other_precisions_give_the_same_records(exported, pictures, opal):
    _, folder = exported
    source = ("export", "model_state.pth", "--arch", "model_arch.yml", "--classes", "classes.txt", *OPTIONS)
    check(opal(*source, "--outputs", "topk", "--top-k", "2", "--out", "top.onnx", cwd=folder))
    check(opal("export", "model_state.onnx", "--precision", "fp16", "--threads", "1", "--out", "half.onnx", cwd=folder))
    for name in ("model_state", "top", "half"):
        check(opal(*INFER, pictures, "--top", "2", "--model", f"{name}.onnx", "--out", name, *CPU, cwd=folder))
    full, top, half = (read_results(folder / name) for name in ("model_state", "top", "half"))
    assert [record["evidence"] for record in top] == [record["evidence"] for record in full]
    assert [record["prediction"]["label"] for record in half] == [record["prediction"]["label"] for record in full]


def test_a_prototype_is_dropped_for_all_classes_at_once(exported, opal):
    theirs, folder = exported
    check(opal("edit", "model_state.onnx", "--drop", "7", "--reason", "sky", "--out", "edited.onnx", *CPU, cwd=folder))
    images = example_images(5, SIDE, SIDE)
    before, scores, _ = theirs.answer(images)
    weights = theirs.weights.relu() if theirs.kind == "pip" else theirs.weights
    expected = before - scores[:, 7:8] * weights[:, 7].numpy()
    edited = OnnxSession(folder / "edited.onnx", device="cpu", threads=1)
    np.testing.assert_allclose(edited.run(images).logits, expected, rtol=1e-5, atol=2e-5)
    assert "1 slot dropped" in opal("inspect", "edited.onnx", cwd=folder).stdout
    error = one_line(opal("edit", "model_state.onnx", "--drop", "Gull/7", "--out", "x.onnx", cwd=folder))
    assert "shared prototype's number" in error


@pytest.mark.parametrize("exported", ["pip"], indirect=True)
@pytest.mark.slow
def test_pip_net_s_own_file_ignores_weak_scores(exported, tmp_path, opal):
    _, folder = exported
    metadata = onnx_file.read_metadata(folder / "model_state.onnx")
    assert metadata.head["threshold"] == 0.0
    torch.manual_seed(2)
    resnet = get_model("resnet18", weights=None)
    state = {f"module._net.{k}": v for k, v in resnet.state_dict().items() if not k.startswith("fc.")}
    state |= {"module._add_on.0.weight": torch.randn(8, 512, 1, 1), "module._add_on.0.bias": torch.zeros(8)}
    weights, multiplier = torch.rand(3, 8), torch.ones(1)
    state |= {"module._classification.weight": weights, "module._multiplier": multiplier}
    state["module._classification.normalization_multiplier"] = multiplier
    torch.save({"model_state_dict": state, "optimizer_net_state_dict": {}}, tmp_path / "net_trained_last")
    call = ("export", "net_trained_last", "--arch", "pipnet:resnet18", *OPTIONS, "--out", "pip.onnx")
    check(opal(*call, cwd=tmp_path))
    session = OnnxSession(tmp_path / "pip.onnx", device="cpu", threads=1)
    # the last two stages keep their stride: 8 pixels per cell
    assert session.metadata.grid == (12, 12)
    assert session.metadata.head["threshold"] == 0.1
    scores = session.run(example_images(4, SIDE, SIDE)).scores
    assert ((scores == 0) | (scores >= 0.1)).all()
    assert (scores == 0).any()


def test_protopnet_s_own_state_dict_is_read_and_its_pickled_module_is_not(tmp_path, opal):
    torch.manual_seed(3)
    resnet = get_model("resnet18", weights=None)
    state = {f"features.{k}": v for k, v in resnet.state_dict().items() if not k.startswith("fc.")}
    for name, inputs in (("0", 512), ("2", 16)):
        state |= {f"add_on_layers.{name}.weight": torch.randn(16, inputs, 1, 1) / inputs**0.5}
        state |= {f"add_on_layers.{name}.bias": torch.zeros(16)}
    state |= {"prototype_vectors": torch.rand(6, 16, 1, 1), "ones": torch.ones(6, 16, 1, 1)}
    torch.save(state | {"last_layer.weight": torch.randn(3, 6)}, tmp_path / "proto.pth")
    check(opal("export", "proto.pth", "--arch", "protopnet:resnet18", *OPTIONS, "--no-verify", cwd=tmp_path))
    assert onnx_file.read_metadata(tmp_path / "proto.onnx").head["similarity"] == "log"
    torch.save(resnet, tmp_path / "module.pth")
    error = one_line(opal("export", "module.pth", "--arch", "protopnet:resnet18", *OPTIONS, cwd=tmp_path))
    assert "holds a Python object" in error


@pytest.mark.slow
def test_prototypes_that_are_cells_of_the_images_pass_the_gate(tmp_path, opal):
    theirs, images = Theirs("proto"), example_images(64, SIDE, SIDE)
    with torch.no_grad():
        cells = theirs.add_on(theirs.body(_normalise(images)))
    # as ProtoPNet's projection onto training images leaves them: distance 0, where the logarithm is steep
    theirs.prototypes = cells[: theirs.count, :, 2, 3, None, None].clone()
    theirs.save_cabrnet(tmp_path)
    check(opal("export", "model_state.pth", "--arch", "model_arch.yml", *OPTIONS, cwd=tmp_path))
    scores = OnnxSession(tmp_path / "model_state.onnx", device="cpu", threads=1).run(images).scores
    assert scores.max() > np.log(1e4) - 0.5
    error = one_line(opal("export", "model_state.pth", "--arch", "model_arch.yml", "--distance", "l1", cwd=tmp_path))
    assert "--distance: of OPAL's head" in error


@pytest.mark.parametrize("exported", ["proto"], indirect=True)
@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("pipnet:vgg19", "PIP-Net's networks"),
        ("resnet18", "expected pipnet:NET"),
        ("protopnet:shufflenet_v2_x0_5", "last_layer.weight"),
        ("missing.yml", "YAML"),
        ("classes.txt.yml", "model_arch.yml of CaBRNet"),
        ("pool/model_arch.yml", "ProtoPoolClassifier"),
        ("cosine/model_arch.yml", "similarity CosineSimilarity"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(exported, arch, expected, opal):
    theirs, folder = exported
    (folder / "classes.txt.yml").write_text("a: 1\n")
    for name, changes in {
        "pool": {"name": "ProtoPoolClassifier"},
        "cosine": {"similarity": "CosineSimilarity"},
    }.items():
        (folder / name).mkdir(exist_ok=True)
        theirs.save_cabrnet(folder / name, **changes)
    assert expected in one_line(opal("export", "model_state.pth", "--arch", arch, *OPTIONS, cwd=folder))
