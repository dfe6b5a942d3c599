"""Sheets from inference results: when they are refused, and where boxes, attention maps and exemplars come from."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from opal_deploy.api.atlas import collect_images
from opal_deploy.predict.executor import predict_stream
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.run.sheets import SheetBuilder, SheetOptions, with_attention
from opal_deploy.sources.image import InputImage
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.storage import build_atlas
from tests.bright import BrightSession, save

OPTIONS = InferenceOptions(batch=1, workers=1, keep_images=True, keep_outputs=True)


def build(session, path, options=None, **request):
    (result,) = predict_stream([InputImage(path.name, path, **request)], [session], OPTIONS)
    return SheetBuilder(session.metadata, options).build(result)


def test_a_checkpoint_answers_with_its_maps_and_otherwise_alike(exact_model):
    from opal_deploy.runtime.torch_session import TorchSession

    session = TorchSession(exact_model.with_suffix(".pt"), device="cpu", threads=1)
    (asked,) = with_attention([session])
    images = np.random.default_rng(0).integers(0, 255, (2, *session.metadata.input_size, 3), np.uint8)
    plain, found = session.run(images), asked.run(images)
    assert plain.attention is None
    assert (found.logits == plain.logits).all()
    assert (found.scores == plain.scores).all()
    assert (found.attention.max((2, 3)) == found.scores).all()
    assert (found.attention.reshape(*found.attention.shape[:2], -1).argmax(2) == found.argmax).all()
    assert (asked.metadata, asked.description) == (session.metadata, session.description)


@pytest.mark.parametrize("heatmap", [True, False])
def test_an_export_with_attention_shows_it_on_request(tmp_path, heatmap):
    session = BrightSession()
    session.metadata = replace(session.metadata, outputs=("logits", "argmax", "scores", "attention"))
    plain_run, maps = session.run, np.random.default_rng(0).random((1, 4, 4, 4)).astype(np.float32)
    session.run = lambda images: replace(plain_run(images), attention=maps)
    assert with_attention([session]) == [session]
    for slot in build(session, save(tmp_path / "a.png"), SheetOptions(heatmap=heatmap)).content.predicted.slots:
        assert (slot.attention == maps[0, slot.channel]).all() if heatmap else slot.attention is None


def test_a_box_crops_the_view_and_places_stay_those_of_the_whole_image(tmp_path):
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[40:48, 48:56] = 250
    Image.fromarray(pixels).save(tmp_path / "a.png")
    content = build(BrightSession(), tmp_path / "a.png", crop=(32, 32, 64, 64)).content
    assert content.crop == (32, 32, 64, 64)
    assert content.predicted.slots[0].box == (48.0, 40.0, 56.0, 48.0)


def test_an_image_is_never_its_own_exemplar(tmp_path):
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
