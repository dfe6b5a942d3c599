import hashlib
import io
import random
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo, build_records
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.entries import SlotStatistics

SIZE = (64, 64)
CHANNELS = [(class_id, slot) for class_id in range(2) for slot in range(3)]


def metadata(distance="l2"):
    return Metadata(("a", "b"), 3, {"distance": distance, "epsilon": 1e-8}, "exact", "resnet18", (4, 4), SIZE)


def records(names, scores, cells, distance="l2"):
    scores, cells = scores.astype(np.float32), cells.astype(np.int32)
    outputs = Outputs(
        -np.sqrt(2 - 2 * cosines(scores, metadata(distance).class_map, 1e-8)).astype(np.float32), cells, scores
    )
    images = [ImageInfo(name, Geometry.whole(*SIZE)) for name in names]
    return build_records(images, outputs, metadata(distance))


def random_records(count, distance="l2"):
    """Return answers with random scores and cells; both classes are predicted."""
    generator = np.random.default_rng(0)
    scores, cells = generator.random((count, 6)), generator.integers(0, 16, (count, 6))
    return records([f"{row:03}.jpg" for row in range(count)], scores, cells, distance)


def record(name, cells, scores=(0.5, 0.4, 0.3)):
    """Return an answer for class a."""
    return records([name], np.array([[*scores, 0.01, 0.01, 0.01]]), np.array([[*cells, 0, 0, 0]]))[0]


def draw_image(name):
    generator = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    return Image.fromarray(generator.integers(0, 255, (*SIZE, 3), dtype=np.uint8))


def collect(records, top=4, distance="l2", digests=None):
    """Collect the records; `digests` are those of images that are the same under several names."""
    collector = AtlasCollector(metadata(distance), top)
    for each in records:
        name = each.image
        collector.add(each, sha256=(digests or {}).get(name, name), image=draw_image(name))
    return collector


def names(collector, class_id=0, slot=0):
    return [candidate.image for candidate in collector.best(class_id, slot)]


@pytest.mark.parametrize(("distance", "key"), [("l2", "contribution"), ("linf", "score"), ("l1", "score")])
def test_the_patches_kept_are_those_with_the_largest_contributions(distance, key):
    found = random_records(60, distance)
    collector = collect(found, distance=distance)
    for class_id, slot in CHANNELS:
        own = [each for each in found if each.prediction.class_id == class_id]
        assert len(own) > 8
        expected = sorted(own, key=lambda each: -getattr(each.evidence[slot], key))[:4]
        assert names(collector, class_id, slot) == [each.image for each in expected]


def test_patches_do_not_depend_on_the_order():
    found = random_records(40)

    def summary(records):
        collector = collect(records)
        return [[(c.image, c.key, c.jpeg) for c in collector.best(*channel)] for channel in CHANNELS]

    expected = summary(found)
    for seed in range(3):
        assert summary(random.Random(seed).sample(found, len(found))) == expected


def test_of_equal_contributions_the_first_name_comes_first():
    assert names(collect([record(f"{name}.jpg", (0, 1, 2)) for name in "dbac"], top=2)) == ["a.jpg", "b.jpg"]


def test_one_image_under_two_names_is_kept_once():
    found = [record("b.jpg", (0, 1, 2)), record("a.jpg", (0, 1, 2)), record("c.jpg", (0, 1, 2), (0.1, 0.2, 0.3))]
    for order in (found, found[::-1]):
        assert names(collect(order, digests={"a.jpg": "same", "b.jpg": "same"})) == ["a.jpg", "c.jpg"]


def test_a_patch_is_its_box_of_the_image_and_a_large_one_is_made_smaller():
    (best,) = collect([record("a.jpg", (5, 1, 2))]).best(0, 0)
    with Image.open(io.BytesIO(best.jpeg)) as patch:
        assert patch.size == (16, 16)
        difference = np.abs(np.asarray(patch, int) - np.asarray(draw_image("a.jpg").crop((16, 16, 32, 32)), int))
    assert difference.mean() < 20  # JPEG, of noise
    collector, large = AtlasCollector(metadata(), 1), record("a.jpg", (0, 1, 2))
    slot = structs.replace(large.evidence[0], box=(0.0, 0.0, 2000.0, 1000.0))
    collector.add(structs.replace(large, evidence=(slot,)), image=Image.new("RGB", (2000, 1000)))
    with Image.open(io.BytesIO(collector.best(0, 0)[0].jpeg)) as patch:
        assert patch.size == (160, 80)


def test_a_patch_shows_the_effective_field_where_it_is_known():
    field = {"stride": 16, "effective": 40, "effective_offset": 4}
    collector = AtlasCollector(replace(metadata(), receptive_field=field), 1)
    collector.add(record("a.jpg", (5, 0, 2)), image=draw_image("a.jpg"))
    # 40 pixels around 20, 20; around 4, 4, where the image ends
    assert [collector.best(0, slot)[0].patch.field for slot in (0, 1)] == [(0, 0, 40, 40), (0, 0, 24, 24)]
    with Image.open(io.BytesIO(collector.best(0, 1)[0].jpeg)) as patch:
        assert patch.size == (24, 24)


def test_the_statistics_are_those_of_a_hand_count():
    # slot 0 always at cell 5; slot 1 at 5 too in one of four; slot 2 wanders
    cells = [(5, 5, 0), (5, 6, 1), (5, 7, 2), (5, 8, 3)]
    collector = collect([record(f"{i}.jpg", each) for i, each in enumerate(cells)])
    first, second, third = (collector.statistics(0, slot) for slot in range(3))
    assert (first.images, first.own_cell, first.strongest) == (4, 0.75, 1.0)
    assert (first.top_cell, first.top_cell_share) == ((1, 1), 1.0)
    assert (second.own_cell, second.strongest) == (0.75, 0.0)
    assert (third.own_cell, third.top_cell_share) == (1.0, 0.25)
    assert first.mean_score == pytest.approx(0.5)
    assert first.mean_contribution == pytest.approx(record("x", (0, 1, 2)).evidence[0].contribution, abs=1e-7)
    assert collector.statistics(1, 0) == SlotStatistics(0), "never predicted"
    assert collector.count_cells() == (1, 1, 1, 1, 0, 5, 1, 1, 1) + (0,) * 7


def test_a_patch_knows_what_its_image_shows_where_the_label_is_one_of_the_models_classes():
    collector = AtlasCollector(metadata(), 4)
    for name, label in (("0.jpg", "a"), ("1.jpg", "b"), ("2.jpg", "photos"), ("3.jpg", None)):
        collector.add(record(name, (0, 1, 2)), label=label, sha256=name, image=draw_image(name))
    # an image of another class gives no patch
    assert {c.image: c.patch.label for c in collector.best(0, 0)} == {"0.jpg": "a", "2.jpg": None, "3.jpg": None}
    assert collector.labels == {0: {"a": 1, "b": 1}}
