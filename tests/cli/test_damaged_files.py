"""Damaged files of a run and of an atlas: each is told in one line, or the images are answered again."""

import json
import os
import shutil

import pytest

from tests.cli.calls import check, one_line, read_results


@pytest.fixture(scope="module")
def finished(opal, exact_model, make_pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    make_pictures(folder / "in", 2)
    check(opal("infer", "in", "--model", exact_model, "--out", "run", cwd=folder))
    return folder


def pipe(path):
    """Nobody writes to it: opening it blocks."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def change(**values):
    """Return what changes keys of the first line, or of the only document."""

    def write(path):
        text = path.read_text("utf-8")
        first, rest = (text, "") if path.suffix == ".json" else text.split("\n", 1)
        document = {key: value for key, value in {**json.loads(first), **values}.items() if value is not ...}
        path.write_text(json.dumps(document) + "\n" + rest, "utf-8")

    return write


NO_BOX = change(evidence=[{"slot": 0}])
REFUSED = {
    "convert, no box": ("results.jsonl", NO_BOX, ["convert", "run", "--to", "coco"], "line 1 is not a whole record"),
    "diff, a huge margin": ("results.jsonl", change(margin=10**400), ["diff", "run", "run"], "not a whole record"),
    "infer, another schema": (
        "run.json",
        change(schema=2),
        ["infer", "in", "--out", "run"],
        "schema 2 found, 1 expected",
    ),
    "infer, a pipe": ("run.json", pipe, ["infer", "in", "--out", "run"], "run.json: damaged"),
    "atlas, a pipe": ("atlas.json", pipe, ["explain", "in/000.png", "--atlas", "run"], "a pipe or a device"),
}


@pytest.mark.parametrize(("name", "damage", "call", "message"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_file_is_refused_in_one_line(opal, exact_model, finished, tmp_path, name, damage, call, message):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "run" / name)
    model = ["--model", exact_model] if call[0] in ("infer", "explain") else []
    assert message in one_line(opal(*call, *model, cwd=tmp_path))


def test_a_run_with_a_damaged_record_is_resumed(opal, exact_model, finished, tmp_path):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run/summary.json").unlink()
    change(width=0)(tmp_path / "run/results.jsonl")
    check(opal("infer", "in", "--model", exact_model, "--out", "run", cwd=tmp_path))
    assert read_results(tmp_path / "run") == read_results(finished / "run")
