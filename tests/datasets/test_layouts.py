"""Every official layout: what is read from it, and how damage is reported."""

from __future__ import annotations

import builtins
import importlib.util
import io
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from scipy.io import savemat

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import MissingExtra, UsageError
from tests.datasets import layouts
from tests.datasets.layouts import annotate_cars, annotate_dog, deny, draw, write_lines


@dataclass(frozen=True)
class Layout:
    """A writer, the folder's usual name, and the data set that is read."""

    write: Callable[[Path], Path]
    folder: str
    sizes: tuple[int, int, int]
    class_names: list[str]
    crop: str | None = None


TEXTURES = ["banded", "woven"]
SCENES = ["abbey", "apartment_building/outdoor", "bakery/shop"]
DOGS = ["n02085936-Zebra_dog", "n02085782-Chihuahua"]
LAYOUTS = {
    "cub": Layout(layouts.write_cub, "CUB_200_2011", (4, 2, 2), ["001.Auk", "002.Jay"], "boxes"),
    "cub100": Layout(layouts.write_cub100, "cub100_227px", (8, 2, 2), ["Wren", "Auk"]),
    "dogs": Layout(layouts.write_dogs, "stanford_dogs", (8, 2, 4), DOGS, "boxes"),
    "cars": Layout(layouts.write_cars, "stanford_cars", (8, 2, 2), layouts.CARS),
    "pets": Layout(layouts.write_pets, "oxford-iiit-pet", (12, 3, 3), ["Abyssinian", "American Bulldog", "Bengal"]),
    "imagenet": Layout(layouts.write_imagenet, "imagenet", (8, 2, 4), layouts.WNID_NAMES),
    "caltech101": Layout(layouts.write_caltech101, "caltech101", (12, 4, 4), ["Faces", "accordion"]),
    "dtd": Layout(layouts.write_dtd, "dtd/dtd", (4, 4, 4), TEXTURES),
    "sun397": Layout(layouts.write_sun397, "SUN397", (12, 3, 3), SCENES),
    "imagefolder": Layout(layouts.write_image_folder, "", (8, 4, 6), ["a", "b"]),
}
# of the test split, path under the data set's folder to label
TESTS = {
    "cub": {"images/001.Auk/3.png": 0, "images/002.Jay/3.png": 1},
    "cub100": {"images/Wren/0005.jpg": 0, "images/Auk/0005.jpg": 1},
    "dogs": {f"Images/{breed}/{breed[:9]}_{i}.jpg": 1 - k for k, breed in enumerate(DOGS[::-1]) for i in (5, 6)},
    "cars": {"cars_test/00001.jpg": 1, "cars_test/00002.jpg": 0},
    "pets": {f"images/{breed}_6.jpg": label for label, breed in enumerate(layouts.PETS)},
    "imagenet": {f"val/{wnid}/{wnid}_{i}.JPEG": label for label, wnid in enumerate(layouts.WNIDS) for i in (0, 1)},
    "dtd": {f"images/{n}/{n}_000{i}.jpg": label for label, n in enumerate(TEXTURES) for i in (4, 5)},
    "sun397": {f"{scene[1:]}/sun_5.jpg": label for label, scene in enumerate(layouts.SCENES)},
}
BOXES = {"cub": {(2.0, 3.0, 12.0, 11.0)}, "dogs": {(1.0, 2.0, 10.0, 11.0)}}


def _write(name, tmp_path):
    root = tmp_path / LAYOUTS[name].folder
    root.mkdir(parents=True, exist_ok=True)
    return LAYOUTS[name].write(root)


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
    if layout.folder:
        assert read_dataset(tmp_path) == data, "the parent folder is recognised"


@pytest.mark.parametrize(("name", "partition", "expected"), [("dtd", 1, "45"), ("dtd", 10, "12"), ("sun397", 4, "0")])
def test_a_partition_has_its_own_test_images(name, partition, expected, tmp_path):
    data = read_dataset(_write(name, tmp_path), partition=partition)
    assert "".join(sorted({s.path.stem[-1] for s in data.test})) == expected


def _move(**names):
    def change(root):
        for name, target in names.items():
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / name.replace("__", "."), root / target)

    return change


VARIANTS = {
    "cub": lambda root: [p.write_text(p.read_text(), encoding="utf-8-sig") for p in root.glob("*.txt")],
    "dogs": _move(train_list__mat="lists/train_list.mat", Images="images/Images", Annotation="annotations/Annotation"),
    "cars": lambda root: root.rename(root.parent / "my cars"),
    "pets": lambda root: draw(root / "images" / "Abyssinian_1.jpg", format="GIF"),
    "sun397": _move(Training_01__txt="../Partitions/Training_01.txt", Testing_01__txt="Partitions/Testing_01.txt"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_reads_as_the_official_layout(name, tmp_path):
    VARIANTS[name](_write(name, tmp_path))
    (root,) = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "Partitions"]
    data = read_dataset(root)
    assert (data.layout, (len(data.train), len(data.val), len(data.test))) == (name, LAYOUTS[name].sizes)
    assert (data.class_names, data.skipped, data.warnings) == (LAYOUTS[name].class_names, [], [])


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
    "cub: third flag": ("cub", _text("train_test_split.txt", *(f"{i} {i % 3}" for i in range(1, 9))), "flag"),
    "cub: class without training": (
        "cub", _text("train_test_split.txt", *(f"{i} {int(i < 5)}" for i in range(1, 9))), "training image: 002",
    ),
    "cub: other format": ("cub", _text("images.txt", "0, 001.Auk/0.png"), "format"),
    "cub: empty table": ("cub", _text("bounding_boxes.txt"), "empty"),
    "cub: classes of one name": ("cub", _text("classes.txt", "1 Auk", "2 Auk"), "same name"),
    "cub: path elsewhere": ("cub", _text("images.txt", "1 ../a.png", "5 002.Jay/0.png"), r"lead out .*\.\./a"),
    "cub: no boxes": ("cub", _remove("bounding_boxes.txt"), "lacks bounding_boxes"),
    "cub100: no value": ("cub100", _text("classes.txt", "0, "), "comma"),
    "dogs: annotation missing": ("dogs", _remove(f"Annotation/{DOGS[1]}/n02085782_0"), "n02085782_0"),
    "dogs: annotation empty": ("dogs", lambda root: annotate_dog(root / f"Annotation/{DOGS[1]}/n02085782_2"), "bndbox"),
    "dogs: no lists": ("dogs", _remove("train_list.mat"), r"lacks train_list"),
    "dogs: a label for two folders": ("dogs", _dogs(file_list=["a/b.jpg"], labels=[1]), "one to one"),
    "dogs: other variables": ("dogs", _dogs(files=1), "file_list"),
    "cars: missing files": ("cars", _remove("cars_test_annos_withlabels.mat", "cars_test"), "lacks cars_test/"),
    "cars: class ids beyond the devkit's": (
        "cars", lambda root: annotate_cars(root / "cars_test_annos_withlabels.mat", [("1.jpg", 7), ("2.jpg", 1)]),
        "outside 1 to 2: 7",
    ),
    # else Bengal would be called by the name of the breed before it
    "pets: a class id left out": (
        "pets", _pets("trainval", *((f"{b}_{i}", n) for n, b in ((1, "A"), (3, "B")) for i in range(9))), "class id",
    ),
    "pets: a breed only tested": ("pets", _pets("test", ("Persian_1", 1)), "different classes"),
    "pets: damaged list": ("pets", _text("annotations/test.txt", "Abyssinian_1 1"), "torchvision cannot read"),
    "pets: empty lists": ("pets", lambda root: [_pets(s)(root) for s in ("trainval", "test")], "no images to train"),
    "imagenet: no devkit": ("imagenet", _remove("meta.bin"), "lacks meta.bin or ILSVRC2012_devkit_t12.tar.gz"),
    "imagenet: flat val": (
        "imagenet", lambda root: (_remove("val")(root), draw(root / "val" / "x.JPEG")), "any class folder",
    ),
    "caltech101: gap in the numbers": (
        "caltech101", _move(**{"101_ObjectCategories/Faces/image_0003__jpg": "101_ObjectCategories/Faces/me.jpg"}),
        r"Faces/image_0003",
    ),
    "dtd: other textures": (
        "dtd", lambda root: layouts.write_dtd_list(root, "test", 1, ["woven/woven_0004.jpg"]), "different classes",
    ),
    "sun397: unknown scene": (
        "sun397", lambda root: layouts.write_sun397_partition(root, 1, [*layouts.SCENES, "/z/zoo"]), "zoo",
    ),
    "sun397: missing image": ("sun397", _remove("a/abbey/sun_5.jpg"), "1 of 18 listed images missing: a/abbey"),
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


def test_missing_annotation_of_a_missing_image_is_not_reported(tmp_path):
    root = _write("dogs", tmp_path)
    _remove(f"Images/{DOGS[0]}/n02085936_6.jpg", f"Annotation/{DOGS[0]}/n02085936_6")(root)
    assert len(read_dataset(root, skip_missing=True).test) == 3


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
    monkeypatch.chdir(_write("dtd", tmp_path))
    assert all(sample.path.is_file() and not sample.path.is_absolute() for sample in read_dataset(Path()).test)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("name", ["cars", "dogs"])
def test_without_scipy_the_extra_is_named_once(name, tmp_path, monkeypatch):
    root, find_spec = _write(name, tmp_path), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else find_spec(name))
    with pytest.raises(MissingExtra, match=r"needs scipy.*opal-deploy\[train\]'$"):
        read_dataset(root)
