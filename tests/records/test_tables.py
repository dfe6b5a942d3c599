"""The records as Parquet and CSV: the same values, in the documented columns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.errors import MissingExtra, StoppedEarly, UsageError
from opal_deploy.inference.run.results import RecordWriter, read_records
from opal_deploy.records import tables
from opal_deploy.records.record import Record, error_record
from opal_deploy.records.tables import COLUMNS, LISTS, check_formats, write_table

ANSWER: Any = {"class_id": 3, "label": 'Übersee, "Eiche"\n', "logit": -0.1 - 0.2, "cosine": 0.916}
OK: Record = {
    "schema": 1,
    "image": "a/b.jpg",
    "status": "ok",
    "width": 500,
    "height": 375,
    "prediction": ANSWER,
    "margin": 0.31,
    "top": [ANSWER, {**ANSWER, "class_id": 1, "cosine": None}],
    "evidence": [
        {
            "slot": 0,
            "channel": 9,
            "cell": [2, 4],
            "score": 0.93,
            "contribution": 0.19,
            "box": [286.0, 107.5, 357.0, 160.0],
        },
        {"slot": 1, "channel": 10, "cell": [0, 1], "score": 0.5, "contribution": None, "box": [0.0, 1.0, 2.0, 3.0]},
    ],
    "overlay": "overlays/000000-b.jpg.jpg",
    "truth": "ash",
}
RECORDS = [OK, error_record("c\\xff.jpg", "truncated_image", "it ends early"), {**OK, "truth": ANSWER["label"]}]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    with RecordWriter(tmp_path / "results.jsonl") as writer:
        for record in RECORDS:
            writer.write(record)
    return tmp_path


def parquet(out: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_table(out / "results.parquet")


def test_parquet_has_the_documented_columns_and_values(out: Path) -> None:
    pytest.importorskip("pyarrow")
    write_table(read_records(out / "results.jsonl"), out, "parquet")
    table = parquet(out)
    types = {"string": "string", "int32": "int32", "float64": "double", "bool": "bool"}
    assert table.column_names == [*COLUMNS, *LISTS]
    assert [str(field.type) for field in table.schema][: len(COLUMNS)] == [types[t] for t in COLUMNS.values()]
    first, second, third = table.to_pylist()
    assert first["image"] == "a/b.jpg"
    assert (first["class_id"], first["label"], first["logit"]) == (3, ANSWER["label"], ANSWER["logit"])
    assert first["top"] == OK["top"]
    assert first["evidence"][0] == {
        "slot": 0, "name": None, "channel": 9, "row": 2, "col": 4, "score": 0.93, "contribution": 0.19,
        "x0": 286.0, "y0": 107.5, "x1": 357.0, "y1": 160.0,
    }  # fmt: skip
    assert first["evidence"][1]["contribution"] is None
    assert [row["correct"] for row in (first, second, third)] == [False, None, True]
    assert (second["error_code"], second["error_message"]) == ("truncated_image", "it ends early")
    assert {second[name] for name in ("class_id", "label", "margin", "width", "overlay", "truth")} == {None}
    assert (second["top"], second["evidence"]) == (None, None)


def test_csv_has_the_same_columns_with_lists_as_json(out: Path) -> None:
    write_table(read_records(out / "results.jsonl"), out, "csv")
    with (out / "results.csv").open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        first, second, third = reader
        assert reader.fieldnames == [*COLUMNS, *LISTS]
    assert first["label"] == ANSWER["label"]
    assert float(first["logit"]) == ANSWER["logit"]
    assert json.loads(first["top"]) == OK["top"]
    assert json.loads(first["evidence"])[0]["x1"] == 357.0
    assert [row["correct"] for row in (first, second, third)] == ["false", "", "true"]
    assert (second["status"], second["error_code"], second["evidence"]) == ("error", "truncated_image", "")


def test_lone_surrogates_reach_both(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    with RecordWriter(tmp_path / "results.jsonl") as writer:
        writer.write({**OK, "truth": "\udcff"})
    for kind in tables.FORMATS:
        write_table(read_records(tmp_path / "results.jsonl"), tmp_path, kind)
    assert parquet(tmp_path).to_pylist()[0]["truth"] == "\\udcff"
    assert "\\udcff" in (tmp_path / "results.csv").read_text("utf-8")


def test_a_run_without_images_has_an_empty_table(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "results.jsonl").write_bytes(b"")
    for kind in tables.FORMATS:
        write_table(read_records(tmp_path / "results.jsonl"), tmp_path, kind)
    assert parquet(tmp_path).num_rows == 0
    assert parquet(tmp_path).column_names == [*COLUMNS, *LISTS]
    assert (tmp_path / "results.csv").read_text() == ",".join([*COLUMNS, *LISTS]) + "\n"


def test_many_records_are_written_group_by_group(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet_room = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(tables, "_GROUP_ROWS", 2)
    write_table(read_records(out / "results.jsonl"), out, "parquet")
    file = parquet_room.ParquetFile(out / "results.parquet")
    assert file.metadata.num_row_groups == 2
    assert file.read().num_rows == 3


def test_a_table_that_cannot_be_finished_leaves_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(tables._WRITERS, "csv", full)
    with pytest.raises(StoppedEarly, match=r"No space left on device.*all records are in results.jsonl"):
        write_table(read_records(out / "results.jsonl"), out, "csv")
    assert [p.name for p in out.iterdir()] == ["results.jsonl"]


def test_formats_are_checked_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_formats(["csv", "csv"]) == ("csv",)
    with pytest.raises(UsageError, match="--format 'xml': expected parquet or csv"):
        check_formats(["xml"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"opal-deploy\[tables\]"):
        check_formats(["parquet"])
    # what writes CSV is Python's own
    assert check_formats(["csv"]) == ("csv",)
