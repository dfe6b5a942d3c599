"""Records for other programs, against examples worked out by hand."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import opal_deploy
from opal_deploy.records import label_config, to_coco, to_label_studio
from opal_deploy.records.record import Record, error_record
from opal_deploy.records.tables import to_table

Opal = Callable[..., "subprocess.CompletedProcess[str]"]
ANSWER: Any = {"class_id": 1, "label": "birch <b>", "logit": -0.5, "cosine": 0.875}
OK: Record = {
    "schema": 1,
    "image": "a\\\\b.jpg",
    "status": "ok",
    "file_sha256": "0" * 64,
    "model_sha256": "f" * 64,
    "width": 200,
    "height": 50,
    "prediction": ANSWER,
    "margin": 0.25,
    "top": [ANSWER],
    "evidence": [
        {"slot": 0, "channel": 2, "cell": [0, 1], "score": 0.5, "contribution": 0.5, "box": [50.0, 0.0, 100.0, 12.5]},
        {"slot": 1, "channel": 3, "cell": [3, 3], "score": 0.25, "contribution": 0.375, "box": [150.0, 37.5, 200, 50],
         "name": "beak"},
    ],
}  # fmt: skip
FAILED = error_record("c\\xff.jpg", "truncated_image", "cut")
WITHOUT_EVIDENCE: Record = {**OK, "image": None, "margin": None}
del WITHOUT_EVIDENCE["evidence"]


def test_coco_by_class() -> None:
    found = to_coco([FAILED, OK])
    assert found["images"] == [{"id": 1, "file_name": "a\\b.jpg", "width": 200, "height": 50}]
    assert found["categories"] == [{"id": 2, "name": "birch <b>", "supercategory": ""}]
    assert found["annotations"][0] == {
        "id": 1,
        "image_id": 1,
        "category_id": 2,
        "bbox": [50.0, 0.0, 50.0, 12.5],
        "area": 625.0,
        "iscrowd": 0,
        "score": 0.5,
        "attributes": {"label": "birch <b>", "slot": 0, "channel": 2, "cell": [0, 1], "contribution": 0.5},
    }
    assert [annotation["id"] for annotation in found["annotations"]] == [1, 2]
    assert found["info"]["images_without_an_answer"] == 1


def test_coco_by_slot() -> None:
    found = to_coco([OK], "slot")
    assert found["categories"] == [
        {"id": 3, "name": "birch <b> slot 0", "supercategory": "birch <b>"},
        {"id": 4, "name": "beak", "supercategory": "birch <b>"},
    ]
    assert [annotation["category_id"] for annotation in found["annotations"]] == [3, 4]


def test_coco_boxes_are_read_back_as_they_were(tmp_path: Path) -> None:
    from opal_deploy.inference.sources.annotations import read_boxes
    from opal_deploy.inference.sources.items import Item

    one: Record = {**OK, "image": "a.jpg", "evidence": OK["evidence"][:1]}
    (tmp_path / "coco.json").write_text(json.dumps(to_coco([one])))
    assert read_boxes(tmp_path / "coco.json").find(Item(Path("a.jpg"), "a.jpg")) == (50.0, 0.0, 100.0, 12.5)


def test_label_studio() -> None:
    task, failed, plain = to_label_studio([OK, FAILED, WITHOUT_EVIDENCE], "/data/local-files/?d=")
    assert task["data"] == {"image": "/data/local-files/?d=a\\b.jpg"}
    (prediction,) = task["predictions"]
    assert prediction["score"] == 0.25
    choice, first, second = prediction["result"]
    assert choice == {
        "id": "class", "type": "choices", "from_name": "class", "to_name": "image",
        "value": {"choices": ["birch <b>"]},
    }  # fmt: skip
    assert first["value"] == {
        "x": 25.0, "y": 0.0, "width": 25.0, "height": 25.0, "rotation": 0, "rectanglelabels": ["slot 0"],
    }  # fmt: skip
    assert (first["original_width"], first["original_height"], first["image_rotation"]) == (200, 50, 0)
    assert (second["value"]["x"], second["value"]["y"]) == (75.0, 75.0)
    # a name that is not text stays as the record has it
    assert failed == {"data": {"image": "/data/local-files/?d=c\\xff.jpg"}, "meta": {"status": "error"}}
    assert [part["type"] for part in plain["predictions"][0]["result"]] == ["choices"]
    assert "score" not in plain["predictions"][0]


def test_the_labelling_interface_names_what_the_tasks_use() -> None:
    tree = ElementTree.fromstring(label_config([OK, FAILED]))
    assert [choice.get("value") for choice in tree.iter("Choice")] == ["birch <b>"]
    assert [label.get("value") for label in tree.iter("Label")] == ["slot 0", "slot 1"]
    used = {part["from_name"] for part in to_label_studio([OK])[0]["predictions"][0]["result"]}
    assert used == {tree.find("Choices").get("name"), tree.find("RectangleLabels").get("name")}  # type: ignore[union-attr]


def test_rows_an_image_and_rows_a_slot() -> None:
    columns, rows = to_table([OK, FAILED])
    assert {"image", "label", "margin", "error_code", "file_sha256", "model_sha256", "evidence"} <= set(columns)
    assert [row["label"] for row in rows] == ["birch <b>", None]
    assert [row["file_sha256"] for row in rows] == ["0" * 64, None]
    columns, rows = to_table([OK, FAILED, WITHOUT_EVIDENCE], "evidence")
    assert [[row[name] for name in ("slot", "row", "col", "x0", "name")] for row in rows] == [
        [0, 0, 1, 50.0, None],
        [1, 3, 3, 150.0, "beak"],
    ]
    assert all(sorted(row) == sorted(columns) for row in rows)


def test_pandas_has_the_same_rows() -> None:
    pytest.importorskip("pandas")
    frame = opal_deploy.to_pandas([OK, FAILED])
    assert list(frame.columns) == to_table([OK])[0]
    assert frame["margin"].tolist()[0] == 0.25
    assert len(opal_deploy.to_pandas([OK], "evidence")) == 2
    assert len(opal_deploy.to_pandas([])) == 0


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(opal_deploy.MissingExtra, match=r"pip install 'opal-deploy\[pandas\]'"):
        opal_deploy.to_pandas([OK])


def test_the_cli_converts(opal: Opal, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(record) + "\n" for record in (OK, FAILED)))
    done = opal("convert", tmp_path, "--to", "coco", "--categories", "slot")
    assert json.loads(done.stdout) == to_coco([OK, FAILED], "slot")
    arguments = ["--to", "label-studio", "--out", tmp_path / "tasks.json", "--config", tmp_path / "config.xml"]
    done = opal("convert", tmp_path / "results.jsonl", *arguments, "--prefix", "x/")
    assert (done.returncode, done.stdout) == (0, "")
    assert json.loads((tmp_path / "tasks.json").read_text()) == to_label_studio([OK, FAILED], "x/")
    assert (tmp_path / "config.xml").read_text() == label_config([OK])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "xml"], "expected coco or label-studio"),
        (["--to", "coco", "--categories", "part"], "expected class or slot"),
        (["--to", "coco", "--config", "c.xml"], "only --to label-studio"),
    ],
)
def test_the_cli_refuses_what_it_does_not_know(opal: Opal, tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(OK) + "\n")
    done = opal("convert", tmp_path, *arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_damaged_file_is_named_by_its_line(opal: Opal, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(OK) + "\n{}\n")
    done = opal("convert", tmp_path, "--to", "coco")
    assert done.returncode == 2
    assert "line 2 is not a whole record" in done.stderr
