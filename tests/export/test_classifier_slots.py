"""Slots of other tools' classifiers: scores that add up to unchanged logits, and what works with them."""

import numpy as np
import onnxruntime
import pytest
from PIL import Image

import opal_deploy
from opal_deploy.artifact.onnx_file import read_metadata
from opal_deploy.errors import UsageError
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.synthetic import example_images
from tests.cli.calls import check, one_line, read_results
from tests.export.test_classifier import CLASSES, DENSE, FLAT, POOL, SIZE, TAILS, make

NAMES, SLOTS = ("ash", "birch", "elm", "oak"), 3
CPU = ("--device", "cpu", "--threads", "1")
OPTIONS = {"preprocess": "raw", "classes": NAMES, "threads": 1}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A data set of four classes with eight training and six validation images each, which the classifier answers."""
    folder = tmp_path_factory.mktemp("photographs")
    classifier = make(folder / "c.onnx", [POOL, FLAT, DENSE])
    images = example_images(400, SIZE, SIZE)
    (logits,) = onnxruntime.InferenceSession(classifier).run(None, {"x": normalise(images, [0.0] * 3, [1.0] * 3)})
    for number, name in enumerate(NAMES):
        # so that some answers are right
        order = np.argsort(logits[:, number] - np.delete(logits, number, 1).max(1))[::-1][:14]
        for place, row in enumerate(order.tolist()):
            path = folder / "data" / ("val" if place % 2 and place < 12 else "train") / name / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row]).save(path)
    return folder / "data"


@pytest.fixture(scope="module")
def exported(photographs, tmp_path_factory):
    """The folder of a classifier `c.onnx` and its export `c.opal.onnx`, with three slots per class."""
    folder = tmp_path_factory.mktemp("exported")
    path = make(folder / "c.onnx", [POOL, FLAT, DENSE])
    opal_deploy.export_model(path, slots=photographs, prototypes=SLOTS, **OPTIONS)
    return folder


@pytest.mark.parametrize("case", ["dense", "LayerNorm", "channels last", "batches of one", "half precision"])
def test_scores_of_slots_add_up_to_the_unchanged_logits(case, photographs, tmp_path):
    tail, how = TAILS[case]
    path = make(tmp_path / "c.onnx", tail, **how)
    plain = OnnxSession(opal_deploy.export_model(path, out=tmp_path / "p.onnx", **OPTIONS).path, device="cpu")
    out = opal_deploy.export_model(path, slots=photographs, prototypes=SLOTS, **OPTIONS).path
    session, images = OnnxSession(out, device="cpu"), example_images(5, SIZE, SIZE)
    outputs, metadata = session.run(images), session.metadata
    np.testing.assert_array_equal(outputs.logits, plain.run(images).logits)
    assert (metadata.evidence, outputs.scores.shape) == ("exact", (5, CLASSES * SLOTS))
    sums = outputs.scores.reshape(5, CLASSES, SLOTS).sum(2) + metadata.class_map.biases
    limit = 1e-2 if case == "half precision" else 1e-5
    np.testing.assert_allclose(sums, outputs.logits, atol=limit * np.abs(outputs.logits).max())
    assert len(np.unique(outputs.argmax)) > 1


def test_a_record_lists_the_slots_which_add_up_and_look_like_training_images(exported):
    model = opal_deploy.load(exported / "c.opal.onnx", threads=1)
    record = model.predict(example_images(1, SIZE, SIZE)[0]).answered
    assert [slot.slot for slot in record.evidence] == list(range(SLOTS))
    parts = sum(slot.contribution for slot in record.evidence)
    assert parts + record.bias == pytest.approx(record.prediction.logit, abs=1e-5)
    metadata = read_metadata(exported / "c.opal.onnx")
    names = {path.name for path in exported.parent.glob("photographs*/data/train/*/*.png")}
    patches = [patch.image for row in metadata.known_patches.slots for patch in row.patches]
    assert patches
    assert names.issuperset(patches)


def test_a_dropped_slot_takes_exactly_its_score_from_the_logit(exported, photographs, opal):
    call = ("edit", "c.opal.onnx", "--drop", "elm/1", "--data", photographs, "--out", "edited.onnx", "--overwrite")
    check(opal(*call, *CPU, cwd=exported))
    before, after = (OnnxSession(exported / name, device="cpu") for name in ("c.opal.onnx", "edited.onnx"))
    images = example_images(4, SIZE, SIZE)
    whole, edited = before.run(images), after.run(images)
    expected = whole.logits.copy()
    expected[:, 2] -= whole.scores[:, 2 * SLOTS + 1]
    np.testing.assert_allclose(edited.logits, expected, atol=1e-5)
    assert after.metadata.dropped == (2 * SLOTS + 1,)


def test_baseline_atlas_and_drift_know_the_slots(exported, photographs, opal):
    model = exported / "measured.onnx"
    model.write_bytes((exported / "c.opal.onnx").read_bytes())
    check(opal("evaluate", photographs, "--model", model, "--split", "val", "--record", *CPU, cwd=exported))
    images = photographs / "val"
    check(opal("infer", images, "--model", model, "--explain", "--out", "run", *CPU, cwd=exported))
    assert {len(record["evidence"]) for record in read_results(exported / "run")} == {SLOTS}
    check(opal("drift", "run", "--baseline", model, cwd=exported))
    check(opal("verify", "run", "--model", model, *CPU, cwd=exported))
    check(opal("atlas", photographs, "--model", model, "--out", "atlas.html", *CPU, cwd=exported))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": ["ash", "birch", "elm", "yew"]}, "number 4"), ({"prototypes": 500}, "strong cells"),
        ({"slots": None}, "--slots"), ({"slots": "nowhere"}, "nowhere"),
    ],
)  # fmt: skip
def test_data_that_gives_no_slots_is_refused(changes, words, photographs, tmp_path):
    path = make(tmp_path / "c.onnx", [POOL, FLAT, DENSE])
    with pytest.raises(UsageError, match=words):
        opal_deploy.export_model(path, **OPTIONS | {"slots": photographs, "prototypes": SLOTS} | changes)
    assert [file.name for file in tmp_path.iterdir()] == ["c.onnx"]


def test_training_and_models_with_slots_name_the_right_command(exported, photographs, opal):
    for options in (("--head", "additive"), ("--start-from", "c.onnx")):
        assert "export CLASSIFIER.onnx --slots" in one_line(opal("train", photographs, *options, cwd=exported))
    assert "--slots" in one_line(opal("export", "c.opal.onnx", "--slots", photographs, cwd=exported))
