"""The file of records: whole lines only, on the disk, and after a full disk too."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from opal_deploy.errors import StoppedEarly
from opal_deploy.inference.run import results
from opal_deploy.inference.run.results import RecordWriter
from opal_deploy.records.record import error_record


def test_a_record_is_one_line_of_json_whatever_its_name_holds(tmp_path: Path) -> None:
    record = error_record('a\nb\u2028"<script>\ud800.jpg', "not_found", "no such file")
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(record)
        writer.write(record)
    first, second = (tmp_path / "r.jsonl").read_bytes().splitlines()
    assert json.loads(first) == json.loads(second) == record


def test_a_record_is_in_the_file_once_it_is_written(tmp_path: Path) -> None:
    value = 0.1 + 0.2
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write({"schema": 1, "image": None, "status": "ok", "margin": value})
        text = (tmp_path / "r.jsonl").read_text()
    assert text.endswith("\n")
    assert json.loads(text)["margin"] == value


FULL = """
import sys
from pathlib import Path
from opal_deploy.errors import StoppedEarly
from opal_deploy.records.record import error_record
from opal_deploy.inference.run.results import RecordWriter
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


def lines(*names: str) -> bytes:
    return b"".join(json.dumps(error_record(name, "not_found", "")).encode() + b"\n" for name in names)


def test_appending_cuts_off_what_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines("a", "b") + b'{"half')
    with RecordWriter(path, len(lines("a")), 1) as writer:
        writer.write(error_record("c", "not_found", ""))
        assert writer.count == 2
    assert path.read_bytes() == lines("a", "c")


def test_without_anything_kept_the_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(lines("a", "b"))
    with RecordWriter(path):
        pass
    assert path.read_bytes() == b""


def test_records_are_handed_to_the_disk_every_few_seconds_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, synced = [0.0], []
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(results.os, "fsync", lambda _: synced.append(now[0]))
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        for second in range(12):
            now[0] = float(second)
            writer.write(error_record("a", "not_found", ""))
    assert synced == [5.0, 10.0, 11.0]


def test_a_disk_that_loses_what_it_was_given_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(results.os, "fsync", lost)
    with pytest.raises(StoppedEarly, match="Input/output error"), RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(error_record("a", "not_found", ""))
