"""`infer --every`: a record for each chosen frame."""

import shutil
import sys

import pytest

from tests.cli.calls import check, one_line, read_results
from tests.videos import cut, noise, write_sound, write_video


@pytest.fixture
def call(tmp_path, exact_model, opal):
    """`opal-deploy` in a folder with the videos `in/a.mp4` and `in/b/cut.mp4` and the image `in/c.png`."""
    write_video(tmp_path / "in/a.mp4")
    cut(write_video(tmp_path / "in/b/cut.mp4", draw=noise))

    def run(command, *arguments):
        return opal(command, *arguments, "--model", exact_model, cwd=tmp_path)

    return run


def test_each_chosen_frame_has_a_record(tmp_path, call, make_pictures):
    shutil.move(make_pictures(tmp_path / "pictures", 1)[0], tmp_path / "in/c.jpg")
    (tmp_path / "labels.csv").write_text("image,label\na.mp4,ash\nb/cut.mp4#frame=000010,birch\n")
    options = ["--every", "1s", "--explain", "--labels", "labels.csv", "--format", "csv", "--out", "out"]
    check(call("infer", "in", "--no-isolate", *options), 3)
    records = read_results(tmp_path / "out")
    names = [f"in/a.mp4#frame={n:06d}" for n in (0, 10, 20)] + [f"in/b/cut.mp4#frame={n:06d}" for n in (0, 10)]
    assert [record["image"] for record in records] == [*names, "in/b/cut.mp4", "in/c.jpg"]
    assert [record.get("frame") for record in records] == [0, 10, 20, 0, 10, None, None]
    assert [record.get("time") for record in records] == [0, 1, 2, 0, 1, None, None]
    assert [record.get("label") for record in records] == ["ash"] * 3 + [None, "birch", None, None]
    assert records[5]["error"]["code"] == "truncated_video"
    assert len({record["image_sha256"] for record in records}) == 3
    assert (tmp_path / "out" / records[1]["overlay"]).name == "000001-a.mp4_frame_000010.jpg"
    # frames are not computed again
    assert "5 of 7 records were not checked" in check(call("verify", "out", "--all"), 3).stderr


def test_a_run_that_ended_early_goes_on_with_the_same_frames(tmp_path, call):
    options = ["in", "--every", "4", "--batch", "2", "--no-isolate"]
    # the first error ends the run
    write_sound(tmp_path / "in/a0.mp4")
    assert call("infer", *options, "--out", "out", "--max-errors", "0").returncode == 5
    before = len(read_results(tmp_path / "out"))
    assert call("infer", *options, "--out", "out").returncode == 3
    assert call("infer", *options, "--out", "again").returncode == 3
    assert 0 < before < len(read_results(tmp_path / "out"))
    assert read_results(tmp_path / "out") == read_results(tmp_path / "again")
    assert call("infer", *options, "--out", "shards", "--shards", "2").returncode == 3
    assert read_results(tmp_path / "shards") == read_results(tmp_path / "again")
    other = call("infer", "in", "--every", "5", "--out", "out")
    assert "every 4 there, 5 here" in one_line(other)


def test_without_pyav_the_extra_is_named(tmp_path, call, exact_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    line = one_line(call("infer", "in", "--every", "1"))
    assert line.endswith("which is not installed: pip install 'opal-deploy[video]'"), line
