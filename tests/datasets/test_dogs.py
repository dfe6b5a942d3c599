"""Stanford Dogs: Matlab lists and a box for every dog."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from opal_deploy.datasets import registry as data
from opal_deploy.errors import UsageError

Make = Callable[..., Path]

# the labels of the lists, not the folders' order, number the classes
BREEDS = {"n02085620-Zebra_dog": 1, "n02085782-Chihuahua": 2}


def _annotate(path: Path, *boxes: tuple[int, int, int, int]) -> None:
    corners = ("xmin", "ymin", "xmax", "ymax")
    objects = "".join(
        "<object><name>dog</name><bndbox>"
        + "".join(f"<{corner}>{value}</{corner}>" for corner, value in zip(corners, box, strict=True))
        + "</bndbox></object>"
        for box in boxes
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<annotation><folder>x</folder>{objects}</annotation>")


def _list(path: Path, files: list[str], labels: list[int]) -> None:
    """As the official lists: an N x 1 cell array of strings, an N x 1 matrix."""
    cells = np.empty((len(files), 1), dtype=object)
    cells[:, 0] = files
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"file_list": cells, "annotation_list": cells, "labels": np.array(labels, np.uint8)[:, None]})


@pytest.fixture(params=["", "lists"], ids=["lists in the folder", "lists in lists/"])
def folder(tmp_path: Path, draw: Make, request: pytest.FixtureRequest) -> Path:
    """Two breeds with five images to train on and two to test."""
    root = tmp_path / "stanford_dogs"
    files = {label: [f"{breed}/{breed[:9]}_{i}.jpg" for i in range(7)] for breed, label in BREEDS.items()}
    for name in [name for names in files.values() for name in names]:
        draw(root / "Images" / name)
        _annotate(root / "Annotation" / name.removesuffix(".jpg"), (1, 2, 10, 11))
    for split, part in (("train", slice(0, 5)), ("test", slice(5, 7))):
        names = [(name, label) for label, group in files.items() for name in group[part]]
        _list(root / request.param / f"{split}_list.mat", [n for n, _ in names], [label for _, label in names])
    return root


def test_split_labels_and_boxes_are_the_official_ones(folder: Path) -> None:
    found = data.read_dataset(folder)
    assert (found.layout, found.crop) == ("dogs", "boxes")
    assert (len(found.train), len(found.val), len(found.test)) == (8, 2, 4)
    assert {s.box for s in found.train} == {(1.0, 2.0, 10.0, 11.0)}
    assert {s.path.stem[-1] for s in found.test} == {"5", "6"}
    assert all(s.path.parent.name == found.class_names[s.label] for s in [*found.train, *found.val, *found.test])
    assert found.warnings == []


def test_class_names_are_the_folders_in_the_order_of_the_labels(folder: Path) -> None:
    assert data.read_dataset(folder).class_names == ["n02085620-Zebra_dog", "n02085782-Chihuahua"]


def test_labels_and_not_folder_names_give_the_order(tmp_path: Path, draw: Make) -> None:
    for split, numbers in (("train", range(5)), ("test", range(5, 7))):
        names = [f"{breed}/{i}.jpg" for breed in ("n1-B", "n2-A") for i in numbers]
        for name in names:
            draw(tmp_path / "Images" / name)
            _annotate(tmp_path / "Annotation" / name.removesuffix(".jpg"), (1, 2, 10, 11))
        _list(tmp_path / f"{split}_list.mat", names, [2 if name.startswith("n1") else 1 for name in names])
    assert data.read_dataset(tmp_path).class_names == ["n2-A", "n1-B"]


def test_images_and_annotations_may_lie_a_folder_deeper(folder: Path) -> None:
    for inner, outer in (("Images", "images"), ("Annotation", "annotations")):
        (folder / inner).rename(folder / "moved")
        (folder / outer).mkdir()
        (folder / "moved").rename(folder / outer / inner)
    found = data.read_dataset(folder)
    assert (len(found.train), len(found.val), len(found.test), found.crop) == (8, 2, 4, "boxes")


def test_the_parent_will_do(folder: Path) -> None:
    assert data.read_dataset(folder.parent).root == folder


def test_of_several_boxes_the_first_is_taken_and_counted(folder: Path) -> None:
    _annotate(folder / "Annotation" / "n02085620-Zebra_dog" / "n02085620_6", (0, 0, 5, 5), (6, 6, 9, 9))
    found = data.read_dataset(folder)
    assert next(s for s in found.test if s.path.stem == "n02085620_6").box == (0.0, 0.0, 5.0, 5.0)
    assert found.warnings == ["1 image has several boxes, the first is taken: n02085620-Zebra_dog/n02085620_6"]


def test_missing_and_damaged_annotations_are_named_together(folder: Path) -> None:
    breed = folder / "Annotation" / "n02085620-Zebra_dog"
    (breed / "n02085620_0").unlink()
    (breed / "n02085620_1").write_text("<annotation>")
    (breed / "n02085620_2").write_text("<annotation></annotation>")
    _annotate(breed / "n02085620_3", ("wide", 0, 5, 5))  # type: ignore[arg-type]
    (breed / "n02085620_4").write_text('<?xml version="1.0" encoding="martian"?><annotation/>')
    with pytest.raises(UsageError) as caught:
        data.read_dataset(folder)
    message = str(caught.value)
    assert "1 annotation is missing in Annotation/: n02085620-Zebra_dog/n02085620_0;" in message
    assert "4 annotations have no readable box in Annotation/" in message
    assert "n02085620_2 (no object/bndbox)" in message
    assert "\n" not in message


def test_of_a_missing_image_its_annotation_is_not_reported(folder: Path) -> None:
    (folder / "Images" / "n02085620-Zebra_dog" / "n02085620_6.jpg").unlink()
    (folder / "Annotation" / "n02085620-Zebra_dog" / "n02085620_6").unlink()
    assert len(data.read_dataset(folder, skip_missing=True).test) == 3


def test_images_and_annotations_without_lists_say_what_to_fetch(folder: Path) -> None:
    for name in ("train_list.mat", "test_list.mat"):
        next(folder.rglob(name)).unlink()
    with pytest.raises(UsageError, match=r"lacks train_list.mat, test_list.mat; unpack .*lists.tar"):
        data.read_dataset(folder)


def test_a_label_for_two_folders_is_an_error(folder: Path) -> None:
    files = [f"{breed}/{breed[:9]}_{i}.jpg" for breed in BREEDS for i in range(5)]
    _list(next(folder.rglob("train_list.mat")), files, [1, 2] * 5)
    with pytest.raises(UsageError, match="label 1 of the lists stands for several folders: n02085620-Zebra_dog, n"):
        data.read_dataset(folder)


def test_a_label_without_images_is_an_error(folder: Path) -> None:
    for split in ("train", "test"):
        files = [f"{breed}/{breed[:9]}_{i}.jpg" for breed in BREEDS for i in range(5)]
        _list(next(folder.rglob(f"{split}_list.mat")), files, [1] * 5 + [3] * 5)
    with pytest.raises(UsageError, match="labels of the lists without an image: 2"):
        data.read_dataset(folder)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (None, "not a readable Matlab file"),
        ({"files": 1}, "it has no file_list and no labels"),
        ({"file_list": ["a/b.jpg"], "labels": [1, 2]}, "1 file but 2 labels"),
        ({"file_list": ["a/b.jpg"], "labels": ["dog"]}, "the label 'dog' is no class id, counted from 1; unpack"),
        ({"file_list": ["a/b.jpg"], "labels": [np.nan]}, "the label 'nan' is no class id"),
        ({"file_list": ["a/b.jpg"], "labels": [1e300]}, "the label '1e[+]300' is no class id"),
        ({"file_list": ["/a/b.jpg"], "labels": [1]}, "paths of test_list.mat that lead out of Images/: /a/b.jpg"),
        ({"file_list": ["../b.jpg"], "labels": [1]}, r"paths of test_list.mat that lead out of Images/: \.\./b.jpg"),
    ],
    ids=["text", "other variables", "lengths", "words", "nan", "endless", "absolute path", "path upwards"],
)
def test_a_damaged_list_is_an_error(folder: Path, variables: dict[str, object] | None, message: str) -> None:
    path = next(folder.rglob("test_list.mat"))
    path.write_text("hello") if variables is None else savemat(path, variables)
    with pytest.raises(UsageError, match=message):
        data.read_dataset(folder)


def test_an_image_folder_that_looks_like_it_is_told_how_to_say_so(tmp_path: Path, class_folders: Make) -> None:
    class_folders(tmp_path, ["Annotation", "Images"])
    with pytest.raises(UsageError, match="if its folders are classes, give --dataset imagefolder"):
        data.read_dataset(tmp_path)
    assert data.read_dataset(tmp_path, "imagefolder").class_names == ["Annotation", "Images"]
