"""What images really show, as their folders or a file say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.inference.sources.annotations import read_labels


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("data/test/ash/1.jpg", "ash"),
        ("ash/1.jpg", "ash"),
        ("/ash/1.jpg", "ash"),
        ("shards/a.tar/ash/1.jpg", "ash"),
        ("1.jpg", None),
        ("./1.jpg", None),
        ("../1.jpg", None),
        ("/1.jpg", None),
    ],
)
def test_a_folders_name_is_its_images_label(path: str, label: str | None) -> None:
    assert read_labels("folders").find(path) == label


def table(tmp_path: Path, text: str) -> str:
    path = tmp_path / "labels.csv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return str(path)


def test_a_file_names_images_by_as_much_of_their_paths_as_it_likes(tmp_path: Path) -> None:
    labels = read_labels(table(tmp_path, "label,image,more\nash,x/1.jpg,\nbirch,./y/1.jpg,\noak,2.jpg,9\n"))
    assert labels.find("data/x/1.jpg") == "ash"
    assert labels.find("y/1.jpg") == "birch"
    assert labels.find("data/z/2.jpg") == "oak"
    assert labels.find("data/z/1.jpg") is None
    # two rows end in it
    assert labels.find("1.jpg") is None


def test_quoted_and_odd_names_are_found(tmp_path: Path) -> None:
    labels = read_labels(
        table(tmp_path, '\ufeffimage,label\n"a\nb, c.jpg",ash\n' + os.fsdecode(b"\xff.jpg") + ",oak\n")
    )
    assert labels.find("a\nb, c.jpg") == "ash"
    assert labels.find("in/" + os.fsdecode(b"\xff.jpg")) == "oak"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns none; expected image and label"),
        ("image,class\na,b\n", "columns image, class; expected image and label"),
        ("image,label\n", "no labels in it"),
        ("image,label\na\n", "line 2 lacks an image's name or its label"),
        ("image,label\n,x\n", "line 2 lacks an image's name or its label"),
        ("image,label\na,x\n./a,y\n", "two labels for a; expected one an image"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        read_labels(table(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        read_labels(str(tmp_path / "none.csv"))


def test_other_labels_are_another_run(tmp_path: Path) -> None:
    one = read_labels(table(tmp_path, "image,label\na,b\n")).identity
    assert read_labels(table(tmp_path, "image,label\na,c\n")).identity != one
    assert read_labels(table(tmp_path, "image,label\na,b\n")).identity == one
    assert read_labels("folders").identity == "folders"
