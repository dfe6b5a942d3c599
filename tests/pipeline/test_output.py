"""The output folder: whole lines only, nobody's earlier results lost."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.explain.records import error_record
from opal_deploy.pipeline.output import RecordWriter, new_folder, overlay_name


def test_a_record_is_one_line_of_json_whatever_its_name_holds(tmp_path: Path) -> None:
    record = error_record('a\nb\u2028"<script>\ud800.jpg', "not_found", "no such file")
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(record)
        writer.write(record)
    first, second = (tmp_path / "r.jsonl").read_bytes().splitlines()
    assert json.loads(first) == json.loads(second) == record


def test_floats_round_trip(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write({"schema": 1, "image": None, "status": "ok", "margin": value})
    assert json.loads((tmp_path / "r.jsonl").read_text())["margin"] == value


def test_a_record_is_in_the_file_once_it_is_written(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(error_record("a", "not_found", "no such file"))
        assert (tmp_path / "r.jsonl").read_text().endswith("\n")


FULL = """
import sys
from pathlib import Path
from opal_deploy.errors import StoppedEarly
from opal_deploy.explain.records import error_record
from opal_deploy.pipeline.output import RecordWriter
with RecordWriter(Path(sys.argv[1])) as writer:
    try:
        for number in range(1000):
            writer.write(error_record(str(number), "not_found", "no such file"))
    except StoppedEarly as error:
        print(error)
"""


def test_a_full_disk_leaves_whole_lines_and_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)],
        capture_output=True,
        text=True,
        # in the middle of a line
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    found = path.read_bytes()
    assert found.endswith(b"}\n")
    assert len(found) <= 1000
    count = len([json.loads(line) for line in found.splitlines()])
    assert f"the {count} records before are whole; make room and run again" in done.stdout


def test_a_device_that_refuses_every_byte_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").symlink_to("/dev/full")
    with RecordWriter(tmp_path / "r.jsonl") as writer, pytest.raises(StoppedEarly, match="No space left on device"):
        writer.write(error_record("a", "not_found", "no such file"))


def test_the_default_folder_is_the_first_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [new_folder(None, overwrite=False).name for _ in range(3)] == [
        "explanations",
        "explanations-2",
        "explanations-3",
    ]


def test_results_of_an_earlier_run_are_not_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("precious")
    with pytest.raises(UsageError, match="holds the results of an earlier run; choose another --out, or give --overwr"):
        new_folder(tmp_path, overwrite=False)
    assert (tmp_path / "results.jsonl").read_text() == "precious"


def test_overwriting_clears_an_earlier_runs_files_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "overlays").mkdir()
    for name in ("results.jsonl", "report.html", "overlays/000000-a.jpg", "mine.txt"):
        (tmp_path / name).write_text("x")
    new_folder(tmp_path, overwrite=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["mine.txt", "overlays"]


def test_a_folder_that_exists_without_results_is_used(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert new_folder(tmp_path, overwrite=False) == tmp_path


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300], ids=["a file", "below a file", "too long a name"])
def test_a_place_that_cannot_be_a_folder_is_a_wrong_call(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match=r"cannot be written \(.*\); choose another --out"):
        new_folder(tmp_path / name, overwrite=False)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("a/b.jpg", "overlays/000007-b.jpg.jpg"),
        ("a/..", "overlays/000007-image.jpg"),
        (None, "overlays/000007-image.jpg"),
        ("a b<script>\n.jpg", "overlays/000007-a_b_script_.jpg.jpg"),
        ("a\\xff.jpg", "overlays/000007-a_xff.jpg.jpg"),
        ("x" * 300, f"overlays/000007-{'x' * 80}.jpg"),
    ],
)
def test_overlays_have_names_that_are_safe_everywhere(image: str | None, expected: str) -> None:
    assert overlay_name(7, image) == expected
