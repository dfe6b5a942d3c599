"""CUB's squashed relative: commas, ids from 0, a flag that means "is test"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from opal_deploy.datasets import registry as data
from opal_deploy.errors import UsageError

Make = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, draw: Make) -> Path:
    """Two classes of six images, the last of each for testing."""
    names = [f"{name}/{i:04}.jpg" for name in ("Wren", "Auk") for i in range(6)]
    for name in names:
        draw(tmp_path / "images" / name)
    _write(tmp_path, "images.txt", list(enumerate(names)))
    _write(tmp_path, "image_class_labels.txt", [(i, i // 6) for i in range(12)])
    _write(tmp_path, "train_test_split.txt", [(i, int(i % 6 == 5)) for i in range(12)])
    _write(tmp_path, "classes.txt", [(0, "Wren"), (1, "Auk")])
    return tmp_path


def _write(folder: Path, name: str, rows: list[tuple[object, object]]) -> None:
    (folder / name).write_text("".join(f"{key}, {value}\n" for key, value in rows))


def test_it_is_recognised_and_flag_one_means_test(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert (found.layout, found.crop) == ("cub100", None)
    assert [s.path.name for s in found.test] == ["0005.jpg", "0005.jpg"]
    assert (len(found.train), len(found.val)) == (8, 2)


def test_class_names_follow_the_ids(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert found.class_names == ["Wren", "Auk"]
    assert all(s.path.parent.name == found.class_names[s.label] for s in [*found.train, *found.val, *found.test])


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        (
            "images.txt",
            [(i, f"Wren/{i:04}.jpg") for i in range(5)],
            "7 ids of image_class_labels.txt are not in",
        ),
        ("train_test_split.txt", [(0, 1)], "11 ids of images.txt are not in train_test_split.txt: 1, 2"),
        ("train_test_split.txt", [(i, i % 3) for i in range(12)], "holds 2 beside 0 and 1"),
        ("image_class_labels.txt", [(i, i // 4) for i in range(12)], "classes.txt does not name: 2"),
        ("classes.txt", [(0, "Auk"), (1, "Auk")], "several classes of one name in classes.txt: Auk"),
        ("images.txt", [(0, "/a.jpg"), (1, "../a.jpg")], r"lead out of images/: /a.jpg, \.\./a.jpg"),
        ("classes.txt", [("¹", "Auk")], "is not a new numeric id"),
        ("classes.txt", [(0, "")], "line 1: '0,' is not a new numeric id, a comma and a value"),
    ],
    ids=[
        "labels without image",
        "images without flag",
        "third flag",
        "unknown class",
        "classes of one name",
        "elsewhere",
        "superscript",
        "no value",
    ],
)
def test_tables_that_disagree_are_named(
    folder: Path, file: str, rows: list[tuple[object, object]], message: str
) -> None:
    _write(folder, file, rows)
    with pytest.raises(UsageError, match=message):
        data.read_dataset(folder)


def test_a_missing_table_is_named(folder: Path) -> None:
    (folder / "train_test_split.txt").unlink()
    with pytest.raises(UsageError, match=r"lacks train_test_split.txt"):
        data.read_dataset(folder)


def test_asking_for_cub_here_says_that_the_format_is_another(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"lacks bounding_boxes.txt"):
        data.read_dataset(folder, "cub")


@pytest.mark.data
def test_the_real_one_has_as_many_training_images_as_its_readme_says(cub100_227px: Path) -> None:
    found = data.read_dataset(cub100_227px)
    assert (len(found.train) + len(found.val), len(found.test)) == (2999, 2903)
    assert found.num_classes == 100
    assert found.class_names[:2] == ["Black_footed_Albatross", "Groove_billed_Ani"]
    assert found.warnings == []


def test_tables_may_begin_with_a_byte_order_mark(folder: Path) -> None:
    for table in folder.glob("*.txt"):
        table.write_text(table.read_text(), encoding="utf-8-sig")
    assert data.read_dataset(folder).layout == "cub100"
