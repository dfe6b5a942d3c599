"""Boxes and labels from files, and how images find theirs."""

import json
import os

import pytest

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import ImageError, UsageError
from opal_deploy.sources.annotations import FolderLabels, read_boxes, read_labels
from tests.datasets import layouts

BOX = (1.0, 2.0, 30.0, 40.0)
HEADER = "image,x0,y0,x1,y1\n"


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def boxes(folder, text):
    return read_boxes(write(folder / "boxes.csv", text))


def labels(folder, text):
    return read_labels(str(write(folder / "labels.csv", text)))


def find(table, path):
    (crop,) = table.find_all(path)
    return crop.box


def coco(**changes):
    document = {
        "images": [{"id": 7, "file_name": "a.jpg"}],
        "annotations": [{"image_id": 7, "bbox": [1, 2, 29, 38], "category_id": 1}],
    }
    return json.dumps(document | changes)


def detections(**changes):
    document = {"detection_categories": {"1": "animal"}, "images": [{"file": "a.png"}]}
    return json.dumps(document | changes)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("image,x0,y0,x1,y1\n./a.jpg,1,2,30,40\n", id="corners"),
        pytest.param("image,x,y,width,height\na.jpg,1,2,29,38\n", id="sizes"),
        pytest.param("\ufeffimage, x0, y0, x1, y1\r\na.jpg,1.0,2e0, 30 ,40\r\n", id="spreadsheet's"),
        pytest.param(coco(), id="COCO: corner and size"),
    ],
)
def test_forms_of_boxes(tmp_path, text):
    assert find(boxes(tmp_path, text), "a.jpg") == BOX


def test_cubs_own_boxes_crop_as_in_its_training(tmp_path):
    root = layouts.write_cub(tmp_path)
    data = read_dataset(root)
    for table in (read_boxes(root / "bounding_boxes.txt"), read_boxes(root)):
        for sample in [*data.train, *data.val, *data.test]:
            assert find(table, str(sample.path)) == sample.box


def make_pipe(folder):
    os.mkfifo(folder / "pipe.csv")
    return folder / "pipe.csv"


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (boxes, "", "columns none"),
        (boxes, HEADER, "no boxes"),
        (boxes, HEADER + "a.jpg,1,2,3,4\nb.jpg,1,two,3,4\n", "line 3"),
        (boxes, "x0,y0,x1,y1,image\n1,2,3,4\n", "line 2"),
        # images in an archive may have these names, and both are a/b.jpg in their records
        (boxes, HEADER + "a//b.jpg,1,2,3,4\na/./b.jpg,1,2,3,4\n", "two boxes for a/b.jpg"),
        (boxes, "{", "not a COCO file"),
        (boxes, coco(images=[]), "not a COCO file"),
        (boxes, "{" + '"a":[' * 200_000, "not a COCO file"),
        (boxes, coco(annotations=[]), "no boxes"),
        (boxes, coco(annotations=[{"image_id": 7, "bbox": [1, 2, 3, 4]}] * 2), "two boxes for a.jpg"),
        (boxes, detections(images=None), "not MegaDetector"),
        (boxes, detections(images=[]), "no images"),
        (boxes, detections(detection_categories={"1": "dog"}), "no animal"),
        (boxes, detections(images=[{"file": "a.png"}, {"file": "./a.png"}]), "two entries for a.png"),
        (labels, "image,kind\na,b\n", "columns image, kind"),
        (labels, "image,label\n", "no labels"),
        (labels, "image,label\na\n", "line 2"),
        (labels, "image,label\na,x\n./a,y\n", "two labels for a"),
        (lambda folder, _: read_boxes(folder / "none.csv"), "", "cannot be read"),
        # without the images' names
        (lambda folder, _: read_boxes(write(folder / "b.txt", "1 60.0 27.0 325.0 304.0\n")), "", r"images\.txt"),
        # a pipe would be waited for forever
        (lambda folder, _: read_labels(str(make_pipe(folder))), "", "cannot be read"),
    ],
)
def test_a_malformed_or_missing_file_is_refused_in_one_line(tmp_path, read, text, message):
    with pytest.raises(UsageError, match=rf"\A.*{message}.*\Z"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("entries", "image", "expected"),
    [
        (["a.jpg"], "photos/a.jpg", 0),
        (["/data/photos/x/a.jpg"], "x/a.jpg", 0),
        # the longest match
        (["a.jpg", "x/a.jpg"], "photos/x/a.jpg", 1),
        (["a.jpg", "x/a.jpg"], "photos/y/a.jpg", 0),
        # another image of the same name: its box would be a wrong crop without a word
        (["x/1.jpg"], "y/1.jpg", None),
        (["xa.jpg"], "a.jpg", None),
        (["xx/a.jpg"], "x/a.jpg", None),
        (["x/a.jpg", "y/a.jpg"], "a.jpg", None),
    ],
)
def test_an_image_is_found_by_the_end_of_its_path_or_has_neither_box_nor_label(tmp_path, entries, image, expected):
    rows = "".join(f"{entry},{number},0,30,40\n" for number, entry in enumerate([*entries, "other.jpg"]))
    label = labels(tmp_path, "image,label,y0,x1,y1\n" + rows).find(image)
    assert label == (None if expected is None else str(expected))
    table = boxes(tmp_path, HEADER + rows)
    if expected is not None:
        assert find(table, image) == (expected, 0, 30, 40)
    else:
        with pytest.raises(ImageError, match=r"boxes\.csv") as caught:
            find(table, image)
        assert caught.value.code == "no_box"


@pytest.mark.parametrize("name", [b"a b.jpg", b"a,b.jpg", b'a"b.jpg', b"a\nb.jpg", b"a\xff.jpg", "für.jpg".encode()])
def test_odd_names_are_found(tmp_path, name):
    quoted = b'"' + name.replace(b'"', b'""') + b'"'
    assert find(boxes(tmp_path, HEADER.encode() + quoted + b",1,2,30,40\n"), os.fsdecode(name)) == BOX
    table = labels(tmp_path, b"\xef\xbb\xbfimage,label\n" + quoted + b",ash\n")
    assert table.find("in/" + os.fsdecode(name)) == "ash"


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("data/test/ash/1.jpg", "ash"), ("shards/a.tar/ash/1.jpg", "ash"), ("1.jpg", None), ("../1.jpg", None),
        ("/1.jpg", None), ("Mo\u0308we/1.jpg", "Möwe"),
    ],
)  # fmt: skip
def test_a_folders_name_is_its_images_label(path, label):
    assert read_labels("folders").find(path) == label


def test_folders_are_labels_where_all_are_named_as_classes(tmp_path):
    for name in ("ash", "Mo\u0308we", ".hidden", "@eaDir"):
        (tmp_path / name).mkdir()
    assert FolderLabels.fit([str(tmp_path)], ["Möwe", "ash", "oak"])
    assert not FolderLabels.fit([str(tmp_path)], ["ash", "oak"])
    assert not FolderLabels.fit([str(tmp_path / "ash")], ["ash", "oak"])
    (tmp_path / "a.jpg").touch()
    assert not FolderLabels.fit([str(tmp_path)], ["Möwe", "ash", "oak"])


def test_the_identity_of_labels_is_their_content(tmp_path):
    one, other, again = (labels(tmp_path, f"image,label\na,{label}\n").identity for label in "bcb")
    assert one == again != other
    assert read_labels("folders").identity == "folders"


@pytest.mark.parametrize(
    "data",
    [
        "Image;Label\na.jpg;ash\n".encode("utf-8-sig"), "image,label\r\na.jpg,ash\r\n".encode("utf-16"),
        b"filename\tclass\na.jpg\tash\n",
    ],
)  # fmt: skip
def test_tables_of_excel_powershell_and_kaggle_are_read(tmp_path, data):
    (tmp_path / "labels.csv").write_bytes(data)
    assert read_labels(str(tmp_path / "labels.csv")).find("in/a.jpg") == "ash"
