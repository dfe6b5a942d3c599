from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.atlas import Labelled, collect, write_patches
from opal_deploy.inference.decoding.prepare import content_sha256
from opal_deploy.inference.sheets import SheetBuilder
from opal_deploy.inference.sources.discovery import discover
from opal_deploy.inference.sources.items import Skipped
from opal_deploy.inference.types import InferenceOptions, Request
from opal_deploy.visualization.atlas.exemplars import find_exemplars
from opal_deploy.visualization.atlas.storage import Atlas, write_atlas

OPTIONS = InferenceOptions(batch=4, workers=1)
MODEL = {"file": "bright", "sha256": "f" * 64}


def spot(path: Path, shade: int, cell: tuple[int, int] = (1, 1), size: int = 32) -> Path:
    """A dark picture with one cell of the 4 x 4 grid of `shade`: over 127 the session says `bright`."""
    pixels = np.zeros((size, size, 3), np.uint8)
    step = size // 4
    pixels[cell[0] * step : (cell[0] + 1) * step, cell[1] * step : (cell[1] + 1) * step] = shade
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def labelled(folder: Path) -> list[Labelled]:
    return [
        Labelled(Request(path.relative_to(folder).as_posix(), path), path.parent.name)
        for path in sorted(folder.rglob("*.*"))
    ]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Seven bright ones, the higher their number the brighter; three dim ones, one of them in the wrong folder."""
    for number in range(7):
        spot(tmp_path / "set" / "bright" / f"{number}.png", 180 + 10 * number, (number % 4, 2))
    for number in range(2):
        spot(tmp_path / "set" / "dim" / f"{number}.png", 20)
    spot(tmp_path / "set" / "bright" / "x.png", 21)
    return tmp_path / "set"


def build(folder: Path, session, out: Path, top: int = 3, **how) -> Atlas:  # type: ignore[no-untyped-def]
    collector, _ = collect(labelled(folder), [session], OPTIONS, top, **how)
    atlas = write_patches(collector, out, MODEL, {"description": "set", "answered": 10})
    write_atlas(atlas)
    return atlas


def test_each_slot_has_the_pictures_that_it_was_strongest_in(pictures: Path, bright_session, tmp_path: Path) -> None:
    atlas = build(pictures, bright_session(), tmp_path / "atlas")
    for slot in range(2):
        patches = atlas.rows(1, slot)
        assert [patch.image for patch in patches] == ["bright/6.png", "bright/5.png", "bright/4.png"]
        assert [patch.cell for patch in patches] == [(2, 2), (1, 2), (0, 2)]
        assert patches[0].sha256 == hashlib.sha256((pictures / "bright/6.png").read_bytes()).hexdigest()
        assert patches[0].box == (16.0, 16.0, 24.0, 24.0)
        # the patch is the bright cell
        assert np.abs(np.asarray(atlas.picture(patches[0]), int) - 240).max() <= 3
    assert Atlas.load(tmp_path / "atlas") == atlas


def test_a_picture_counts_for_the_class_that_it_is_predicted_as(pictures: Path, bright_session, tmp_path: Path) -> None:
    atlas = build(pictures, bright_session(), tmp_path / "atlas", top=9)
    assert {patch.image for patch in atlas.rows(0, 0)} == {"dim/0.png", "bright/x.png"}
    assert atlas.entries[0, 0].figures.images == 3
    assert atlas.entries[1, 0].figures.images == 7


def test_only_correct_leaves_out_what_is_predicted_wrong(pictures: Path, bright_session) -> None:
    collector, counts = collect(labelled(pictures), [bright_session()], OPTIONS, 9, only_correct=True)
    assert (counts.images, counts.wrong, counts.counted) == (10, 1, 9)
    assert [c.image for c in collector.best(0, 0)] == ["dim/0.png"]
    _, counts = collect(
        [Labelled(p.request) for p in labelled(pictures)], [bright_session()], OPTIONS, 9, only_correct=True
    )
    assert (counts.unlabelled, counts.counted) == (10, 0)


def test_the_order_and_the_batches_of_the_pictures_do_not_matter(
    pictures: Path, bright_session, tmp_path: Path
) -> None:
    first = build(pictures, bright_session(), tmp_path / "first")
    collector, _ = collect(labelled(pictures)[::-1], [bright_session()] * 2, InferenceOptions(batch=3, workers=2), 3)
    assert write_patches(collector, tmp_path / "other", MODEL, first.data).entries == first.entries


def test_a_picture_that_cannot_be_used_costs_the_others_nothing(pictures: Path, bright_session) -> None:
    (pictures / "bright" / "7.png").write_bytes(b"no picture")
    collector, counts = collect(labelled(pictures), [bright_session()], OPTIONS, 9)
    assert (counts.images, counts.failed, counts.counted) == (11, 1, 10)
    assert "bright/7.png" in counts.first_failures[0]
    assert collector.images(1) == 7


def test_pictures_too_large_to_keep_are_cut_all_the_same(bright_session, tmp_path: Path) -> None:
    spot(tmp_path / "set" / "a.png", 200, (3, 0), 2048)
    collector, _ = collect(labelled(tmp_path / "set"), [bright_session()], OPTIONS, 2)
    (best,) = collector.best(1, 0)
    with Image.open(io.BytesIO(best.jpeg)) as patch:
        assert patch.size == (160, 160)
        assert np.abs(np.asarray(patch, int) - 200).max() <= 3


def test_the_members_of_an_archive_count_as_files_do(pictures: Path, bright_session, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for path in sorted(pictures.rglob("*.png")):
            archive.write(path, path.relative_to(pictures).as_posix())
    members = [Labelled(Request(i.relative, i.source)) for i in discover([str(tmp_path / "set.zip")], Skipped())]
    collector, _ = collect(members, [bright_session()], OPTIONS, 3)
    expected = build(pictures, bright_session(), tmp_path / "atlas").rows(1, 0)
    assert [(c.image, c.sha256) for c in collector.best(1, 0)] == [(p.image, p.sha256) for p in expected]


@pytest.mark.parametrize(("evidence", "why"), [("map", "averages over cells"), ("none", "no anchors")])
def test_a_model_without_exact_evidence_is_refused(bright_session, evidence: str, why: str) -> None:
    session = bright_session()
    session.metadata = dataclasses.replace(session.metadata, evidence=evidence)
    with pytest.raises(UsageError, match=why):
        collect([], [session], OPTIONS, 3)


def test_the_picture_itself_is_never_beside_itself(pictures: Path, bright_session, tmp_path: Path) -> None:
    atlas = build(pictures, bright_session(), tmp_path / "atlas")
    copy = tmp_path / "elsewhere.png"
    copy.write_bytes((pictures / "bright/6.png").read_bytes())
    seen = SheetBuilder(bright_session()).see(Request("elsewhere.png", copy))
    found = find_exemplars(atlas, seen.content, exclude={content_sha256(copy)})
    assert sorted(found.by_slot) == [0, 1]
    for looks in found.by_slot.values():
        assert [look.alt.split(" in ")[1].split(",")[0] for look in looks] == ["bright/5.png", "bright/4.png"]
    assert len(find_exemplars(atlas, seen.content, exclude={content_sha256(copy)}, rows=1).by_slot[0]) == 1


def test_the_digest_is_that_of_the_files_bytes(tmp_path: Path) -> None:
    path = spot(tmp_path / "a.png", 9)
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert content_sha256(path) == content_sha256(str(path)) == content_sha256(path.read_bytes()) == expected
    with pytest.raises(ImageError, match="no such file"):
        content_sha256(tmp_path / "b.png")
