"""Whose a folder is: a run goes on where it ended, and two runs never mix."""

import json

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.run.directory import acquire_run_dir
from opal_deploy.run.summary import Summary

MODEL = {"file": "ckpt.onnx", "sha256": "ab12"}
IDENTITY = {"images": ["in/"], "model": MODEL, "top": 3, "explain": False, "boxes": None}


def begin(root, *, finish=False, **changes):
    """A run that is killed after its first record, or finished with it."""
    with acquire_run_dir(root, {**IDENTITY, **changes}, overwrite=False) as folder:
        folder.write_config()
        (folder.root / "results.jsonl").write_text("{}\n")
        if finish:
            folder.write_summary(Summary(), {})
        return folder.root


def look(root, *, overwrite=False, **changes):
    with acquire_run_dir(root, {**IDENTITY, **changes}, overwrite=overwrite) as folder:
        return folder


def test_the_same_run_goes_on_until_it_is_finished(tmp_path):
    assert look(tmp_path).state == "new"
    begin(tmp_path)
    document = json.loads((tmp_path / "run.json").read_text())
    assert (document["schema"], document["run"]) == (1, IDENTITY)
    found = look(tmp_path)
    assert (found.state, found.document["resumed"], bool(found.document["started"])) == ("unfinished", [], True)
    begin(tmp_path)
    assert len(look(tmp_path).document["resumed"]) == 1
    begin(tmp_path, finish=True)
    assert look(tmp_path).state == "finished"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.jsonl", None),
        ("results.jsonl", "{"),
        ("summary.json", None),
        ("summary.json", '{"schema": 1, "complete": true, "results_bytes": 1000}'),
    ],
)
def test_a_run_whose_end_is_in_doubt_goes_on(tmp_path, name, content):
    begin(tmp_path, finish=True)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert look(tmp_path).state == "unfinished"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": "b.csv, sha256 12"}, "--boxes none there, b.csv, sha256 12 here"),
        ({"images": ["in/", "more/"]}, "images in/ there, in/ more/ here"),
        ({"model": {"file": "ckpt.onnx", "sha256": "cd"}}, "--model ckpt.onnx ab12 there, ckpt.onnx cd here"),
        ({"min_margin": 0.5}, "--min-margin none there, 0.5 here"),
        ({"top": 5, "explain": True}, "--top 3 there, 5 here; --explain no there, yes here"),
    ],
)
def test_another_run_is_refused_with_the_difference(tmp_path, change, message):
    begin(tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UsageError, match="--overwrite") as refused:
        look(tmp_path, **change)
    assert f"it holds another run: {message}; choose" in str(refused.value)
    assert (tmp_path / "run.json").read_bytes() == before


def test_results_without_run_json_are_not_touched(tmp_path):
    (tmp_path / "results.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="earlier"):
        look(tmp_path)
    assert (tmp_path / "results.jsonl").read_text() == "precious"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "damaged") for text in ("", "[]", '{"schema": 1}', "\0" * 50)),
        ('{"schema": 99, "run": {}}', "schema 99"),
    ],
)
def test_a_damaged_run_json_is_refused(tmp_path, text, message):
    begin(tmp_path)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        look(tmp_path)


def test_overwriting_clears_an_earlier_runs_files_and_no_others(tmp_path):
    begin(tmp_path, finish=True)
    drawings = ("overlays/000000-a.jpg", "overlays/0001/010000-a.jpg")
    for name in ("report.html", "results.csv", *drawings, "mine.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".results.parquet.abc.part.parquet").write_text("half")
    assert look(tmp_path, overwrite=True, top=5).state == "new"
    assert [p.name for p in tmp_path.rglob("*")] == ["mine.txt"]


def test_a_second_run_in_the_same_place_is_refused_until_the_first_ends(tmp_path):
    with acquire_run_dir(tmp_path, IDENTITY, overwrite=False) as folder:
        folder.write_config()
        for overwrite in (False, True):
            with pytest.raises(UsageError, match="another process"):
                look(tmp_path, overwrite=overwrite)
    assert look(tmp_path).state == "unfinished"
