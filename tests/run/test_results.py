"""The file of records: whole lines only, on the disk, and after a full disk too."""

import json

import pytest

from opal_deploy.errors import StoppedEarly
from opal_deploy.records.build import Place, error_record
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.run import results
from opal_deploy.run.results import RecordWriter

RECORD = error_record("a", "not_found", "no such file")


def test_a_record_is_one_line_of_json_and_in_the_file_once_it_is_written(tmp_path):
    name = 'a\nb"<script>\ud800\r\v\f\x1c\x1d\x1e\x7f\x85\x9b\u2028\u2029.jpg'
    odd = error_record(name, "not_found", "no such file", place=Place(0, 0.1 + 0.2))
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(odd)
        writer.write(odd)
        text = (tmp_path / "r.jsonl").read_bytes().decode()
    # by Unicode's rules as well as by JSON's, and without what steers a terminal
    first, second = text.splitlines()
    assert json.loads(first) == json.loads(second) == to_document(odd)
    assert text.replace("\n", "").isprintable()


def test_appending_cuts_off_what_is_not_kept(tmp_path):
    path, line = tmp_path / "r.jsonl", to_json_line(RECORD)
    for kept, count in ((len(line), 1), 2), ((), 1):
        path.write_bytes(line + b"x" * 500 + b'\n{"half')
        with RecordWriter(path, *kept) as writer:
            writer.write(RECORD)
            assert writer.count == count
        assert path.read_bytes() == line * count


def test_records_are_handed_to_the_disk_every_few_seconds_and_at_the_end(tmp_path, monkeypatch):
    now, synced = [0.0], []
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(results.os, "fsync", lambda _: synced.append(now[0]))
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        for second in range(12):
            now[0] = float(second)
            writer.write(RECORD)
    assert synced == [5.0, 10.0, 11.0]


def test_a_disk_that_loses_what_it_was_given_stops_the_run(tmp_path, monkeypatch):
    def lost(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(results.os, "fsync", lost)
    with pytest.raises(StoppedEarly, match="Input/output error"), RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(RECORD)
