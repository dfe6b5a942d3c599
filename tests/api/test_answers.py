"""Answers have typed attributes, models can do without slots, and a wrong name says which is right."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import opal_deploy
from opal_deploy.errors import ImageError, UsageError


@pytest.fixture
def paths(make_pictures, tmp_path):
    return make_pictures(tmp_path, 4)


def test_an_answer_has_typed_attributes_and_pictures(model, paths):
    answers = model.predict([*paths, paths[0].with_name("none.png")])
    first = answers[0]
    assert (first.label, first.status, first.margin) == (first["prediction"]["label"], "ok", first["margin"])
    assert [slot.box for slot in first.slots] == first.boxes
    assert (first.probability, first.true_label) == (None, None)
    assert repr(first) == f"<Explanation {first}>"
    assert json.loads(first.to_json()) == json.loads(json.dumps(first))
    assert first.overlay().mode == "RGB"
    assert first.sheet().mode == "RGB"
    assert answers[-1].status == "error"
    with pytest.raises(ImageError, match=r"none\.png"):
        answers[-1].label  # noqa: B018
    assert isinstance(answers[1:3], opal_deploy.Explanations)
    assert len(answers[:2].to_coco()["images"]) == 2


def test_tensors_are_images_with_their_channels_first(model, paths):
    torch = pytest.importorskip("torch")
    pixels = [np.asarray(Image.open(path).convert("RGB").resize((64, 48))) for path in paths]
    batch = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    expected = model.predict(pixels)
    assert model.predict(batch) == model.predict(list(batch)) == expected
    assert model.predict(batch[0]) == expected[0] == next(model.stream(batch[0]))
    for wrong in (batch.float(), batch.numpy(), batch[0].numpy(), pixels[0].astype(float)):
        with pytest.raises(UsageError, match=r"; expected uint8 \[H, W, 3\]"):
            model.predict(wrong)
    # of a stream, only the image is refused
    assert [each.status for each in model.stream([pixels[0], batch[1].float(), paths[0].parent, batch[2]])] == [
        "ok", "error", "error", "ok",
    ]  # fmt: skip


def test_a_stream_refuses_at_once_and_reports_what_it_did(model, paths):
    with pytest.raises(UsageError, match="no such file"):
        model.stream("none/")
    seen = []
    list(model.stream(paths, progress=lambda done, total, note: seen.append((done, total))))
    assert seen == [(number, None) for number in range(1, len(paths) + 1)]


@pytest.mark.parametrize("several", ["", "*.png"])
def test_a_folder_or_a_pattern_is_for_stream(model, paths, several):
    folder = paths[0].parent
    given = f"{folder}/{several}" if several else str(folder)
    with pytest.raises(UsageError, match=r"use model\.stream"):
        model.predict(given)
    assert [each.label for each in model.stream(given)] == [each.label for each in model.predict(paths)]


def test_what_people_try_from_habit_names_what_to_use(exact_model, make_pictures, tmp_path):
    (path,) = make_pictures(tmp_path / "in", 1)
    model = opal_deploy.load(exact_model, threads=1)
    answers = model.predict([path])
    guesses = [
        (AttributeError, "use load", lambda: opal_deploy.load_model),
        (TypeError, "batch_size", lambda: model.predict(path, batch_size=2)),
        (TypeError, "'epoch'", lambda: opal_deploy.train_model("x", epoch=1)),
        (TypeError, r"opal_deploy.load\(path\)", lambda: opal_deploy.Model(exact_model)),
        (TypeError, r"opal_deploy.load\(path\)", lambda: opal_deploy.ModelApp(exact_model)),
        (UsageError, "BytesIO found; expected paths, bytes", lambda: model.predict(io.BytesIO())),
        (UsageError, "type object found; expected paths, bytes", lambda: model.predict([object()])),
        (UsageError, r"expected 'CLASS/SLOT'", lambda: opal_deploy.edit_model(model, drop=[[0]], out="e.onnx")),
        (UsageError, r"expected a \.jpg file", lambda: answers[0].save_overlay(tmp_path / "o.png")),
        (UsageError, r"use model\.stream", lambda: model.predict([tmp_path / "in"])),
        (UsageError, "batch -2: expected at least 1", lambda: model.predict(path, batch=-2)),
        (UsageError, "top 0: expected at least 1", lambda: model.predict(path, top=0)),
        (UsageError, "workers 0: expected at least 1", lambda: list(model.stream(path, workers=0))),
        (UsageError, "threads 0: expected at least 1", lambda: opal_deploy.load(exact_model, threads=0)),
        (UsageError, "runtime 'tpu': expected one of auto", lambda: opal_deploy.load(exact_model, runtime="tpu")),
        (UsageError, "nothing to do", lambda: opal_deploy.edit_model(model, out=tmp_path / "same.onnx")),
    ]
    for kind, message, guess in guesses:
        with pytest.raises(kind, match=message):
            guess()
    assert answers[0].top == answers[0].record.top
    assert len(model.predict(np.array([str(path)] * 2))) == 2


def test_a_model_of_crops_says_so_once(tmp_path, exact_model, make_pictures, caplog):
    (path,) = make_pictures(tmp_path / "in", 1)
    model = opal_deploy.load(exact_model.parent, threads=1)
    model.metadata = replace(model.metadata, crop="boxes")
    model.predict(path, boxes=(0, 0, 9, 9))
    assert caplog.messages == []
    model.predict(path)
    model.predict(path)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "This model was trained on images cropped to boxes; expect lower accuracy without them"
    ]
