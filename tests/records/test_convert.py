"""Records as tables and COCO, against examples worked out by hand."""

import csv
import importlib.util
import io
import json

import pytest

import opal_deploy
from opal_deploy.auditing.convert import convert_results
from opal_deploy.errors import MissingExtra, StoppedEarly, UsageError
from opal_deploy.records import tables
from opal_deploy.records.build import error_record
from opal_deploy.records.lines import to_document
from opal_deploy.records.record import to_record
from opal_deploy.records.tables import COLUMNS, LISTS, check_formats, to_coco, write_table
from opal_deploy.sources.annotations import read_boxes

LABEL = 'birch, "<b>"\n'
ANSWER = {"class_id": 1, "label": LABEL, "logit": -0.1 - 0.2, "cosine": 0.875, "calibrated_probability": 0.75}
OK = {
    "schema": 1, "image": "a\\\\b.jpg", "status": "ok", "image_sha256": "0" * 64, "model_sha256": "f" * 64,
    "width": 200, "height": 50, "prediction": ANSWER, "margin": 0.25,
    "top": [ANSWER, {**ANSWER, "class_id": 0, "cosine": None}],
    "evidence": [
        {"slot": 0, "channel": 2, "cell": [0, 1], "score": 0.5, "contribution": 0.5, "box": [50.0, 0.0, 100.0, 12.5]},
        {"slot": 1, "channel": 3, "cell": [3, 3], "score": 0.25, "contribution": None, "box": [150.0, 37.5, 200, 50],
         "name": "beak"},
    ],
    "label": "ash",
}  # fmt: skip
FAILED = to_document(error_record("c\\xff.jpg", "truncated_image", "it ends early"))
WITHOUT_EVIDENCE = {**OK, "image": None, "margin": None, "label": LABEL}
del WITHOUT_EVIDENCE["evidence"]
RECORDS = [OK, FAILED, WITHOUT_EVIDENCE]


def read_parquet(out):
    return pytest.importorskip("pyarrow.parquet").read_table(out / "results.parquet")


def test_parquet_has_the_documented_columns_and_values(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    # many records are written group by group
    monkeypatch.setattr(tables, "_GROUP_ROWS", 2)
    write_table(map(to_record, RECORDS), tmp_path, "parquet")
    assert parquet.ParquetFile(tmp_path / "results.parquet").metadata.num_row_groups == 2
    table = read_parquet(tmp_path)
    types = {"string": "string", "int32": "int32", "int64": "int64", "float64": "double", "bool": "bool"}
    assert table.column_names == [*COLUMNS, *LISTS]
    assert [str(field.type) for field in table.schema][: len(COLUMNS)] == [types[t] for t in COLUMNS.values()]
    first, second, third = table.to_pylist()
    assert first["image"] == OK["image"]
    assert (first["class_id"], first["prediction"], first["logit"]) == (1, LABEL, ANSWER["logit"])
    assert first["top"] == OK["top"]
    assert [row["calibrated_probability"] for row in (first, second)] == [0.75, None]
    assert first["evidence"][0] == {
        "slot": 0, "name": None, "channel": 2, "row": 0, "col": 1, "score": 0.5, "contribution": 0.5,
        "x0": 50.0, "y0": 0.0, "x1": 100.0, "y1": 12.5,
    }  # fmt: skip
    assert first["evidence"][1]["contribution"] is None
    assert [row["correct"] for row in (first, second, third)] == [False, None, True]
    assert (second["error_code"], second["error_message"]) == ("truncated_image", "it ends early")
    assert {second[name] for name in ("class_id", "prediction", "margin", "width", "overlay", "label")} == {None}
    assert (second["top"], second["evidence"]) == (None, None)


def test_csv_has_the_same_columns_with_lists_as_json(tmp_path):
    write_table(map(to_record, RECORDS), tmp_path, "csv")
    with (tmp_path / "results.csv").open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        first, second, third = reader
        assert reader.fieldnames == [*COLUMNS, *LISTS]
    assert (first["prediction"], float(first["logit"])) == (LABEL, ANSWER["logit"])
    assert json.loads(first["top"]) == OK["top"]
    assert json.loads(first["evidence"])[0]["x1"] == 100.0
    assert [row["correct"] for row in (first, second, third)] == ["false", "", "true"]
    assert (second["status"], second["error_code"], second["evidence"]) == ("error", "truncated_image", "")


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028"])
def test_a_name_with_a_line_end_breaks_no_csv(tmp_path, end):
    write_table(map(to_record, [{**OK, "image": f"a{end}b.jpg"}, OK]), tmp_path, "csv")
    text = (tmp_path / "results.csv").read_bytes().decode()
    # also where a reader splits the lines first
    for lines in (io.StringIO(text, newline=""), text.splitlines(keepends=True)):
        assert [row["image"] for row in csv.DictReader(lines)] == [f"a{end}b.jpg", OK["image"]]


def test_a_table_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables, "_open_csv", fail)
    with pytest.raises(StoppedEarly, match=r"No space left on device.*all records are in results.jsonl"):
        write_table(map(to_record, RECORDS), tmp_path, "csv")
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_lone_surrogates(tmp_path):
    pytest.importorskip("pyarrow")
    for kind in tables.FORMATS:
        write_table(map(to_record, [{**OK, "label": "\udcff"}]), tmp_path, kind)
    assert (tmp_path / "results.csv").read_text("utf-8").count("\\udcff") == 1
    assert [row["label"] for row in read_parquet(tmp_path).to_pylist()] == ["\\udcff"]


def test_formats_are_checked_before_the_run(monkeypatch):
    assert check_formats(["csv", "csv"]) == ("csv",)
    with pytest.raises(UsageError, match="--format 'xml': expected parquet or csv"):
        check_formats(["xml"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    # csv is written by Python itself
    assert check_formats(["csv"]) == ("csv",)
    with pytest.raises(MissingExtra, match=r"opal-deploy\[tables\]"):
        check_formats(["parquet"])
    with pytest.raises(MissingExtra, match=r"pip install 'opal-deploy\[pandas\]'"):
        opal_deploy.to_pandas([OK])


def test_pandas_has_a_row_per_image():
    pytest.importorskip("pandas")
    frame = opal_deploy.to_pandas([OK, FAILED])
    assert list(frame.columns) == [*COLUMNS, *LISTS]
    assert [frame["prediction"][0], frame["image_sha256"][0], frame["margin"][0]] == [LABEL, "0" * 64, 0.25]
    assert frame.loc[1, ["prediction", "image_sha256", "margin"]].isna().all()
    assert len(opal_deploy.to_pandas([])) == 0


def test_coco():
    document = to_coco([FAILED, OK])
    assert document["images"] == [{"id": 1, "file_name": "a\\b.jpg", "width": 200, "height": 50}]
    assert document["categories"] == [{"id": 2, "name": LABEL, "supercategory": ""}]
    assert document["annotations"][0] == {
        "id": 1, "image_id": 1, "category_id": 2, "bbox": [50.0, 0.0, 50.0, 12.5], "area": 625.0, "iscrowd": 0,
        "score": 0.5, "attributes": {"label": LABEL, "slot": 0, "channel": 2, "cell": [0, 1], "contribution": 0.5},
    }  # fmt: skip
    assert [annotation["id"] for annotation in document["annotations"]] == [1, 2]
    assert document["info"]["failed_images"] == 1


def test_coco_boxes_are_read_back_as_they_were(tmp_path):
    one = {**OK, "image": "a.jpg", "evidence": OK["evidence"][:1]}
    (tmp_path / "coco.json").write_text(json.dumps(to_coco([one])))
    assert read_boxes(tmp_path / "coco.json").find_all("a.jpg") == [((50.0, 0.0, 100.0, 12.5), None, None)]


def test_the_command_converts(opal, tmp_path):
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (OK, FAILED)))
    assert json.loads(opal("convert", tmp_path, "--to", "coco").stdout) == to_coco([OK, FAILED])
    done = opal("convert", tmp_path / "results.jsonl", "--to", "coco", "--out", tmp_path / "coco.json")
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads((tmp_path / "coco.json").read_text()) == to_coco([OK, FAILED])
    refused = opal("convert", tmp_path, "--to", "coco", "--boxes", "b.json")
    assert (refused.returncode, "--boxes: goes with" in refused.stderr) == (2, True)


def test_a_box_without_an_area_is_refused(tmp_path):
    slot = {**OK["evidence"][0], "box": [-1e308, 0, 1e308, 1]}
    (tmp_path / "results.jsonl").write_text(json.dumps({**OK, "evidence": [slot]}) + "\n")
    with pytest.raises(UsageError, match="too large"):
        convert_results(tmp_path / "results.jsonl", to="coco")
