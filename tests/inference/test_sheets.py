"""Sheets from inference results: what they say, when they are refused, and where attention maps come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opal_deploy.cli.atlas import collect_images
from opal_deploy.errors import UsageError
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sheets import Sheet, SheetBuilder, SheetOptions, with_attention
from opal_deploy.inference.types import InferenceOptions, Request, Result
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.storage import build_atlas

OPTIONS = InferenceOptions(batch=1, workers=1, keep_images=True, keep_outputs=True)
WITH_ATTENTION = ("logits", "argmax", "scores", "attention")


def answer(session: Any, *requests: Request) -> list[Result]:
    return list(predict_stream(requests, [session], OPTIONS))


def build(session: Any, request: Request, options: SheetOptions | None = None) -> Sheet:
    (result,) = answer(session, request)
    return SheetBuilder(session.metadata, options).build(result, result.prepared.image)


@pytest.mark.data
def test_the_sheet_of_a_photograph_says_what_its_record_says(
    exact_session: OnnxSession, photographs: list[Path]
) -> None:
    builder = SheetBuilder(exact_session.metadata)
    for result in answer(exact_session, *(Request(str(path), path) for path in photographs[:4])):
        sheet, record = builder.build(result, result.prepared.image), result.record
        content = sheet.content
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
        assert builder.build(result, result.prepared.image).encode() == sheet.encode()


@pytest.mark.data
def test_a_checkpoint_can_always_show_its_attention(exact_model: Path, photographs: list[Path]) -> None:
    from opal_deploy.runtime.torch_session import TorchSession

    session = TorchSession(exact_model.with_suffix(".pt"), device="cpu")
    (attentive,) = with_attention([session])
    content = build(attentive, Request("a.jpg", photographs[0]), SheetOptions(heatmap=True)).content
    for view in (content.predicted, content.runner_up):
        for slot in view.slots:
            assert slot.attention.max() == slot.score
            assert np.unravel_index(slot.attention.argmax(), slot.attention.shape) == slot.cell


@pytest.mark.parametrize("heatmap", [True, False])
def test_an_export_with_attention_shows_it_on_request(bright_session: Callable, tmp_path: Path, heatmap: bool) -> None:
    session = bright_session()
    session.metadata = replace(session.metadata, outputs=WITH_ATTENTION)
    plain_run, maps = session.run, np.random.default_rng(0).random((1, 4, 4, 4)).astype(np.float32)
    session.run = lambda images: replace(plain_run(images), attention=maps)
    assert with_attention([session]) == [session]
    Image.new("RGB", (32, 32), "white").save(tmp_path / "a.png")
    content = build(session, Request("a.png", tmp_path / "a.png"), SheetOptions(heatmap=heatmap)).content
    for slot in content.predicted.slots:
        assert (slot.attention == maps[0, slot.channel]).all() if heatmap else slot.attention is None


def test_an_export_without_attention_names_the_command_that_gives_it(exact_session: OnnxSession) -> None:
    with pytest.raises(UsageError, match=r"m\.onnx: .*opal-deploy export exact\.pt --outputs attention"):
        with_attention([exact_session], "m.onnx")


@pytest.mark.parametrize(("evidence", "reason"), [("map", "averages over cells"), ("none", "no anchors")])
def test_a_model_without_exact_evidence_is_refused(bright_session: Callable, evidence: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SheetBuilder(replace(bright_session().metadata, evidence=evidence))


def test_a_box_crops_the_view_and_places_stay_those_of_the_whole_image(
    bright_session: Callable, tmp_path: Path
) -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[40:48, 48:56] = 250
    Image.fromarray(pixels).save(tmp_path / "a.png")
    content = build(bright_session(), Request("a.png", tmp_path / "a.png", (32, 32, 64, 64))).content
    assert content.crop == (32, 32, 64, 64)
    assert content.predicted.slots[0].box == (48.0, 40.0, 56.0, 48.0)


def test_an_image_is_never_its_own_exemplar(bright_session: Callable, tmp_path: Path) -> None:
    session = bright_session()
    for number in range(4):
        Image.new("RGB", (32, 32), (150 + 20 * number,) * 3).save(tmp_path / f"{number}.png")
    images = [Request(path.name, path) for path in sorted(tmp_path.iterdir())]
    collector = AtlasCollector(session.metadata, 3)
    collect_images(images, [session], OPTIONS, collector)
    atlas = build_atlas(collector, tmp_path / "atlas", {"file": "m", "sha256": "f"}, {})
    # under another name, so that only the bytes can tell
    (tmp_path / "copy.png").write_bytes((tmp_path / "3.png").read_bytes())
    for rows, expected in ((4, ["2.png", "1.png"]), (1, ["2.png"])):
        options = SheetOptions(atlas=atlas, exemplar_rows=rows)
        sheet = build(session, Request("copy.png", tmp_path / "copy.png"), options)
        alts = [shape.alt for shape in sheet.drawing.shapes if getattr(shape, "alt", "").startswith("slot 0 in ")]
        assert [alt.split(" in ")[1].split(",")[0] for alt in alts] == expected
