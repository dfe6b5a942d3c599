"""The files of a run directory: names of drawings, writing them, and removing those from an image on."""

import pytest

from opal_deploy.errors import StoppedEarly
from opal_deploy.records.run_files import overlay_name, remove_overlays, write_image_file


@pytest.mark.parametrize(
    ("index", "image", "name"),
    [
        (7, "a/b.jpg", "overlays/000007-b.jpg"),
        (7, "a/..", "overlays/000007-image.jpg"),
        (7, "a b<script>\n.jpg", "overlays/000007-a_b_script.jpg"),
        (7, "a\\xff.jpg", "overlays/000007-a_xff.jpg"),
        (7, "x" * 300, f"overlays/000007-{'x' * 80}.jpg"),
        # no folder holds more than ten thousand
        (9_999, "a.jpg", "overlays/009999-a.jpg"),
        (10_000, "a.jpg", "overlays/0001/010000-a.jpg"),
    ],
)
def test_names_are_safe_and_unique(index, image, name):
    assert overlay_name(index, image) == name


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "overlays/000000-a.jpg").mkdir(parents=True)
    with pytest.raises(StoppedEarly, match=r"cannot be written .*make room and run again"):
        write_image_file(tmp_path, "overlays/000000-a.jpg", b"jpeg")
    assert [path.name for path in (tmp_path / "overlays").iterdir()] == ["000000-a.jpg"]


def test_overlays_from_an_image_on_are_removed_and_nothing_else(tmp_path):
    remove_overlays(tmp_path)
    assert list(tmp_path.iterdir()) == []
    kept = [f"overlays/{name}" for name in ("000003-a.jpg", "0001/010000-a.jpg", "mine.jpg", "0001/mine.jpg")]
    removed = [f"overlays/{name}" for name in ("0001/010001-a.jpg", "0002/020000-a.jpg", ".000002-a.part")]
    for path in (*kept, *removed):
        write_image_file(tmp_path, path, b"x")
    remove_overlays(tmp_path, 10_001)
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(kept)
    assert not (tmp_path / "overlays/0002").exists()
