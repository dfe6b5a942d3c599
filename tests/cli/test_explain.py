"""`opal-deploy explain` end to end: which files it writes, what it refuses, what it says to programs."""

import json
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from tests.cli.calls import check


@pytest.fixture
def run(opal, exact_model, make_pictures, tmp_path):
    """A command with the model given, in a folder with `in/000.png` ... `in/002.png`."""
    make_pictures(tmp_path / "in", 3)

    def run(line, code=0, **options):
        return check(opal(*line.split(), "--model", exact_model, "--threads", "1", cwd=tmp_path, **options), code)

    return run


def test_one_image_gives_one_sheet_beside_the_call_without_torch(run, tmp_path):
    done = run("explain in/000.png", blocked=("torch", "sklearn", "matplotlib", "onnx"))
    with Image.open(tmp_path / "000.evidence.png") as sheet:
        assert sheet.width == 2 * 722
    assert "000.evidence.png" in done.stderr
    assert done.stdout == ""


def test_the_suffix_of_out_says_which_format_and_a_small_margin_is_marked(run, tmp_path):
    done = run("explain in/000.png --out a/sheet.svg --min-margin 2 --json")
    assert ET.parse(tmp_path / "a/sheet.svg").getroot().tag.endswith("svg")
    assert "(abstained)" in done.stderr
    assert json.loads(done.stdout)["status"] == "abstained"


def test_several_images_give_a_folder_of_sheets_and_a_bad_one_costs_only_itself(run, tmp_path):
    (tmp_path / "in/001.png").write_bytes(b"no image")
    done = run("explain in --out out --json", 3)
    assert "in/001.png: not_an_image" in done.stderr
    assert "2 sheets in out, 1 failed" in done.stderr
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["000000-000.png", "000002-002.png"]
    assert [document["sheet"] for document in json.loads(done.stdout)] == [f"out/{name}" for name in names]


def test_a_known_label_stands_beside_the_answer_with_a_mark(run, tmp_path):
    plain = json.loads(run("explain in --out plain --json").stdout)
    answers = [document["prediction"]["label"] for document in plain]
    assert all("label" not in document for document in plain)
    labels = [answers[0], next(name for name in ("ash", "birch") if name != answers[1]), "yeti"]
    rows = [f"in/{number:03}.png,{label}" for number, label in enumerate(labels)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,label", *rows]))
    done = run("explain in --out out --labels labels.csv --json")
    assert [document["label"] for document in json.loads(done.stdout)] == labels
    for number, answer in enumerate(answers):
        assert f"in/{number:03}.png: {answer}, cosine" in done.stderr
