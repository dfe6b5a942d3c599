"""What `infer` leaves beside its records: a summary, tables, accuracy; and its options for them."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Opal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def labelled(tmp_path: Path, make_pictures: Callable) -> Path:
    """Six pictures: two folders named for classes, one for none of them, and one that is broken."""
    make_pictures(tmp_path / "made", 6)
    for folder, numbers in (("ash", "01"), ("birch", "23"), ("lion", "45")):
        (tmp_path / "in" / folder).mkdir(parents=True)
        for number in numbers:
            (tmp_path / f"made/00{number}.png").rename(tmp_path / "in" / folder / f"{number}.png")
    (tmp_path / "in/ash/1.png").write_bytes(b"no")
    return tmp_path / "in"


@pytest.fixture
def infer(opal: Opal, exact_model: Path, tmp_path: Path) -> Opal:
    def run(*arguments: str | Path) -> Any:
        return opal(
            "infer", *arguments, "--model", exact_model, "--threads", "1", "--out", tmp_path / "out", cwd=tmp_path
        )

    return run


def records(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text("utf-8").splitlines()]


def test_everything_beside_the_records_agrees_with_them(
    infer: Opal, labelled: Path, exact_model: Path, tmp_path: Path
) -> None:
    done = infer(labelled, "--labels", "folders", "--format", "csv", "--format", "parquet", "--json")
    assert done.returncode == 3, done.stderr
    found = records(tmp_path)
    assert [record["truth"] for record in found] == ["ash"] * 2 + ["birch"] * 2 + ["lion"] * 2

    correct = sum(r["truth"] == r["prediction"]["label"] for r in found if "prediction" in r and r["truth"] != "lion")
    assert f"Accuracy: {correct / 3:.2%} of 3 predictions" in done.stderr
    assert "1 labelled images failed and are not counted" in done.stderr
    assert "2 images have a label that is no class of the model (lion)" in done.stderr

    text = (tmp_path / "out/summary.json").read_text()
    document = json.loads(text)
    assert json.loads(done.stdout) == document
    assert document["complete"] is True
    assert document["stopped"] is None
    assert document["images"] == document["new_images"] == 6
    assert document["statuses"] == {"error": 1, "ok": 5}
    assert document["errors"] == {"not_an_image": 1}
    assert sum(entry["images"] for entry in document["classes"]) == 5
    assert document["accuracy"] == {
        "accuracy": correct / 3,
        "correct": correct,
        "wrong": 3 - correct,
        "failed": 1,
        "label_is_no_class": 2,
        "without_label": 0,
    }
    assert document["model"]["file"] == exact_model.name
    assert len(document["model"]["sha256"]) == 64
    assert "cpu" in document["runtime"].lower()
    assert document["images_per_second"] == pytest.approx(6 / document["seconds"])
    assert {"decode", "compute", "write"} <= {row["stage"] for row in document["time"]["stages"]}
    assert document["started"] <= document["ended"]
    assert document["resumed"] == []
    # nobody's folders
    assert document["command"].startswith("opal-deploy infer in --labels folders --format csv")
    assert str(tmp_path) not in text

    with (tmp_path / "out/results.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["image"] for row in rows] == [record["image"] for record in found]
    assert [row["truth"] for row in rows] == [record["truth"] for record in found]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(tmp_path / "out/results.parquet").to_pylist()
    assert [row["cosine"] for row in table] == [r.get("prediction", {}).get("cosine") for r in found]


def test_labels_from_a_file_say_which_images_have_none(infer: Opal, labelled: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("image,label\nash/0.png,birch\nbirch/2.png,birch\n")
    done = infer(labelled, "--labels", "labels.csv")
    assert done.returncode == 3, done.stderr
    assert [record.get("truth") for record in records(tmp_path)] == ["birch", None, "birch", None, None, None]
    assert "4 images have no label" in done.stderr


def test_overwriting_nowhere_is_a_wrong_call(opal: Opal, labelled: Path, tmp_path: Path) -> None:
    done = opal("infer", labelled, "--overwrite", cwd=tmp_path)
    assert done.returncode == 2
    assert "--overwrite without --out" in done.stderr


def test_fast_and_exact_decoding_answer_the_same_images(infer: Opal, labelled: Path, tmp_path: Path) -> None:
    for decode in ("exact", "fast"):
        assert infer(labelled, "--overwrite", "--decode", decode, "--explain").returncode == 3
        assert [record["status"] for record in records(tmp_path)].count("ok") == 5
        assert sum("overlay" in record for record in records(tmp_path)) == 5
