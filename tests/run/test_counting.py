"""The images of a call: their number, and the shards of their list."""

import itertools
import os
from pathlib import Path

import pytest

from opal_deploy.run.setup import Inputs


@pytest.fixture(autouse=True)
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("in/a.jpg", "in/b/c.png", "in/b/.d.png", "in/b/notes.txt", "in/run/run.json",
                 "in/run/overlays/x.jpg", "in/b/e.jpg", "more/f.jpg"):  # fmt: skip
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    Path("empty").mkdir()
    os.symlink("../in", "in/circle")
    os.symlink("../more", "in/linked")


def find(inputs):
    return [(image.index, image.name) for image in inputs.find_images()]


def test_as_many_are_counted_as_are_found():
    for images in (["in"], ["in", "more/f.jpg", "empty"]):
        for recursive in (True, False):
            assert Inputs(images, recursive).count() == len(find(Inputs(images, recursive)))


@pytest.mark.parametrize("text", ["-", "z.zip", "in/*", "@list.txt", "s3://bucket/in"])
def test_what_would_have_to_be_read_or_waited_for_is_not_counted(text):
    assert Inputs(["in", text]).count() is None


@pytest.mark.parametrize(("batch", "sizes"), [(1, [3, 3, 1]), (2, [4, 3, 0]), (16, [7, 0, 0])])
def test_shards_are_whole_batches_in_the_order_of_the_list(batch, sizes):
    inputs = Inputs(["in", "more/f.jpg", "gone.jpg", "empty"])
    shards = [find(inputs.take_shard((number, 3), batch)) for number in (1, 2, 3)]
    assert [len(shard) for shard in shards] == sizes
    assert [*itertools.chain(*shards)] == find(inputs)
