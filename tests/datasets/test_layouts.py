# ruff: noqa: E501 - one row per case, however long its message
"""Every official layout: what is read from it, what its oddities do, and how damage is reported."""

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
import torchvision.datasets
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
    "imagenet": Layout(layouts.write_imagenet, "imagenet", (8, 2, 3), layouts.WNID_NAMES),
    "caltech101": Layout(layouts.write_caltech101, "caltech101", (12, 4, 4), ["Faces", "accordion"]),
    "dtd": Layout(layouts.write_dtd, "dtd/dtd", (4, 4, 4), TEXTURES),
    "sun397": Layout(layouts.write_sun397, "SUN397", (12, 3, 3), SCENES),
    "imagefolder": Layout(layouts.write_image_folder, "", (8, 4, 6), ["a", "b"]),
}


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
    assert data.warnings == [] or name == "caltech101"
    if layout.folder:
        assert read_dataset(tmp_path) == data, "the parent folder is recognized"


# of the test split, path under the data set's folder to label
TESTS = {
    "cub": {"images/001.Auk/3.png": 0, "images/002.Jay/3.png": 1},
    "cub100": {"images/Wren/0005.jpg": 0, "images/Auk/0005.jpg": 1},
    "dogs": {f"Images/{breed}/{breed[:9]}_{i}.jpg": 1 - k for k, breed in enumerate(DOGS[::-1]) for i in (5, 6)},
    "cars": {"cars_test/00001.jpg": 1, "cars_test/00002.jpg": 0},
    "pets": {f"images/{breed}_6.jpg": label for label, breed in enumerate(layouts.PETS)},
    "imagenet": {f"val/ILSVRC2012_val_0000000{i}.JPEG": int(i > 1) for i in (1, 2, 3)},
    "dtd": {f"images/{n}/{n}_000{i}.jpg": label for label, n in enumerate(TEXTURES) for i in (4, 5)},
    "sun397": {f"{scene[1:]}/sun_5.jpg": label for label, scene in enumerate(layouts.SCENES)},
}


@pytest.mark.parametrize("name", TESTS)
def test_test_split_and_labels_are_the_lists(name, tmp_path):
    data = read_dataset(_write(name, tmp_path))
    assert {str(s.path.relative_to(data.root)): s.label for s in data.test} == TESTS[name]
    boxes = {"cub": {(2.0, 3.0, 12.0, 11.0)}, "dogs": {(1.0, 2.0, 10.0, 11.0)}}
    assert {s.box for s in [*data.train, *data.val, *data.test]} == boxes.get(name, {None})
    # a folder per class, or for cars odd and even numbers
    for sample in [*data.train, *data.val]:
        own = {"cars": (int(sample.path.stem) - 1) % 2} if name == "cars" else {}
        class_name = data.class_names[sample.label].split()[0].split("/")[0]
        assert own.get(name, sample.label) == sample.label
        assert name == "cars" or class_name.lower() in str(sample.path).lower()


def test_caltech101_has_the_labels_and_classes_of_torchvision(tmp_path):
    ours, theirs = read_dataset(_write("caltech101", tmp_path)), torchvision.datasets.Caltech101(tmp_path)
    labels = {str(s.path.relative_to(ours.root)): s.label for s in [*ours.train, *ours.val, *ours.test]}
    folders = [f"101_ObjectCategories/{name}" for name in theirs.categories]
    assert labels == {f"{folders[y]}/image_{i:04}.jpg": y for i, y in zip(theirs.index, theirs.y, strict=True)}
    assert ours.class_names == theirs.categories


@pytest.mark.parametrize(("name", "partition", "expected"), [("dtd", 1, "45"), ("dtd", 10, "12"), ("sun397", 4, "0")])
def test_a_partition_has_its_own_test_images(name, partition, expected, tmp_path):
    data = read_dataset(_write(name, tmp_path), partition=partition)
    assert "".join(sorted({s.path.stem[-1] for s in data.test})) == expected


# layouts that people make of an archive --------------------------------------------------------------------------------


def _nest(*pairs):
    def change(root):
        for inner, outer in pairs:
            (root / inner).rename(root / "moved")
            (root / outer).mkdir(parents=True)
            (root / "moved").rename(root / outer / inner)

    return change


def _move(name, target):
    def change(root):
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(root / name, root / target)

    return change


def _all(*changes):
    return lambda root: [change(root) for change in changes]


def _move_lists(place):
    return _all(*(_move(name, f"{place}/{name}") for name in ("Training_01.txt", "Testing_01.txt")))


def _with_byte_order_mark(root):
    for table in [*root.glob("*.txt"), *root.glob("*.csv")]:
        table.write_text(table.read_text(), encoding="utf-8-sig")


def _sort_validation(root):
    for number, wnid in enumerate(("n01440764", "n02119789", "n02119789"), 1):
        name = f"ILSVRC2012_val_{number:08}.JPEG"
        _move(f"val/{name}", f"val/{wnid}/{name}")(root)


VARIANTS = {
    "cub: byte order marks": ("cub", _with_byte_order_mark),
    "dogs: lists in lists/": (
        "dogs", _all(_move("train_list.mat", "lists/train_list.mat"), _move("test_list.mat", "lists/test_list.mat")),
    ),
    "dogs: Kaggle's folders": ("dogs", _nest(("Images", "images"), ("Annotation", "annotations"))),
    "cars: test labels in the devkit": (
        "cars", _move("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat"),
    ),
    "cars: Kaggle's folders": ("cars", _nest(("cars_train", "cars_train"), ("cars_test", "cars_test"))),
    "cars: folder of another name": ("cars", lambda root: root.rename(root.parent / "my cars")),
    "pets: GIF and PNG called .jpg, .mat files": ("pets", lambda root: (
        draw(root / "images" / "Abyssinian_1.jpg", format="GIF"), draw(root / "images" / "Abyssinian_6.jpg", format="PNG"),
        (root / "images" / "Abyssinian_101.mat").write_text("stray"),
    )),
    "imagenet: devkit": ("imagenet", lambda root: (_remove(_CSV, "LOC_synset_mapping.txt")(root), layouts.write_devkit(root))),
    "imagenet: sorted validation": ("imagenet", _sort_validation),
    "imagenet: Kaggle's tree": (
        "imagenet", _all(_move("train", "ILSVRC/Data/CLS-LOC/train"), _move("val", "ILSVRC/Data/CLS-LOC/val")),
    ),
    "caltech101: stray files": ("caltech101", lambda root: (
        (root / "101_ObjectCategories" / "Faces" / "Thumbs.db").touch(),
        (root / "101_ObjectCategories" / ".DS_Store").touch(),
    )),
    "sun397: lists in Partitions/": ("sun397", _move_lists("Partitions")),
    "sun397: lists beside the archive": ("sun397", _move_lists("..")),
    "sun397: Partitions/ beside the archive": ("sun397", _move_lists("../Partitions")),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_reads_as_the_official_layout(variant, tmp_path):
    name, change = VARIANTS[variant]
    root = _write(name, tmp_path)
    change(root)
    (root,) = [p for p in tmp_path.iterdir() if p.is_dir() and p.name != "Partitions"]
    data = read_dataset(root)
    assert (data.layout, (len(data.train), len(data.val), len(data.test))) == (name, LAYOUTS[name].sizes)
    assert (data.class_names, data.skipped) == (LAYOUTS[name].class_names, [])
    assert data.warnings == [] or name == "caltech101"
    if "Kaggle's tree" in variant:
        assert read_dataset(root / "ILSVRC/Data/CLS-LOC").test == data.test


# what is tolerated with a warning --------------------------------------------------------------------------------------

WARNINGS = {
    "dogs: several boxes": (
        "dogs",
        lambda root: annotate_dog(root / f"Annotation/{DOGS[0]}/n02085936_6", (0, 0, 5, 5), (6, 6, 9, 9)),
        [f"images with several boxes, the first is used: {DOGS[0]}/n02085936_6"],
    ),
    "imagenet: stray and unsupported files": (
        "imagenet",
        lambda root: (draw(root / "train" / "stray.png"), (root / "train" / layouts.WNIDS[0] / "x.heic").touch()),
        ["skipped 1 image outside the class folders: train/stray.png",
         "skipped 1 image in an unsupported format: train/n01440764/x.heic"],
    ),
    "imagenet: other folders": (
        "imagenet",
        lambda root: draw(root / "train" / "extras" / "x.jpg"),
        ["skipped folders of train/ that are not wnids: extras"],
    ),
    "caltech101: no official split": (
        "caltech101",
        lambda root: draw(root / "101_ObjectCategories" / "Faces" / "me.jpg"),
        ["Caltech-101 has no official split: the test split is a stratified 20% of each class (seed 42); results cannot "
         "be compared with published ones",
         "skipped 1 image that no list names: 101_ObjectCategories/Faces/me.jpg"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNINGS)
def test_tolerated_with_a_warning(case, tmp_path):
    name, change, warnings = WARNINGS[case]
    root = _write(name, tmp_path)
    change(root)
    data = read_dataset(root)
    assert data.warnings == warnings
    assert data.class_names == LAYOUTS[name].class_names
    if "several boxes" in case:
        assert next(s for s in data.test if s.path.stem == "n02085936_6").box == (0.0, 0.0, 5.0, 5.0)


# what is refused -------------------------------------------------------------------------------------------------------


def _remove(*names):
    return lambda root: [shutil.rmtree(root / n) if (root / n).is_dir() else (root / n).unlink() for n in names]


def _text(name, *lines):
    return lambda root: write_lines(root / name, lines)


def _cub100(name, *rows):
    return lambda root: layouts.write_cub100_table(root, name, rows)


def _pets(split, *rows):
    return lambda root: layouts.write_pets_list(root, split, rows)


def _matlab(name, **variables):
    return lambda root: savemat(root / name, variables)


def _dogs_list(split, labels):
    files = [f"{breed}/{breed[:9]}_{i}.jpg" for breed in DOGS for i in range(5)]
    return lambda root: layouts.write_dogs_list(root / f"{split}_list.mat", files, labels)


def _damage_annotations(root):
    breed = root / "Annotation" / DOGS[1]
    (breed / "n02085782_0").unlink()
    (breed / "n02085782_1").write_text("<annotation>")
    (breed / "n02085782_2").write_text("<annotation></annotation>")
    annotate_dog(breed / "n02085782_3", ("wide", 0, 5, 5))
    (breed / "n02085782_4").write_text('<?xml version="1.0" encoding="martian"?><annotation/>')


def _devkit(truth):
    def change(root):
        _remove("LOC_val_solution.csv", "LOC_synset_mapping.txt")(root)
        layouts.write_devkit(root, truth)

    return change


_LIST, _CSV = "test_list.mat", "LOC_val_solution.csv"
_NO_KAGGLE = _remove("LOC_val_solution.csv", "LOC_synset_mapping.txt")
# layout, damage, message
DAMAGES = {
    "cub: ids without image": ("cub", _text("images.txt", "1 001.Auk/0.png"), r"7 ids of image_class_labels.txt are not in images.txt: 2, 3"),
    "cub: images without label": ("cub", _text("image_class_labels.txt", "1 1"), r"7 ids of images.txt are not in image_class_labels.txt: 2, 3"),
    "cub: unknown class": ("cub", _text("image_class_labels.txt", *(f"{i} {i}" for i in range(1, 9))), "classes.txt does not name: 3, 4"),
    "cub: third flag": ("cub", _text("train_test_split.txt", *(f"{i} {i % 3}" for i in range(1, 9))), "holds 2 besides 0 and 1"),
    "cub: class without training": ("cub", _text("train_test_split.txt", *(f"{i} {int(i < 5)}" for i in range(1, 9))), "without a training image: 002"),
    "cub: cub100's id format": ("cub", _text("images.txt", "0, 001.Auk/0.png"), r"line 1: '0, 001\.Auk/0\.png' is not CUB's format"),
    "cub: box of words": ("cub", _text("bounding_boxes.txt", "1 2 3 4 wide"), "is not CUB's format"),
    "cub: empty table": ("cub", _text("bounding_boxes.txt"), "the table is empty; unpack the official archive again, or fix its tables"),
    "cub: superscript": ("cub", _text("classes.txt", "¹ 001.Auk"), "is not CUB's format, 1 new numeric id and 1 value separated by spaces"),
    "cub: classes of one name": ("cub", _text("classes.txt", "1 Auk", "2 Auk"), "several classes with the same name in classes.txt: Auk"),
    "cub: paths elsewhere": ("cub", _text("images.txt", "1 /tmp/a.png", "2 ../a.png"), r"images.txt that lead out of images/: /tmp/a.png, \.\./a"),
    "cub: cub100's tables": ("cub", lambda root: (shutil.rmtree(root), layouts.write_cub100(root)), "lacks bounding_boxes.txt"),
    "cub: two damaged tables": ("cub", _all(_text("bounding_boxes.txt", "1 2"), _text("classes.txt", "x")), "bounding_boxes.txt, line 1: '1 2' is not CUB's format"),
    "cub: several problems": ("cub", _all(_text("train_test_split.txt", *(f"{i} {int(i % 4 != 0)}" for i in range(2, 9))), _remove("images/002.Jay/1.png")), r"1 id of images.txt is not in train_test_split.txt: 1;.*1 of 7 listed images is missing: images/002.Jay/1.png"),
    "cub: one class": ("cub", _all(_text("classes.txt", "1 001.Auk"), _text("image_class_labels.txt", *(f"{i} 1" for i in range(1, 9)))), "1 class found, at least 2 are needed"),
    "cub100: no value": ("cub100", _cub100("classes.txt", (0, "")), "line 1: '0,' is not CUB's format, 1 new numeric id and 1 value separated by a comma"),
    "cub100: missing table": ("cub100", _remove("train_test_split.txt"), r"lacks train_test_split.txt"),
    "dogs: annotations": ("dogs", _damage_annotations, rf"annotations missing in Annotation/: {DOGS[1]}/n02085782_0;.*annotations without a readable box in Annotation/.*n02085782_2 \(no object/bndbox\)"),
    "dogs: no lists": ("dogs", _remove("train_list.mat", _LIST), r"lacks train_list.mat, test_list.mat; unpack .*lists.tar"),
    "dogs: a label for two folders": ("dogs", _dogs_list("train", [1, 2] * 5), r"class ids with several names in the lists: 1 \(n02085782-Chihuahua, n"),
    "dogs: a label without images": ("dogs", _all(_dogs_list("train", [1] * 5 + [3] * 5), _dogs_list("test", [1] * 5 + [3] * 5)), "class ids without an image in the lists: 2"),
    "dogs: text": ("dogs", _text(_LIST, "hello"), "not a readable Matlab file"),
    "dogs: other variables": ("dogs", _matlab(_LIST, files=1), "lacks file_list and labels"),
    "dogs: lengths": ("dogs", _matlab(_LIST, file_list=["a/b.jpg"], labels=[1, 2]), "1 file with the labels 1, 2; expected"),
    "dogs: words": ("dogs", _matlab(_LIST, file_list=["a/b.jpg"], labels=["dog"]), "1 file with the labels dog; expected a class id counted from 1 for each file; unpack"),
    "dogs: huge label": ("dogs", _matlab(_LIST, file_list=["a/b.jpg"], labels=[1e300]), "labels 1e[+]300; expected a class id"),
    "dogs: fraction": ("dogs", _matlab(_LIST, file_list=["a/b.jpg"], labels=[1.5]), "labels 1.5; expected a class id"),
    "dogs: absolute path": ("dogs", _matlab(_LIST, file_list=["/a/b.jpg"], labels=[1]), "paths of test_list.mat that lead out of Images/: /a/b.jpg"),
    "cars: missing files": ("cars", _remove("cars_test_annos_withlabels.mat", "cars_test"), r"Stanford Cars but lacks cars_test/, cars_test_annos_withlabels.mat; unpack"),
    "cars: class ids beyond the devkit's": ("cars", lambda root: annotate_cars(root / "cars_test_annos_withlabels.mat", [("00001.jpg", 2), ("00002.jpg", 7)]), "class ids in the test list outside 1 to 2: 7"),
    "cars: damaged list": ("cars", _text("devkit/cars_train_annos.mat", "hello"), "its lists for train are damaged or not the official ones"),
    "cars: missing and unlisted": ("cars", _move("cars_test/00001.jpg", "cars_test/99999.jpg"), r"1 of 12 listed images is missing: cars_test/00001.jpg.*skipped 1 image that no list names: cars_test/99999.jpg"),
    # else Bengal would be called by the name of the breed before it
    "pets: a class id left out": ("pets", _pets("trainval", *((f"{b}_{i}", n) for n, b in ((1, "Abyssinian"), (3, "Bengal")) for i in range(1, 6))), r"class ids without an image in trainval.txt: 2; "),
    "pets: a class id with two breeds": ("pets", _pets("trainval", ("Abyssinian_1", 1), ("Bengal_1", 1), ("american_bulldog_1", 2)), r"class ids with several names in trainval.txt: 1 \(Abyssinian, Bengal\)"),
    "pets: a breed only tested": ("pets", _pets("test", ("Persian_1", 1)), r"test.txt has breeds .* lacks under these ids: Persian \(1\)"),
    "pets: damaged list": ("pets", _text("annotations/test.txt", "Abyssinian_1 1"), "its lists for test are damaged"),
    "pets: empty lists": ("pets", _all(_pets("trainval"), _pets("test")), "no images to train on"),
    "pets: missing list": ("pets", _remove("annotations/test.txt"), r"lacks annotations/test.txt"),
    "imagenet: no labels": ("imagenet", _NO_KAGGLE, r"no labels for 3 images without class folders; put ILSVRC2012_devkit_t12/ or LOC_"),
    "imagenet: unlabelled and missing": ("imagenet", _all(_devkit("2\n1\n1\n1\n"), lambda root: draw(root / "val" / "other.JPEG")), r"1 of 14 listed images is missing: val/ILSVRC2012_val_00000004.JPEG.*skipped 1 image that no list names: val/other.JPEG"),
    "imagenet: no train/": ("imagenet", _remove("train"), "ImageNet-1K but lacks train/;"),
    "imagenet: neither": ("imagenet", _all(_NO_KAGGLE, _remove("train", "val")), "ImageNet-1K but lacks train/, val/"),
    "imagenet: half a devkit's archive": ("imagenet", _all(_devkit("1"), _remove("val")), "ImageNet-1K but lacks val/;"),
    "imagenet: huge field": ("imagenet", _text(_CSV, "ImageId,PredictionString", "x" * 200_000), "not a table of comma-separated values .*; get the file again"),
    "imagenet: absolute path": ("imagenet", _text(_CSV, "ImageId,PredictionString", "/etc/x,n01440764 1 1 9 9"), "paths of LOC_val_solution.csv that lead out of val/: /etc/x"),
    "imagenet: a line without class": ("imagenet", _text(_CSV, "ImageId,PredictionString", "ILSVRC2012_val_00000001,"), "a line without ImageId or PredictionString"),
    "imagenet: unknown val class": ("imagenet", _all(_NO_KAGGLE, _remove("val"), lambda root: draw(root / "val" / "n99999999" / "x.JPEG")), "classes of val/ that train/ does not have: n99999999; no images in val/"),
    "imagenet: no wnids": ("imagenet", _all(_remove("train"), lambda root: layouts.write_class_folders(root / "train")), "0 folders in train/ with a name like n01440764"),
    "imagenet: id of an inner node": ("imagenet", _devkit("2\n3\n1\n"), r"ids that meta.mat lacks"),
    "imagenet: id a superscript": ("imagenet", _devkit("2\n¹\n1\n"), r"ids that meta.mat lacks"),
    "imagenet: damaged devkit": ("imagenet", _all(_devkit("2\n1\n1\n"), _matlab("ILSVRC2012_devkit_t12/data/meta.mat", words=1)), "not the devkit's table of synsets"),
    "caltech101: gap in the numbers": ("caltech101", _remove("101_ObjectCategories/Faces/image_0003.jpg"), r"1 of 20 listed images is missing: 101_ObjectCategories/Faces/image_0003"),
    "caltech101: single image": ("caltech101", lambda root: draw(root / "101_ObjectCategories/lonely/image_0001.jpg"), "no test split possible, classes with a single image: lonely; unpack"),
    "dtd: other textures": ("dtd", lambda root: layouts.write_dtd_list(root, "test", 1, ["woven/woven_0004.jpg"]), r"labels/test1.txt and labels/train1.txt have different textures"),
    "dtd: damaged lists": ("dtd", lambda root: [layouts.write_dtd_list(root, split, 1, ["no slash"]) for split in ("train", "test")], "lists for train are damaged"),
    "sun397: unknown scene": ("sun397", lambda root: layouts.write_sun397_partition(root, 1, [*layouts.SCENES, "/z/zoo"]), r"Training_01.txt has scenes that ClassName.txt does not name: zoo"),
    "sun397: scene without a name": ("sun397", lambda root: draw(root / "z" / "zoo" / "sun_1.jpg"), r"its lists for all are damaged or not the official ones .*zoo"),
    "sun397: missing image": ("sun397", _remove("a/abbey/sun_5.jpg"), r"1 of 18 listed images is missing: a/abbey/sun_5.jpg"),
    "sun397: no class list": ("sun397", _remove("ClassName.txt", "Training_01.txt"), r"read as SUN397 but lacks ClassName.txt, .*Training_01.txt"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_one_line(case, tmp_path):
    name, damage, message = DAMAGES[case]
    root = _write(name, tmp_path)
    damage(root)
    with pytest.raises(UsageError, match=message) as caught:
        # by its name where the damage makes it look like another data set
        read_dataset(
            root, name if name in ("cub", "cub100") or ("imagenet: " in case and not _is_marked(root)) else None
        )
    assert "\n" not in str(caught.value)


def _is_marked(root):
    return any((root / name).exists() for name in (_CSV, "ILSVRC2012_devkit_t12"))


@pytest.mark.parametrize(
    ("name", "removed", "partition", "message"),
    [
        ("dtd", "labels/val7.txt", 7, "Describable Textures but lacks labels/val7.txt"),
        ("sun397", "Training_04.txt", 2, "lacks Training_02.txt, Testing_02.txt; fetch Partitions.zip from"),
    ],
)
def test_missing_partition_is_named(name, removed, partition, message, tmp_path):
    root = _write(name, tmp_path)
    (root / removed).unlink()
    with pytest.raises(UsageError, match=message) as caught:
        read_dataset(root, partition=partition)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["jpg/", "setid.mat", "imagelabels.mat"])
def test_flowers_are_recognized_by_two_of_three(missing, tmp_path):
    for name in {"jpg/", "setid.mat", "imagelabels.mat"} - {missing}:
        (tmp_path / name).mkdir() if name == "jpg/" else (tmp_path / name).touch()
    with pytest.raises(UsageError, match=f"Oxford Flowers-102 but lacks {missing}; put"):
        read_dataset(tmp_path)


def test_missing_annotation_of_a_missing_image_is_not_reported(tmp_path):
    root = _write("dogs", tmp_path)
    _remove(f"Images/{DOGS[0]}/n02085936_6.jpg", f"Annotation/{DOGS[0]}/n02085936_6")(root)
    assert len(read_dataset(root, skip_missing=True).test) == 3


def test_unreadable_list_is_named_by_the_users_path(tmp_path, monkeypatch):
    root = _write("pets", tmp_path)
    for owner in (builtins, io):
        deny(monkeypatch, owner, "open", "trainval.txt")
    # not by that of the folder of links that torchvision reads
    with pytest.raises(UsageError, match=rf"\A(?!.*opal-deploy-).*{root}/annotations/trainval.txt"):
        read_dataset(root)


def test_a_relative_folder_is_read_and_nothing_is_left_behind(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(_write("dtd", tmp_path))
    data = read_dataset(Path())
    # the paths are the user's, not those of the folder of links that torchvision reads
    assert all(sample.path.is_relative_to(data.root) for sample in data.test)
    assert all(sample.path.is_file() for sample in data.test)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("name", ["cars", "dogs"])
def test_without_scipy_the_extra_is_named_once(name, tmp_path, monkeypatch):
    root, find_spec = _write(name, tmp_path), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else find_spec(name))
    with pytest.raises(MissingExtra, match=r"needs scipy.*opal-deploy\[train\]'$") as caught:
        read_dataset(root)
    assert str(caught.value).count("needs") == 1


def test_a_thousand_wnids_are_recognized(tmp_path):
    for i in range(1000):
        (tmp_path / "train" / f"n{i:08}").mkdir(parents=True)
    (tmp_path / "val").mkdir()
    with pytest.raises(UsageError, match="no labels for 0 images"):
        read_dataset(tmp_path)


@pytest.mark.parametrize(
    "folders",
    [
        ["train/n01440764", "train/n02102040", "val/n01440764", "val/n02102040"],
        ["a", "b"],
        ["a/writer 1", "b/writer 1"],
    ],
    ids=["wnids with a val/ for validation", "letters of images", "letters of folders"],
)
def test_image_folder_that_resembles_a_data_set(folders, tmp_path):
    layouts.write_class_folders(tmp_path, folders)
    assert read_dataset(tmp_path).layout == "imagefolder"


def test_image_folder_read_as_a_data_set_is_told_the_option(tmp_path):
    layouts.write_class_folders(tmp_path, ["Annotation", "Images"])
    with pytest.raises(UsageError, match="if its folders are classes, give --dataset imagefolder"):
        read_dataset(tmp_path)
    assert read_dataset(tmp_path, "imagefolder").class_names == ["Annotation", "Images"]
