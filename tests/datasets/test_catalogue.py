"""Data sets are recognised by their files, or named."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.datasets import registry as data
from opal_deploy.datasets.samples import DataSet, Sample
from opal_deploy.errors import UsageError

Make = Callable[..., Path]


def test_names_are_the_eleven_layouts() -> None:
    assert data.DATASET_NAMES == (
        "cub",
        "cub100",
        "dogs",
        "cars",
        "pets",
        "flowers",
        "imagenet",
        "caltech101",
        "dtd",
        "sun397",
        "imagefolder",
    )


def test_an_unknown_name_is_an_error_that_lists_the_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no data set is called 'birds'; choose one of cub, cub100, .*imagefolder"):
        data.read_dataset(tmp_path, "birds")


@pytest.mark.parametrize("name", [None, *data.DATASET_NAMES])
def test_a_missing_folder_is_an_error_for_every_data_set(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        data.read_dataset(tmp_path / "nowhere", name)


@pytest.mark.parametrize("name", data.DATASET_NAMES)
def test_an_empty_folder_is_one_line_with_what_is_expected_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"lacks|at least 2 are needed") as caught:
        data.read_dataset(tmp_path, name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in data.DATASET_NAMES if name not in ("dtd", "sun397")])
def test_a_partition_of_a_data_set_without_any_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"has no partition 2.*only dtd, sun397 have"):
        data.read_dataset(tmp_path, name, partition=2)


@pytest.mark.parametrize("name", ["dtd", "sun397"])
@pytest.mark.parametrize("partition", [0, 11])
def test_a_partition_out_of_range_is_an_error(tmp_path: Path, name: str, partition: int) -> None:
    with pytest.raises(UsageError, match=f"has the partitions 1 to 10, {partition} is none"):
        data.read_dataset(tmp_path, name, partition=partition)


def test_layout_is_the_name(tmp_path: Path, write_cub: Make, class_folders: Make) -> None:
    assert data.read_dataset(write_cub(tmp_path / "birds")).layout == "cub"
    assert data.read_dataset(class_folders(tmp_path / "others")).layout == "imagefolder"


def test_a_name_overrules_the_files(tmp_path: Path, class_folders: Make, write_cub: Make) -> None:
    class_folders(write_cub(tmp_path), ["a", "b"])
    assert data.read_dataset(tmp_path, "imagefolder").class_names == ["a", "b", "images"]


def test_a_parent_of_several_data_sets_is_an_error_that_names_them(tmp_path: Path, write_cub: Make) -> None:
    write_cub(tmp_path / "CUB_200_2011")
    (tmp_path / "caltech101" / "101_ObjectCategories").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"several data sets \(cub in .*, caltech101 in .*\); choose one"):
        data.read_dataset(tmp_path)


def test_a_named_data_set_is_found_in_such_a_parent(tmp_path: Path, write_cub: Make) -> None:
    write_cub(tmp_path / "CUB_200_2011")
    (tmp_path / "caltech101" / "101_ObjectCategories").mkdir(parents=True)
    assert data.read_dataset(tmp_path, "cub").layout == "cub"


def test_class_folders_of_wnids_are_not_yet_imagenet(tmp_path: Path, class_folders: Make) -> None:
    # Imagenette's val/ is for validation
    for split in ("train", "val"):
        class_folders(tmp_path / split, ["n01440764", "n02102040"])
    found = data.read_dataset(tmp_path)
    assert (found.layout, len(found.val), len(found.test)) == ("imagefolder", 10, 0)


class TestWhatMayNotBeRead:
    """Tests run as root, too, whom no mode keeps out: the refusal is played."""

    @pytest.mark.parametrize(
        ("call", "file"),
        [("open", "images.txt"), ("is_file", "images.txt"), ("read_text", "classes.txt"), ("iterdir", "val")],
        ids=["head of a table", "whether it is there", "table", "folder"],
    )
    def test_it_is_one_line_with_its_name(
        self,
        tmp_path: Path,
        write_cub: Make,
        class_folders: Make,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        file: str,
    ) -> None:
        if file == "val":
            for split in ("train", "val"):
                class_folders(tmp_path / split)
        else:
            write_cub(tmp_path)
        usual = getattr(Path, call)

        def refuse(path: Path, *args: Any, **options: Any) -> Any:
            if path.name == file:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return usual(path, *args, **options)

        monkeypatch.setattr(Path, call, refuse)
        with pytest.raises(UsageError, match=rf"{file}: cannot be read \(Permission denied\); ") as caught:
            data.read_dataset(tmp_path)
        assert "\n" not in str(caught.value)


def test_it_describes_itself_in_one_line(tmp_path: Path, write_cub: Make, class_folders: Make) -> None:
    birds = write_cub(tmp_path / "birds" / "CUB_200_2011")
    found = DataSet(birds, "cub", ["a", "b"], [Sample(birds, 0)], [], [Sample(birds, 1)] * 1500, crop="boxes")
    assert found.describe() == (
        f"cub from {birds}: 2 classes, 1 image to train on, 0 to validate, 1,500 to test, cropped to their boxes"
    )
    plain = data.read_dataset(class_folders(tmp_path / "plain"))
    assert plain.describe() == (
        f"imagefolder from {tmp_path / 'plain'}: 2 classes, 8 images to train on, 2 to validate, 0 to test"
    )


@pytest.mark.parametrize(("count", "why"), [(1, "classes with a single image: a, b"), (2, "4 images are too few")])
def test_too_few_images_to_split_name_their_folder(tmp_path: Path, class_folders: Make, count: int, why: str) -> None:
    class_folders(tmp_path, count=count)
    with pytest.raises(UsageError, match=rf"^{tmp_path}: no validation split possible, {why}"):
        data.read_dataset(tmp_path)


def test_reading_is_reported_image_by_image(tmp_path: Path, class_folders: Make) -> None:
    said: list[tuple[int, int | None, str]] = []
    data.read_dataset(class_folders(tmp_path), report=lambda *state: said.append(state))
    assert said == [(done, 10, "reading headers") for done in range(1, 11)]


def test_a_single_class_is_an_error_whatever_the_layout(tmp_path: Path, write_cub: Make) -> None:
    labels = [f"{i} 1" for i in range(1, 9)]
    write_cub(tmp_path, {"classes.txt": ["1 001.Auk"], "image_class_labels.txt": labels})
    with pytest.raises(UsageError, match="1 class found, at least 2 are needed"):
        data.read_dataset(tmp_path)
