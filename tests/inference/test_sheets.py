"""Sheets from inference results: when they are refused, and where boxes, attention maps and exemplars come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import UsageError
from opal_deploy.inference.atlas import collect_images
from opal_deploy.inference.executor import predict_stream
from opal_deploy.inference.sheets import Sheet, SheetBuilder, SheetOptions, with_attention
from opal_deploy.inference.types import InferenceOptions, InputImage
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.storage import build_atlas
from tests.inference.bright import BrightSession, save

OPTIONS = InferenceOptions(batch=1, workers=1, keep_images=True, keep_outputs=True)


def build(session: Any, path: Path, options: SheetOptions | None = None, **request: Any) -> Sheet:
    (result,) = predict_stream([InputImage(path.name, path, **request)], [session], OPTIONS)
    return SheetBuilder(session.metadata, options).build(result)


def test_results_have_their_outputs_only_with_keep_outputs(tmp_path: Path) -> None:
    requests = [InputImage(str(shade), save(tmp_path / f"{shade}.png", shade=shade)) for shade in (0, 200)]
    requests.append(InputImage("broken", b"no"))
    for keep in (False, True):
        for result in predict_stream(requests, [BrightSession()], InferenceOptions(batch=4, keep_outputs=keep)):
            assert isinstance(result.outputs, Outputs) == (keep and result.record["status"] == "ok")
            if result.outputs is not None:
                best, prediction = int(result.outputs.logits[0].argmax()), result.record["prediction"]
                assert result.outputs.logits.shape == (1, 2)
                assert (best, float(result.outputs.logits[0, best])) == (prediction["class_id"], prediction["logit"])


def test_a_checkpoint_answers_with_its_maps_and_otherwise_alike(exact_model: Path) -> None:
    from opal_deploy.runtime.torch_session import TorchSession

    session = TorchSession(exact_model.with_suffix(".pt"), device="cpu", threads=1)
    (asked,) = with_attention([session])
    images = np.random.default_rng(0).integers(0, 255, (2, *session.metadata.input_size, 3), np.uint8)
    plain, found = session.run(images), asked.run(images)
    assert plain.attention is None
    assert found.attention is not None
    assert (found.logits == plain.logits).all()
    assert (found.scores == plain.scores).all()
    assert (found.attention.max((2, 3)) == found.scores).all()
    assert (found.attention.reshape(*found.attention.shape[:2], -1).argmax(2) == found.argmax).all()
    assert (asked.metadata, asked.description) == (session.metadata, session.description)


@pytest.mark.parametrize("heatmap", [True, False])
def test_an_export_with_attention_shows_it_on_request(tmp_path: Path, heatmap: bool) -> None:
    session = BrightSession()
    session.metadata = replace(session.metadata, outputs=("logits", "argmax", "scores", "attention"))
    plain_run, maps = session.run, np.random.default_rng(0).random((1, 4, 4, 4)).astype(np.float32)
    session.run = lambda images: replace(plain_run(images), attention=maps)  # type: ignore[method-assign]
    assert with_attention([session]) == [session]
    for slot in build(session, save(tmp_path / "a.png"), SheetOptions(heatmap=heatmap)).content.predicted.slots:
        assert (slot.attention == maps[0, slot.channel]).all() if heatmap else slot.attention is None


def test_an_export_without_attention_names_the_command_that_gives_it(exact_session: OnnxSession) -> None:
    with pytest.raises(UsageError, match=r"m\.onnx: .*opal-deploy export exact\.pt --outputs attention"):
        with_attention([exact_session], "m.onnx")


@pytest.mark.parametrize(("evidence", "reason"), [("map", "averages over cells"), ("none", "no anchors")])
def test_a_model_without_exact_evidence_is_refused(evidence: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SheetBuilder(replace(BrightSession().metadata, evidence=evidence))


def test_a_box_crops_the_view_and_places_stay_those_of_the_whole_image(tmp_path: Path) -> None:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[40:48, 48:56] = 250
    Image.fromarray(pixels).save(tmp_path / "a.png")
    content = build(BrightSession(), tmp_path / "a.png", crop=(32, 32, 64, 64)).content
    assert content.crop == (32, 32, 64, 64)
    assert content.predicted.slots[0].box == (48.0, 40.0, 56.0, 48.0)


def test_an_image_is_never_its_own_exemplar(tmp_path: Path) -> None:
    session = BrightSession()
    images = [save(tmp_path / f"{number}.png", (32, 32), 150 + 20 * number) for number in range(4)]
    collector = AtlasCollector(session.metadata, 3)
    collect_images([InputImage(path.name, path) for path in images], [session], OPTIONS, collector)
    atlas = build_atlas(collector, tmp_path / "atlas", {"file": "m", "sha256": "f"}, {})
    # under another name, so that only the bytes can tell
    copy = save(tmp_path / "copy.png", (32, 32), 210)
    for rows, expected in ((4, ["2.png", "1.png"]), (1, ["2.png"])):
        drawing = build(session, copy, SheetOptions(atlas=atlas, exemplar_rows=rows)).drawing
        alts = [shape.alt for shape in drawing.shapes if getattr(shape, "alt", "").startswith("slot 0 in ")]
        assert [alt.split(" in ")[1].split(",")[0] for alt in alts] == expected
