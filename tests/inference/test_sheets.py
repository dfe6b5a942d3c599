from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sheets import SheetBuilder
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.visualization.sheet.layout import layout_sheet
from opal_deploy.visualization.sheet.rendering import encode_png


@pytest.mark.data
def test_the_sheet_of_a_photograph_says_what_its_record_says(
    exact_session: OnnxSession, photographs: list[Path]
) -> None:
    maker = SheetBuilder(exact_session)
    asked = [Request(str(path), path) for path in photographs[:4]]
    results = predict_stream(asked, [exact_session], InferenceOptions(batch=1, workers=1))
    for request, result in zip(asked, results, strict=True):
        content, record = maker.see(request).content, result.record
        assert content.image == record["image"]
        assert content.predicted.class_id == record["prediction"]["class_id"]
        assert content.runner_up.class_id == record["top"][1]["class_id"]
        assert content.margin == pytest.approx(record["margin"], abs=1e-6)
        assert content.predicted.total == pytest.approx(record["prediction"]["cosine"], abs=1e-6)
        assert content.runner_up.total == pytest.approx(record["top"][1]["cosine"], abs=1e-6)
        slots = sorted(content.predicted.slots, key=lambda slot: slot.slot)
        assert [list(slot.cell) for slot in slots] == [slot["cell"] for slot in record["evidence"]]
        assert [list(slot.box) for slot in slots] == [slot["box"] for slot in record["evidence"]]
        assert content.predicted.slots[0].attention is None


@pytest.mark.data
def test_the_sheet_of_a_photograph_is_the_same_every_time(exact_session: OnnxSession, photographs: list[Path]) -> None:
    request = Request("a.jpg", photographs[0])
    first, second = (SheetBuilder(exact_session).see(request) for _ in range(2))
    assert encode_png(layout_sheet(first.content, first.photograph)) == encode_png(
        layout_sheet(second.content, second.photograph)
    )


@pytest.mark.data
def test_a_checkpoint_can_always_show_its_attention(exact_model: Path, photographs: list[Path]) -> None:
    from opal_deploy.runtime.torch_session import TorchSession

    session = TorchSession(exact_model.with_suffix(".pt"), device="cpu")
    request = Request("a.jpg", photographs[0])
    content = SheetBuilder(session, heatmap=True).see(request).content
    for view in (content.predicted, content.runner_up):
        for slot in view.slots:
            assert slot.attention.max() == slot.score
            assert np.unravel_index(slot.attention.argmax(), slot.attention.shape) == slot.cell
    assert SheetBuilder(session).see(request).content.predicted.slots[0].attention is None


@pytest.mark.parametrize("heatmap", [True, False])
def test_an_export_with_attention_shows_it_on_request(bright_session, tmp_path: Path, heatmap: bool) -> None:
    session = bright_session()
    session.metadata = replace(session.metadata, outputs=("logits", "argmax", "scores", "attention"))
    plain_run, maps = session.run, np.random.default_rng(0).random((1, 4, 4, 4)).astype(np.float32)
    session.run = lambda images: replace(plain_run(images), attention=maps)
    Image.new("RGB", (32, 32), "white").save(tmp_path / "a.png")
    content = SheetBuilder(session, heatmap=heatmap).see(Request("a.png", tmp_path / "a.png")).content
    for slot in content.predicted.slots:
        assert (slot.attention == maps[0, slot.channel]).all() if heatmap else slot.attention is None


def test_an_export_without_attention_names_the_command_that_gives_it(exact_session: OnnxSession) -> None:
    with pytest.raises(UsageError, match=r"m\.onnx: .*opal-deploy export exact\.pt --outputs attention"):
        SheetBuilder(exact_session, heatmap=True, model="m.onnx")


@pytest.mark.parametrize(("evidence", "why"), [("map", "averages over cells"), ("none", "no anchors")])
def test_a_model_without_exact_evidence_is_refused_with_the_reason(bright_session, evidence: str, why: str) -> None:
    session = bright_session()
    session.metadata = replace(session.metadata, evidence=evidence)
    with pytest.raises(UsageError, match=why):
        SheetBuilder(session)


def test_a_box_crops_what_the_model_is_shown_and_places_stay_the_whole_pictures(bright_session, tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[40:48, 48:56] = 250
    Image.fromarray(pixels).save(tmp_path / "a.png")
    seen = SheetBuilder(bright_session()).see(Request("a.png", tmp_path / "a.png", (32, 32, 64, 64)))
    assert seen.content.crop == (32, 32, 64, 64)
    assert seen.content.predicted.slots[0].box == (48.0, 40.0, 56.0, 48.0)
    assert seen.photograph.size == (64, 64)


def test_a_picture_that_cannot_be_used_says_why(bright_session, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(ImageError) as error:
        SheetBuilder(bright_session()).see(Request("a.jpg", tmp_path / "a.jpg"))
    assert error.value.code == "empty_file"
