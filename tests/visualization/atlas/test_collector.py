from __future__ import annotations

import hashlib
import io
import random

import numpy as np
import pytest
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, cosines
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import Record, build_record
from opal_deploy.visualization.atlas.collector import AtlasCollector
from opal_deploy.visualization.atlas.entries import SlotStatistics, list_findings

GRID = (4, 4)
SIZE = (64, 64)


def metadata(distance: str = "l2") -> Metadata:
    return Metadata(("a", "b"), 3, {"distance": distance, "epsilon": 1e-8}, "exact", "resnet18", GRID, (64, 64))


def some_records(count: int, distance: str = "l2") -> list[Record]:
    """Answers with random scores and cells; both classes are predicted."""
    generator = np.random.default_rng(0)
    scores = generator.random((count, 6)).astype(np.float32)
    cells = generator.integers(0, 16, (count, 6)).astype(np.int32)
    logits = -np.sqrt(2 - 2 * cosines(scores, 3, 1e-8)).astype(np.float32)
    outputs = Outputs(logits, cells, scores)
    return [
        build_record(f"{row:03}.jpg", Geometry.whole(*SIZE), outputs, row, metadata(distance)) for row in range(count)
    ]


def record(name: str, cells: tuple[int, int, int], scores: tuple[float, float, float] = (0.5, 0.4, 0.3)) -> Record:
    """An answer for class a."""
    values = np.array([[*scores, 0.01, 0.01, 0.01]], dtype=np.float32)
    where = np.array([[*cells, 0, 0, 0]], dtype=np.int32)
    logits = -np.sqrt(2 - 2 * cosines(values, 3, 1e-8)).astype(np.float32)
    return build_record(name, Geometry.whole(*SIZE), Outputs(logits, where, values), 0, metadata())


def image_of(name: str) -> Image.Image:
    generator = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    return Image.fromarray(generator.integers(0, 255, (*SIZE, 3), dtype=np.uint8))


def collected(
    records: list[Record], top: int = 4, distance: str = "l2", content: dict[str, str] | None = None
) -> AtlasCollector:
    """`content`: digests of pictures that are the same under several names."""
    collector = AtlasCollector(metadata(distance), top)
    for each in records:
        name = each["image"]
        collector.add(each, sha256=(content or {}).get(name, name), image=image_of(name))
    return collector


def kept(collector: AtlasCollector) -> list[list[tuple[str, float, bytes | None]]]:
    return [[(c.image, c.key, c.jpeg) for c in collector.best(i, slot)] for i in range(2) for slot in range(3)]


@pytest.mark.parametrize("distance", ["l2", "linf", "l1"])
def test_the_patches_kept_are_those_with_the_largest_contributions(distance: str) -> None:
    records = some_records(60, distance)
    collector = collected(records, distance=distance)
    for class_id in range(2):
        of_class = [r for r in records if r["prediction"]["class_id"] == class_id]
        assert len(of_class) > 8
        for slot in range(3):
            by = "contribution" if distance == "l2" else "score"
            expected = sorted(of_class, key=lambda r: -r["evidence"][slot][by])[:4]
            assert [c.image for c in collector.best(class_id, slot)] == [r["image"] for r in expected]


def test_what_is_kept_and_counted_does_not_depend_on_the_order() -> None:
    records = some_records(40)
    first = collected(records)
    for seed in range(3):
        shuffled = records.copy()
        random.Random(seed).shuffle(shuffled)
        other = collected(shuffled)
        assert kept(other) == kept(first)
        assert [other.statistics(c, s) for c in range(2) for s in range(3)] == [
            first.statistics(c, s) for c in range(2) for s in range(3)
        ]


def test_of_equal_contributions_the_first_name_comes_first() -> None:
    records = [record(name, (0, 1, 2)) for name in ("d.jpg", "b.jpg", "a.jpg", "c.jpg")]
    assert [c.image for c in collected(records, top=2).best(0, 0)] == ["a.jpg", "b.jpg"]


def test_one_picture_under_two_names_is_kept_once() -> None:
    records = [record("b.jpg", (0, 1, 2)), record("a.jpg", (0, 1, 2)), record("c.jpg", (0, 1, 2), (0.1, 0.2, 0.3))]
    for order in (records, records[::-1]):
        collector = collected(order, content={"a.jpg": "same", "b.jpg": "same"})
        assert [c.image for c in collector.best(0, 0)] == ["a.jpg", "c.jpg"]


def test_a_patch_is_its_box_of_the_image_of() -> None:
    collector = collected([record("a.jpg", (5, 1, 2))])
    (best,) = collector.best(0, 0)
    with Image.open(io.BytesIO(best.jpeg)) as found:
        assert found.size == (16, 16)
        difference = np.abs(np.asarray(found, int) - np.asarray(image_of("a.jpg").crop((16, 16, 32, 32)), int))
    assert difference.mean() < 20  # JPEG, of noise


def test_a_large_patch_is_made_smaller() -> None:
    collector = AtlasCollector(metadata(), 1)
    large = record("a.jpg", (0, 1, 2))
    large["evidence"][0]["box"] = [0.0, 0.0, 2000.0, 1000.0]
    collector.add(large, image=Image.new("RGB", (2000, 1000)))
    with Image.open(io.BytesIO(collector.best(0, 0)[0].jpeg)) as found:
        assert found.size == (160, 80)


def test_the_statistics_are_those_of_a_hand_count() -> None:
    # slot 0 always at cell 5; slot 1 at 5 too in one of four; slot 2 wanders
    cells = [(5, 5, 0), (5, 6, 1), (5, 7, 2), (5, 8, 3)]
    collector = collected([record(f"{i}.jpg", each) for i, each in enumerate(cells)])
    first, second, third = (collector.statistics(0, slot) for slot in range(3))
    assert (first.images, first.own_cell, first.strongest) == (4, 0.75, 1.0)
    assert (first.top_cell, first.top_cell_share, first.entropy, first.spread) == ((1, 1), 1.0, 0.0, 0.0)
    assert (second.own_cell, second.strongest) == (0.75, 0.0)
    assert (third.own_cell, third.entropy, third.top_cell_share) == (1.0, 2.0, 0.25)
    # four cells in a row: columns 1/8, 3/8, 5/8, 7/8 have the variance 5/64
    assert third.spread == pytest.approx((5 / 64 / 2) ** 0.5)
    assert first.mean_score == pytest.approx(0.5)
    assert first.mean_contribution == pytest.approx(record("x", (0, 1, 2))["evidence"][0]["contribution"], abs=1e-7)


def test_every_chosen_cell_is_counted_and_a_class_that_is_never_predicted_has_no_statistics() -> None:
    collector = collected([record("a.jpg", (0, 1, 1)), record("b.jpg", (0, 2, 3))])
    assert collector.count_cells() == (2, 2, 1, 1) + (0,) * 12
    assert collector.statistics(1, 0) == SlotStatistics(0)


def statistics(images: int = 10, own: float = 0.9, part: float | None = 0.3, share: float = 0.2) -> SlotStatistics:
    return SlotStatistics(images, own, 0.3, 0.5, part, (1, 1), share, 2.0, 0.2)


@pytest.mark.parametrize(
    ("slots", "kinds"),
    [
        ([statistics(), statistics()], []),
        ([statistics(own=0.05), statistics()], [("shares_its_cell", 0)]),
        ([statistics(), statistics(part=0.01)], [("adds_little", 1)]),
        ([statistics(), statistics(share=0.6)], [("one_place", 1)]),
        (
            [statistics(own=0.05), statistics(share=0.6, part=0.01)],
            [("shares_its_cell", 0), ("adds_little", 1), ("one_place", 1)],
        ),
        ([statistics(images=4, own=0.0, share=1.0)] * 2, []),
        ([SlotStatistics(0)] * 2, [("never_predicted", None)]),
        ([statistics(part=None)] * 2, []),
        ([statistics(own=0.0)], []),
        ([statistics(share=0.5)] * 2, []),
    ],
    ids=["well", "shares", "little", "one place", "several", "few images", "never", "no sum", "single", "half"],
)
def test_the_to_do_list_names_what_does_not_do_its_part(
    slots: list[SlotStatistics], kinds: list[tuple[str, int | None]]
) -> None:
    assert [(finding.kind, finding.slot) for finding in list_findings(0, "oak", slots)] == kinds
