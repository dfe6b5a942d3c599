"""Every official layout: what is read from it, and how damage is reported."""

from __future__ import annotations

import builtins
import io
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from scipy.io import savemat

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from tests.datasets import layouts
from tests.datasets.layouts import annotate_dog, deny, write_lines


@dataclass(frozen=True)
class Layout:
    """A writer, and the data set that is read."""

    write: Callable[[Path], Path]
    sizes: tuple[int, int, int]
    class_names: list[str]
    crop: str | None = None


DOGS = ["n02085936-Zebra_dog", "n02085782-Chihuahua"]
LAYOUTS = {
    "cub": Layout(layouts.write_cub, (4, 2, 2), ["001.Auk", "002.Jay"], "boxes"),
    "dogs": Layout(layouts.write_dogs, (8, 2, 4), DOGS, "boxes"),
    "pets": Layout(layouts.write_pets, (12, 3, 3), ["Abyssinian", "American Bulldog", "Bengal"]),
    "sun397": Layout(layouts.write_sun397, (15, 4, 5), [scene[3:] for scene in layouts.SCENES]),
}
# of the test split, path under the data set's folder to label
TESTS = {
    "cub": {"images/001.Auk/3.png": 0, "images/002.Jay/3.png": 1},
    "dogs": {f"Images/{breed}/{breed[:9]}_{i}.jpg": 1 - k for k, breed in enumerate(DOGS[::-1]) for i in (5, 6)},
    "pets": {f"images/{breed}_6.jpg": label for label, breed in enumerate(layouts.PETS)},
}
BOXES = {"cub": {(2.0, 3.0, 12.0, 11.0)}, "dogs": {(1.0, 2.0, 10.0, 11.0)}}


def _write(name, tmp_path):
    (tmp_path / name).mkdir(parents=True, exist_ok=True)
    return LAYOUTS[name].write(tmp_path / name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_official_layout(name, tmp_path):
    layout, root = LAYOUTS[name], _write(name, tmp_path)
    data = read_dataset(root)
    assert (data.layout, data.root, data.crop) == (name, root, layout.crop)
    assert (len(data.train), len(data.val), len(data.test)) == layout.sizes
    assert data.class_names == layout.class_names
    assert data.warnings == [] or "no official split" in data.warnings[0]
    assert {sample.box for sample in data.select("all")} == BOXES.get(name, {None})
    if name in TESTS:
        assert {str(s.path.relative_to(root)): s.label for s in data.test} == TESTS[name]


def _remove(*names):
    return lambda root: [shutil.rmtree(root / n) if (root / n).is_dir() else (root / n).unlink() for n in names]


def _text(name, *lines):
    return lambda root: write_lines(root / name, lines)


def _pets(split, *rows):
    return lambda root: layouts.write_pets_list(root, split, rows)


def _dogs(**variables):
    return lambda root: savemat(root / "test_list.mat", variables)


_SEVEN = [f"{i} {1 + (i > 4)}" for i in range(2, 9)]
DAMAGES = {
    "cub: image without label": ("cub", _text("image_class_labels.txt", *_SEVEN), "id 1"),
    "cub: class without training": (
        "cub", _text("train_test_split.txt", *(f"{i} {int(i < 5)}" for i in range(1, 9))), "training image: 002",
    ),
    "cub: other format": ("cub", _text("images.txt", "0, 001.Auk/0.png"), "format"),
    "cub: classes of one name": ("cub", _text("classes.txt", "1 Auk", "2 Auk"), "same name"),
    "cub: path elsewhere": ("cub", _text("images.txt", "1 ../a.png", "5 002.Jay/0.png"), r"lead out .*\.\./a"),
    "cub: no boxes": ("cub", _remove("bounding_boxes.txt"), "lacks bounding_boxes"),
    "dogs: annotation missing": ("dogs", _remove(f"Annotation/{DOGS[1]}/n02085782_0"), "n02085782_0"),
    "dogs: annotation empty": ("dogs", lambda root: annotate_dog(root / f"Annotation/{DOGS[1]}/n02085782_2"), "bndbox"),
    "dogs: a label for two folders": ("dogs", _dogs(file_list=["a/b.jpg"], labels=[1]), "one to one"),
    "dogs: other variables": ("dogs", _dogs(files=1), "file_list"),
    # else Bengal would be called by the name of the breed before it
    "pets: a class id left out": (
        "pets", _pets("trainval", *((f"{b}_{i}", n) for n, b in ((1, "A"), (3, "B")) for i in range(9))), "class id",
    ),
    "pets: damaged list": ("pets", _text("annotations/test.txt", "Abyssinian_1 1"), "torchvision cannot read"),
    "pets: other classes": ("pets", _pets("test", ("Abyssinian_6", 1)), "different classes"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_one_line(case, tmp_path):
    name, damage, message = DAMAGES[case]
    root = _write(name, tmp_path)
    damage(root)
    with pytest.raises(UsageError, match=message) as caught:
        # by its name, since the damage may make it look like another data set
        read_dataset(root, name)
    assert "\n" not in str(caught.value)


def test_unreadable_list_is_named_by_the_users_path(tmp_path, monkeypatch):
    root = _write("pets", tmp_path)
    for owner in (builtins, io):
        deny(monkeypatch, owner, "open", "trainval.txt")
    # not by that of the link that torchvision reads
    with pytest.raises(UsageError, match=rf"\A(?!.*opal-deploy-).*{root}/annotations/trainval.txt"):
        read_dataset(root)


def test_a_relative_folder_is_read_and_nothing_is_left_behind(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(_write("pets", tmp_path))
    assert all(sample.path.is_file() and not sample.path.is_absolute() for sample in read_dataset(Path()).test)
    assert list((tmp_path / "temporary").iterdir()) == []
