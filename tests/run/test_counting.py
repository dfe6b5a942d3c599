"""The number of images that a call means, known while they are worked on: as many as are found, or none known."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from opal_deploy.run.inputs import ImageCounter
from opal_deploy.sources.discovery import discover, shard
from opal_deploy.sources.items import Skipped


@pytest.fixture
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
    return tmp_path


def count(*inputs, part=(1, 1), recursive=True):
    told = []
    with ImageCounter(inputs, part, recursive=recursive).notify(told.append) as counter:
        counter.join()
    assert told == ([] if counter.total is None else [counter.total])
    return counter.total


@pytest.mark.parametrize(
    "inputs", [["in"], ["in", "more/f.jpg", "gone.jpg", "empty"], ["in/*"], ["in/**/*.jpg"], ["z.zip"], ["@list.txt"]]
)
def test_as_many_are_counted_as_are_found(photos, inputs):
    for recursive in (True, False):
        assert count(*inputs, recursive=recursive) == len(list(discover(inputs, Skipped(), recursive=recursive)))
    for part in ((1, 2), (2, 2), (3, 3)):
        assert count(*inputs, part=part) == len(list(shard(discover(inputs, Skipped()), *part)))


@pytest.mark.parametrize(
    "text", ["-", "t.tar.gz", "*.tar.gz", "@tars.txt", "s3://bucket/in", "https://example.org/a.zip"]
)
def test_what_would_have_to_be_read_or_waited_for_is_not_counted(photos, text):
    Path("tars.txt").write_text("t.tar.gz\n")
    assert count("in", text) is None
