"""The images of a call: their number, and the shards of their list."""

import io
import itertools
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from opal_deploy.run.setup import Inputs


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("in/a.jpg", "in/b/c.png", "in/b/.d.png", "in/b/notes.txt", "in/run/results.jsonl",
                 "in/run/overlays/x.jpg", "in/b/e.jpg", "more/f.jpg"):  # fmt: skip
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("empty").mkdir()
    os.symlink("../in", "in/circle")
    os.symlink("../more", "in/linked")
    Path("list.txt").write_text("in/a.jpg\nhttps://example.org/x.jpg\ngone.jpg\n")
    with zipfile.ZipFile("z.zip", "w") as archive:
        for name in ("1.jpg", "2.jpg", "readme.md"):
            archive.writestr(name, b"")
    with tarfile.open("t.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("1.jpg"), io.BytesIO())


def find(inputs):
    return [(image.index, image.name) for image in inputs.find_images()]


INPUTS = [["in"], ["in", "more/f.jpg", "gone.jpg", "empty"], ["in/*"], ["in/**/*.jpg"], ["z.zip"], ["@list.txt"]]


@pytest.mark.parametrize("images", INPUTS)
def test_as_many_are_counted_as_are_found(images):
    for recursive in (True, False):
        assert Inputs(images, recursive).count() == len(find(Inputs(images, recursive)))


@pytest.mark.parametrize(
    "text", ["-", "t.tar.gz", "*.tar.gz", "@tars.txt", "s3://bucket/in", "https://example.org/a.zip"]
)
def test_what_would_have_to_be_read_or_waited_for_is_not_counted(text):
    Path("tars.txt").write_text("t.tar.gz\n")
    assert Inputs(["in", text]).count() is None


@pytest.mark.parametrize(("batch", "sizes"), [(1, [3, 3, 1]), (2, [4, 3, 0]), (16, [7, 0, 0])])
def test_shards_are_whole_batches_in_the_order_of_the_list(batch, sizes):
    inputs = Inputs(INPUTS[1])
    shards = [find(inputs.take_shard((number, 3), batch)) for number in (1, 2, 3)]
    assert [len(shard) for shard in shards] == sizes
    assert [*itertools.chain(*shards)] == find(inputs)
