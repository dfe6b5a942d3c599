"""SUN397: ten official partitions in files of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torchvision.datasets import SUN397

from opal_deploy.datasets import registry as data
from opal_deploy.errors import UsageError

Make = Callable[..., Path]

SCENES = ["/a/abbey", "/a/apartment_building/outdoor", "/b/bakery/shop"]


@pytest.fixture
def archive(tmp_path: Path, draw: Make) -> Path:
    """Three scenes of eight images, without partitions."""
    root = tmp_path / "SUN397"
    for scene in SCENES:
        for i in range(8):
            draw(root / scene[1:] / f"sun_{i}.jpg")
    (root / "ClassName.txt").write_text("".join(f"{scene}\n" for scene in SCENES))
    return root


def _partition(place: Path, number: int, scenes: list[str] = SCENES) -> None:
    """Five images of each scene to train on and one to test, from image `number` - 1 on."""
    place.mkdir(exist_ok=True)
    for split, numbers in (("Training", range(5)), ("Testing", range(5, 6))):
        lines = [f"{scene}/sun_{(number - 1 + i) % 8}.jpg\r\n" for scene in scenes for i in numbers]
        (place / f"{split}_{number:02}.txt").write_text("".join(lines))


@pytest.mark.parametrize("place", ["SUN397", "SUN397/Partitions", "Partitions", "."])
@pytest.mark.parametrize("given", ["SUN397", "."])
def test_partitions_are_found_where_people_unpack_them(archive: Path, place: str, given: str) -> None:
    _partition(archive.parent / place, 1)
    found = data.read_dataset(archive.parent / given)
    assert (found.layout, found.root) == ("sun397", archive)
    assert (len(found.train), len(found.val), len(found.test)) == (12, 3, 3)


def test_scenes_and_labels_follow_the_class_list(archive: Path) -> None:
    _partition(archive, 1)
    found = data.read_dataset(archive)
    assert found.class_names == ["abbey", "apartment_building/outdoor", "bakery/shop"]
    assert [(s.path, s.label) for s in found.test] == [
        (archive / scene[1:] / "sun_5.jpg", label) for label, scene in enumerate(SCENES)
    ]


def test_it_agrees_with_torchvision(archive: Path) -> None:
    _partition(archive, 1)
    theirs = SUN397(archive.parent)
    label_of = dict(zip(theirs._image_files, theirs._labels, strict=True))
    found = data.read_dataset(archive)
    assert found.class_names == theirs.classes
    assert all(label_of[s.path] == s.label for s in [*found.train, *found.val, *found.test])


def test_another_partition_has_other_images(archive: Path) -> None:
    for number in (1, 4):
        _partition(archive, number)
    assert {s.path.stem for s in data.read_dataset(archive, partition=4).test} == {"sun_0"}


def test_images_outside_the_partition_are_no_warning(archive: Path) -> None:
    _partition(archive, 1)
    assert data.read_dataset(archive).warnings == []


def test_without_the_partition_it_says_what_to_fetch(archive: Path) -> None:
    _partition(archive, 1)
    with pytest.raises(UsageError, match=r"lacks Training_02.txt, Testing_02.txt; fetch Partitions.zip from") as e:
        data.read_dataset(archive, partition=2)
    assert "\n" not in str(e.value)


def test_a_scene_that_the_class_list_does_not_name_is_an_error(archive: Path) -> None:
    _partition(archive, 1, [*SCENES, "/z/zoo"])
    with pytest.raises(UsageError, match=r"Training_01.txt has scenes that ClassName.txt does not name: zoo"):
        data.read_dataset(archive)


def test_images_of_a_scene_without_a_name_are_an_error(archive: Path, draw: Make) -> None:
    _partition(archive, 1)
    draw(archive / "z" / "zoo" / "sun_1.jpg")
    with pytest.raises(UsageError, match=r"its lists for all are damaged or not the official ones .*zoo"):
        data.read_dataset(archive)


def test_missing_images_are_listed(archive: Path) -> None:
    _partition(archive, 1)
    (archive / "a" / "abbey" / "sun_5.jpg").unlink()
    with pytest.raises(UsageError, match=r"1 of 18 listed images is missing: a/abbey/sun_5.jpg"):
        data.read_dataset(archive)


def test_without_the_class_list_it_is_recognised_by_its_letters(archive: Path) -> None:
    (archive / "ClassName.txt").unlink()
    with pytest.raises(UsageError, match=r"read as SUN397 but lacks ClassName.txt, .*Training_01.txt"):
        data.read_dataset(archive)


@pytest.mark.parametrize("below", ["", "writer 1"], ids=["images", "folders of other names"])
def test_an_image_folder_of_letters_is_none(tmp_path: Path, draw: Make, below: str) -> None:
    for letter in "ab":
        for i in range(5):
            draw(tmp_path / letter / below / f"{i}.png")
    assert data.read_dataset(tmp_path).layout == "imagefolder"


def test_lists_may_begin_with_a_byte_order_mark(archive: Path) -> None:
    _partition(archive, 1)
    path = archive / "Training_01.txt"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert len(data.read_dataset(archive).train) == 12
