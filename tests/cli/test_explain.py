"""`opal-deploy explain` end to end: which files it writes, what it refuses, what it says to programs."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Opal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def explain(opal: Opal, exact_model: Path, make_pictures: Callable, tmp_path: Path) -> Opal:
    """`explain` with the model given, in a folder with `in/000.png` ... `in/002.png`."""
    make_pictures(tmp_path / "in", 3)

    def run(*arguments: str | Path, model: Path = exact_model, **options: Any) -> Any:
        return opal("explain", *arguments, "--model", model, "--threads", "1", cwd=tmp_path, **options)

    return run


def refused(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("opal-deploy: ")
    return line


def test_one_image_gives_one_sheet_beside_the_call_without_torch(explain: Opal, tmp_path: Path) -> None:
    done = explain("in/000.png", blocked=("torch", "sklearn", "matplotlib", "onnx"))
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "000.evidence.png") as sheet:
        assert sheet.width == 1200
    assert "000.evidence.png" in done.stderr
    assert done.stdout == ""


def test_the_suffix_of_out_says_which_format_and_a_small_margin_is_marked(explain: Opal, tmp_path: Path) -> None:
    done = explain("in/000.png", "--out", "a/sheet.svg", "--min-margin", "2", "--json")
    assert done.returncode == 0
    assert ET.parse(tmp_path / "a/sheet.svg").getroot().tag.endswith("svg")
    assert "(abstained)" in done.stderr
    assert json.loads(done.stdout)["abstained"] is True


def test_several_images_give_a_folder_of_sheets_and_a_bad_one_costs_only_itself(explain: Opal, tmp_path: Path) -> None:
    (tmp_path / "in" / "001.png").write_bytes(b"no image")
    done = explain("in", "--out", "out", "--format", "svg", "--json")
    assert done.returncode == 3, done.stderr
    assert "in/001.png: not_an_image" in done.stderr
    assert "2 sheets in out, 1 images failed" in done.stderr
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["000000-000.png.svg", "000002-002.png.svg"]
    assert [document["sheet"] for document in json.loads(done.stdout)] == [f"out/{name}" for name in names]


def test_programs_read_what_the_sheet_says(explain: Opal, opal: Opal, exact_model: Path, tmp_path: Path) -> None:
    document = json.loads(explain("in/000.png", "--json").stdout)
    opal("infer", "in", "--model", exact_model, "--out", "run", "--threads", "1", cwd=tmp_path)
    record = json.loads((tmp_path / "run/results.jsonl").read_text().splitlines()[0])
    assert document["image"] == record["image"]
    assert document["predicted"]["label"] == record["prediction"]["label"]
    assert document["runner_up"]["label"] == record["top"][1]["label"]
    assert document["margin"] == pytest.approx(record["margin"], abs=1e-5)
    by_slot = sorted(document["predicted"]["slots"], key=lambda slot: slot["slot"])
    assert [slot["cell"] for slot in by_slot] == [slot["cell"] for slot in record["evidence"]]
    assert sum(slot["contribution"] for slot in by_slot) == pytest.approx(document["predicted"]["cosine"], abs=1e-6)
    assert document["abstained"] is False


@pytest.mark.slow
def test_a_checkpoint_shows_attention_maps(explain: Opal, exact_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = explain("in/000.png", "--heatmap", "--out", "a.svg", model=exact_model.with_suffix(".pt"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.svg").read_text("utf-8").count("attention map of slot") == 6


def test_names_of_slots_are_on_the_sheet(explain: Opal, tmp_path: Path) -> None:
    tables = [f"[{json.dumps(name)}]\n" + "".join(f'{i} = "part {i}"\n' for i in range(3)) for name in ("ash", "birch")]
    (tmp_path / "names.toml").write_text("\n".join(tables))
    done = explain("in", "--slot-names", "names.toml", "--json")
    for document in json.loads(done.stdout):
        for view in (document["predicted"], document["runner_up"]):
            named = view["label"] in ("ash", "birch")
            assert [slot["name"] for slot in view["slots"]] == [
                f"part {slot['slot']}" if named else None for slot in view["slots"]
            ]


def test_the_only_image_failing_is_said_in_one_line(explain: Opal, tmp_path: Path) -> None:
    (tmp_path / "in/000.png").write_bytes(b"")
    assert "zero bytes" in refused(explain("in/000.png"), 3)
    assert not (tmp_path / "000.evidence.png").exists()


def test_a_sheet_that_is_there_is_not_replaced_unasked(explain: Opal, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("mine")
    assert "a.png: it is there already" in refused(explain("in/000.png", "--out", "a.png"))
    assert (tmp_path / "a.png").read_text() == "mine"
    assert explain("in/000.png", "--out", "a.png", "--overwrite").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["in/000.png", "--heatmap"], "exact.onnx: it was exported without attention maps"),
        (["in", "--out", "a.png"], "--out a.png: a file, but there may be several images"),
        (["in/000.png", "--out", "a.jpg"], "expected a file called .png or .svg"),
        (["in/000.png", "--out", "a.png", "--format", "svg"], "disagree"),
        (["in/000.png", "--format", "pdf"], "--format 'pdf': expected png or svg"),
        (["in/000.png", "--out", "in/000.png", "--overwrite"], "that is the image itself"),
        (["in/000.png", "--atlas", "in"], "in/atlas.json: cannot be read"),
        (["in/000.png", "--slot-names", "nowhere"], "nowhere: cannot be read"),
        (["nowhere.png"], "nowhere.png: no such file"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused_in_one_line(
    explain: Opal, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert complaint in refused(explain(*arguments))
    assert sorted(tmp_path.rglob("*")) == before
