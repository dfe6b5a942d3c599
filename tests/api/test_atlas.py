"""Atlases of a whole set: images through a session into the collector, as `opal-deploy atlas` runs them."""

import hashlib

import numpy as np
import pytest
from PIL import Image

from opal_deploy.api.atlas import collect_images
from opal_deploy.predict.prepare import InferenceOptions
from opal_deploy.sources.image import InputImage
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.storage import load_atlas, write_atlas
from tests.bright import BrightSession


def write_spot(path, shade, cell=(1, 1), size=32):
    """Write a dark image with one cell of the 4 x 4 grid of `shade`: over 127 the session says `bright`."""
    pixels = np.zeros((size, size, 3), np.uint8)
    step = size // 4
    pixels[cell[0] * step : (cell[0] + 1) * step, cell[1] * step : (cell[1] + 1) * step] = shade
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def images(tmp_path):
    """Seven bright images, the higher their number the brighter; three dim ones, one of them in the wrong folder."""
    for number in range(7):
        write_spot(tmp_path / f"set/bright/{number}.png", 180 + 10 * number, (number % 4, 2))
    for name in ("dim/0", "dim/1", "bright/x"):
        write_spot(tmp_path / f"set/{name}.png", 20 + (name == "bright/x"))
    return tmp_path / "set"


def requests(folder):
    paths = sorted(folder.rglob("*.*"))
    return [InputImage(path.relative_to(folder).as_posix(), path, label=path.parent.name) for path in paths]


def collect(images, top=3, sessions=1, batch=4):
    made = [BrightSession() for _ in range(sessions)]
    collector = AtlasCollector(made[0].metadata, top)
    collect_images(images, made, InferenceOptions(batch=batch, workers=sessions), collector)
    return collector


def build(collector, out):
    data = {"description": "set", "answered": 10}
    return write_atlas(collector, out, {"file": "bright", "sha256": "f" * 64}, data)


def test_each_slot_has_the_images_that_it_was_strongest_in_whatever_the_order(images, tmp_path):
    atlas = build(collect(requests(images)), tmp_path / "atlas")
    # an image counts for the class that it is predicted as
    assert {patch.image for patch in atlas.patches(0, 0)} == {"dim/0.png"}
    assert [atlas.entries[class_id, 0].statistics.images for class_id in (0, 1)] == [3, 7]
    for slot in range(2):
        patches = atlas.patches(1, slot)
        assert [patch.image for patch in patches] == ["bright/6.png", "bright/5.png", "bright/4.png"]
        assert [patch.cell for patch in patches] == [(2, 2), (1, 2), (0, 2)]
        assert patches[0].sha256 == hashlib.sha256((images / "bright/6.png").read_bytes()).hexdigest()
        assert patches[0].box == (16.0, 16.0, 24.0, 24.0)
        # the patch is the bright cell
        assert np.abs(np.asarray(atlas.load_patch(patches[0]), int) - 240).max() <= 3
    assert load_atlas(tmp_path / "atlas") == atlas
    again = build(collect(requests(images)[::-1], sessions=2, batch=3), tmp_path / "b").entries
    assert {key: entry.patches for key, entry in again.items()} == {
        key: entry.patches for key, entry in atlas.entries.items()
    }
