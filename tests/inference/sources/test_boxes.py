"""Boxes to crop to, from CSV and COCO files, and how images find theirs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.errors import ImageError, UsageError
from opal_deploy.inference.sources.annotations import Boxes, read_boxes
from opal_deploy.inference.sources.items import Item
from opal_deploy.preprocess.geometry import Box

BOX = (1.0, 2.0, 30.0, 40.0)


def boxes(folder: Path, text: str | bytes, name: str = "boxes.csv") -> Boxes:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_boxes(path)


def found(table: Boxes, path: str) -> Box:
    return table.find(Item(Path(path), Path(path).name))


@pytest.mark.parametrize(
    "text",
    [
        "image,x0,y0,x1,y1\na.jpg,1,2,30,40\n",
        "image,x,y,width,height\na.jpg,1,2,29,38\n",
        "x1,y1,comment,image,x0,y0\n30,40,a bird,a.jpg,1,2\n",
        "\ufeffimage, x0, y0, x1, y1\r\na.jpg,1.0,2e0, 30 ,40\r\n",
        '"image","x0","y0","x1","y1"\n"a.jpg","1","2","30","40"',
        "image,x0,y0,x1,y1\n./a.jpg,1,2,30,40\n",
    ],
    ids=["corners", "sizes", "any order, more columns", "spreadsheet's", "quoted", "dot"],
)
def test_csv_forms(tmp_path: Path, text: str) -> None:
    assert found(boxes(tmp_path, text), "a.jpg") == BOX


def coco(**changes: Any) -> str:
    document = {
        "images": [{"id": 7, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 7, "bbox": [1, 2, 29, 38], "category_id": 1}],
    }
    return json.dumps(document | changes)


def test_coco_boxes_have_corner_and_size(tmp_path: Path) -> None:
    assert found(boxes(tmp_path, coco(), "a.json"), "a.jpg") == BOX


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns none; expected image with x0,y0,x1,y1 or x,y,width,height"),
        ("image;x0;y0;x1;y1\na.jpg;1;2;3;4\n", "columns image;x0;y0;x1;y1; expected image with"),
        ("image,x0,y0\na.jpg,1,2\n", "columns image, x0, y0; expected"),
        ("image,x0,y0,x1,y1\n", "no boxes in it"),
        ("image,x0,y0,x1,y1\na.jpg,1,2,3,4\nb.jpg,1,two,3,4\n", "line 3 has no four numbers in x0, y0, x1, y1"),
        ("image,x0,y0,x1,y1\na.jpg,1,2,3\n", "line 2 has no four numbers"),
        ("x0,y0,x1,y1,image\n1,2,3,4\n", "line 2 has no image's name"),
        ("image,x0,y0,x1,y1\na.jpg,1,2,3,4\na.jpg,1,2,3,4\n", "two boxes for a.jpg; expected one an image"),
        (b"image,x0,y0,x1,y1\n" + b"a" * 200_000 + b",1,2,3,4\n", "not a CSV file"),
        ("[1, 2]", "columns"),
        ("{", "not a COCO file"),
        ("{}", "not a COCO file .*expected images with id and file_name, annotations with bbox"),
        (coco(images=[]), "not a COCO file"),
        (coco(images=["a.jpg"]), "not a COCO file"),
        (coco(annotations=["a.jpg"]), "not a COCO file"),
        (coco(annotations=[{"image_id": 7, "bbox": [1, 2, 3]}]), "not a COCO file"),
        (coco(annotations=[{"image_id": 7, "bbox": None}]), "not a COCO file"),
        (coco(annotations=[]), "no boxes in it"),
        (coco(annotations=[{"image_id": 7, "bbox": [1, 2, 3, 4]}] * 2), "two boxes for a.jpg"),
    ],
)
def test_files_of_another_shape_are_refused_with_what_is_wrong(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        boxes(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_boxes(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("entry", "image"),
    [
        ("a.jpg", "a.jpg"),
        ("a.jpg", "photos/a.jpg"),
        ("x/a.jpg", "photos/x/a.jpg"),
        ("photos/x/a.jpg", "photos/x/a.jpg"),
        ("/data/photos/x/a.jpg", "x/a.jpg"),
        ("images/a.jpg", "a.jpg"),
    ],
)
def test_an_image_is_found_by_the_end_of_its_path(tmp_path: Path, entry: str, image: str) -> None:
    table = boxes(tmp_path, f"image,x0,y0,x1,y1\nother.jpg,0,0,9,9\n{entry},1,2,30,40\n")
    assert found(table, image) == BOX


@pytest.mark.parametrize(
    ("entries", "image"),
    [
        (["b.jpg"], "a.jpg"),
        # another picture of the same name: its box would be a wrong crop without a word
        (["x/1.jpg"], "y/1.jpg"),
        (["xa.jpg"], "a.jpg"),
        (["x/a.jpg", "y/a.jpg"], "a.jpg"),
    ],
)
def test_an_image_whose_box_is_not_certain_has_none(tmp_path: Path, entries: list[str], image: str) -> None:
    rows = "".join(f"{entry},1,2,30,40\n" for entry in entries)
    with pytest.raises(ImageError) as caught:
        found(boxes(tmp_path, "image,x0,y0,x1,y1\n" + rows), image)
    assert caught.value.code == "no_box"
    assert "boxes.csv" in str(caught.value)


def test_the_longest_match_wins(tmp_path: Path) -> None:
    table = boxes(tmp_path, "image,x0,y0,x1,y1\na.jpg,0,0,9,9\nx/a.jpg,1,2,30,40\n")
    assert found(table, "photos/x/a.jpg") == BOX
    assert found(table, "photos/y/a.jpg") == (0, 0, 9, 9)


@pytest.mark.parametrize("name", [b"a b.jpg", b"a,b.jpg", b'a"b.jpg', b"a\nb.jpg", b"a\xff.jpg", "für.jpg".encode()])
def test_odd_names_find_their_box(tmp_path: Path, name: bytes) -> None:
    quoted = b'"' + name.replace(b'"', b'""') + b'"'
    table = boxes(tmp_path, b"image,x0,y0,x1,y1\n" + quoted + b",1,2,30,40\n")
    assert found(table, os.fsdecode(name)) == BOX
