"""The folder of `--background`: what it may hold, and how it is refused."""

import shutil

import pytest
from PIL import Image

from opal_deploy.datasets.checks import read_background
from opal_deploy.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    """Six grey images, one of them in a folder below."""
    folder = tmp_path / "background"
    (folder / "below").mkdir(parents=True)
    for number in range(6):
        Image.new("RGB", (8, 8), (40 * number,) * 3).save(folder / ("below" if number == 5 else "") / f"{number}.png")
    return folder


def test_images_are_whole_and_also_from_folders_below(folder, squares):
    background = read_background(folder, squares)
    assert [sample.path.stem for sample in background] == ["0", "1", "2", "3", "4", "5"]
    assert {sample.box for sample in background} == {None}


def test_copies_of_the_data_sets_images_are_refused(folder, squares):
    shutil.copy(squares.test[0].path, folder / "copy.png")
    with pytest.raises(UsageError, match=r"1 image is .*copy\.png"):
        read_background(folder, squares)
    with pytest.raises(UsageError, match=r"39 images are in .* too: "):
        read_background(squares.root, squares)


def test_damaged_images_are_named_and_too_few_refused(folder, squares):
    (folder / "3.png").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"3\.png"):
        read_background(folder, squares)
    for number in (3, 4):
        (folder / f"{number}.png").unlink()
    with pytest.raises(UsageError, match="4 images there"):
        read_background(folder, squares)
