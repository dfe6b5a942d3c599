"""ImageNet-1K as it is downloaded, as it is sorted, and as Kaggle packs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from opal_deploy.datasets import registry as data
from opal_deploy.datasets.samples import DataSet
from opal_deploy.errors import UsageError

Make = Callable[..., Path]

# the devkit's ids do not follow the wnids
SYNSETS = [
    (1, "n02119789", "kit fox, Vulpes macrotis"),
    (2, "n01440764", "tench, Tinca tinca"),
    (3, "n00001740", "entity"),
]
WNIDS = ["n01440764", "n02119789"]
NAMES = ["n01440764 tench", "n02119789 kit fox"]


def _train(root: Path, draw: Make) -> None:
    for wnid in WNIDS:
        for i in range(5):
            draw(root / "train" / wnid / f"{wnid}_{i}.JPEG")


def _flat_val(root: Path, draw: Make) -> None:
    for i in range(1, 4):
        draw(root / "val" / f"ILSVRC2012_val_{i:08}.JPEG")


def _devkit(root: Path, truth: str = "2\n1\n1\n") -> None:
    folder = root / "ILSVRC2012_devkit_t12" / "data"
    folder.mkdir(parents=True)
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height")
    table = np.empty((len(SYNSETS), 1), dtype=[(field, object) for field in fields])
    for row, (number, wnid, words) in enumerate(SYNSETS):
        # the devkit's inner nodes, such as entity, have children and are no classes
        table[row, 0] = (float(number), wnid, words, "a gloss", 2.0 * (number == 3), np.zeros((1, 0)), 0.0)
    savemat(folder / "meta.mat", {"synsets": table})
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)


def _kaggle(root: Path, *, names: bool = True) -> None:
    (root / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\n"
        "ILSVRC2012_val_00000003,n02119789 85 1 499 272 n02119789 1 2 3 4 \n"
        "ILSVRC2012_val_00000001,n01440764 1 1 9 9 \n"
        "ILSVRC2012_val_00000002,n02119789 1 1 9 9 \n"
    )
    if names:
        (root / "LOC_synset_mapping.txt").write_text(
            "n01440764 tench, Tinca tinca\nn02119789 kit fox, Vulpes macrotis\n"
        )


def _tested(found: DataSet) -> list[tuple[str, int]]:
    return [(s.path.name, s.label) for s in found.test]


FLAT = [("ILSVRC2012_val_00000001.JPEG", 0), ("ILSVRC2012_val_00000002.JPEG", 1), ("ILSVRC2012_val_00000003.JPEG", 1)]


def test_sorted_val_is_the_test_split_and_validation_comes_from_train(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    for wnid in WNIDS:
        draw(tmp_path / "val" / wnid / "ILSVRC2012_val_00000001.JPEG")
    found = data.read_dataset(tmp_path, "imagenet")
    assert (found.layout, found.crop) == ("imagenet", None)
    assert (len(found.train), len(found.val), len(found.test)) == (8, 2, 2)
    assert all(s.path.parent.name == WNIDS[s.label] for s in [*found.train, *found.val, *found.test])
    assert all("train" in s.path.parts for s in found.val)
    assert found.class_names == WNIDS


def test_flat_val_is_labelled_by_the_devkit(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _devkit(tmp_path)
    found = data.read_dataset(tmp_path)
    assert (found.layout, found.class_names, _tested(found)) == ("imagenet", NAMES, FLAT)
    assert found.warnings == []


def test_flat_val_is_labelled_by_kaggles_table(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _kaggle(tmp_path)
    found = data.read_dataset(tmp_path)
    assert (found.layout, found.class_names, _tested(found)) == ("imagenet", NAMES, FLAT)


def test_without_a_file_that_names_them_classes_are_wnids(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _kaggle(tmp_path, names=False)
    assert data.read_dataset(tmp_path).class_names == WNIDS


@pytest.mark.parametrize("given", [".", "ILSVRC/Data/CLS-LOC"])
def test_kaggles_tree_will_do_from_its_top_or_from_its_images(tmp_path: Path, draw: Make, given: str) -> None:
    _train(tmp_path / "ILSVRC/Data/CLS-LOC", draw)
    _flat_val(tmp_path / "ILSVRC/Data/CLS-LOC", draw)
    _kaggle(tmp_path)
    found = data.read_dataset(tmp_path / given)
    assert (found.layout, found.class_names, _tested(found)) == ("imagenet", NAMES, FLAT)


def test_a_thousand_wnids_are_recognised(tmp_path: Path) -> None:
    for i in range(1000):
        (tmp_path / "train" / f"n{i:08}").mkdir(parents=True)
    (tmp_path / "val").mkdir()
    with pytest.raises(UsageError, match="nothing gives their labels"):
        data.read_dataset(tmp_path)


def test_flat_val_without_labels_says_what_to_add(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    with pytest.raises(UsageError, match=r"3 images without class folders.*put ILSVRC2012_devkit_t12/ or LOC_"):
        data.read_dataset(tmp_path, "imagenet")


def test_val_images_without_a_label_are_a_warning_and_labels_without_image_an_error(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _devkit(tmp_path, "2\n1\n1\n1\n")
    draw(tmp_path / "val" / "other.JPEG")
    with pytest.raises(UsageError, match=r"1 of 14 listed images is missing: val/ILSVRC2012_val_00000004.JPEG") as e:
        data.read_dataset(tmp_path)
    assert "1 image is in no list and not used: val/other.JPEG" in str(e.value)


def test_absent_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ImageNet-1K but lacks train/, val/"):
        data.read_dataset(tmp_path, "imagenet")


@pytest.mark.parametrize(
    ("there", "marks", "absent"),
    [("train", "devkit", "val/"), ("train", "kaggle", "val/"), ("val", "devkit", "train/")],
)
def test_an_archive_half_unpacked_is_recognised(
    tmp_path: Path, draw: Make, there: str, marks: str, absent: str
) -> None:
    _train(tmp_path, draw)
    (tmp_path / "train").rename(tmp_path / there)
    (_devkit if marks == "devkit" else _kaggle)(tmp_path)
    with pytest.raises(UsageError, match=f"ImageNet-1K but lacks {absent};"):
        data.read_dataset(tmp_path)


def test_images_in_train_itself_and_of_other_kinds_are_a_warning(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _kaggle(tmp_path)
    draw(tmp_path / "train" / "stray.png")
    (tmp_path / "train" / WNIDS[0] / "x.heic").touch()
    assert data.read_dataset(tmp_path).warnings == [
        "1 image lies in no class folder and is not used: train/stray.png",
        "1 file has an extension that is not read and is not used: train/n01440764/x.heic",
    ]


def test_lists_may_begin_with_a_byte_order_mark(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _kaggle(tmp_path)
    for name in ("LOC_val_solution.csv", "LOC_synset_mapping.txt"):
        (tmp_path / name).write_text((tmp_path / name).read_text(), encoding="utf-8-sig")
    found = data.read_dataset(tmp_path)
    assert (found.class_names, _tested(found)) == (NAMES, FLAT)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x" * 200_000, "not a table of comma-separated values .*; get the file again"),
        ("/etc/x,n01440764 1 1 9 9", "paths of LOC_val_solution.csv that lead out of val/: /etc/x"),
    ],
    ids=["huge field", "absolute path"],
)
def test_a_damaged_table_of_kaggles_is_an_error(tmp_path: Path, draw: Make, line: str, message: str) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    (tmp_path / "LOC_val_solution.csv").write_text(f"ImageId,PredictionString\n{line}\n")
    with pytest.raises(UsageError, match=message):
        data.read_dataset(tmp_path)


def test_folders_of_train_that_are_no_wnid_are_passed_over(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _kaggle(tmp_path)
    draw(tmp_path / "train" / "extras" / "x.jpg")
    found = data.read_dataset(tmp_path)
    assert found.class_names == NAMES
    assert found.warnings == ["folders of train/ that are no wnid were passed over: extras"]


def test_val_classes_that_train_does_not_have_are_an_error(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    draw(tmp_path / "val" / "n99999999" / "x.JPEG")
    with pytest.raises(UsageError, match="classes of val/ that train/ does not have: n99999999; no images in val/"):
        data.read_dataset(tmp_path, "imagenet")


def test_train_without_wnids_is_an_error(tmp_path: Path, class_folders: Make) -> None:
    class_folders(tmp_path / "train")
    class_folders(tmp_path / "val")
    with pytest.raises(UsageError, match="0 folders in train/ are called like n01440764"):
        data.read_dataset(tmp_path, "imagenet")


@pytest.mark.parametrize(
    "truth",
    ["2\n7\n1\n", "2\nfox\n1\n", "2\n3\n1\n", "2\n¹\n1\n"],
    ids=["too high", "a word", "inner node", "superscript"],
)
def test_ids_that_the_devkit_lacks_are_an_error(tmp_path: Path, draw: Make, truth: str) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _devkit(tmp_path, truth)
    with pytest.raises(UsageError, match=r"ids that meta.mat lacks"):
        data.read_dataset(tmp_path)


def test_a_damaged_devkit_is_an_error(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    _devkit(tmp_path)
    savemat(tmp_path / "ILSVRC2012_devkit_t12" / "data" / "meta.mat", {"words": 1})
    with pytest.raises(UsageError, match="not the devkit's table of synsets"):
        data.read_dataset(tmp_path)


def test_a_line_of_kaggles_table_without_a_class_is_an_error(tmp_path: Path, draw: Make) -> None:
    _train(tmp_path, draw)
    _flat_val(tmp_path, draw)
    (tmp_path / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001,\n")
    with pytest.raises(UsageError, match="a line without ImageId or PredictionString"):
        data.read_dataset(tmp_path)
