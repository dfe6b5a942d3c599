"""`opal-deploy demo`: the whole job by the commands that it prints, and the quick one with the model that ships."""

import json
from importlib.resources import files
from pathlib import Path

import pytest

from opal_deploy.artifact import onnx_file
from opal_deploy.cli.demo import MARKER
from tests.cli.calls import check, one_line, read_results

COMMANDS = ("train", "evaluate", "export", "infer", "verify")
SHIPPED = Path(str(files("opal_deploy.cli.demo") / "creatures.onnx"))
OWN_FOLDER = "  opal-deploy train photos/ --out runs/mine"


def read_figures(out):
    return json.loads((out / MARKER).read_text())["figures"]


def list_commands(printed):
    return [line.split()[2:] for line in printed.splitlines() if line.startswith("$ opal-deploy")]


def test_a_folder_with_other_things_is_left_alone(opal, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "nothing there is removed" in one_line(opal("demo", "--quick", "--out", tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.fixture(scope="module")
def quick(opal, tmp_path_factory):
    """A folder with a quick demo in `d`, made without what only training needs, and what was printed."""
    blocked = ("torch", "torchvision", "sklearn", "scipy", "matplotlib", "onnx", "onnxscript", "safetensors", "timm")
    folder = tmp_path_factory.mktemp("quick")
    return folder, check(opal("demo", "--quick", "--out", "d", "--seed", 3, cwd=folder, blocked=blocked)).stderr


def test_the_quick_demo_explains_new_creatures_without_torch_and_measures_itself(quick):
    folder, printed = quick
    assert [command[0] for command in list_commands(printed)] == ["verify", "infer", "explain"]
    records = read_results(folder / "d/explanations")
    correct = sum(record["prediction"]["label"] == record["label"] for record in records)
    assert f"Accuracy: {correct} of {len(records)} images" in printed
    figures = read_figures(folder / "d")
    classes = len(onnx_file.read_metadata(SHIPPED).class_names)
    assert figures["chance"] == pytest.approx(1 / classes)
    distinguishing = figures["pointing_game"]["distinguishing_part"]
    assert figures["accuracy"] >= 0.9
    assert distinguishing["mean"] >= 2.5 * distinguishing["random"] > 0.3
    assert (folder / "d/explanations/report.html").is_file()
    assert len(list((folder / "d/sheets").iterdir())) == 3
    assert printed.splitlines()[-1] == OWN_FOLDER


def test_a_short_demo_runs_the_commands_that_it_prints_and_checks_its_records(opal, tmp_path):
    call = ("demo", "--out", "d", "--epochs", "1", "--train-per-class", "4")
    # an earlier demo is replaced
    (tmp_path / "d/data").mkdir(parents=True)
    (tmp_path / "d" / MARKER).touch()
    printed = check(opal(*call, cwd=tmp_path)).stderr
    assert printed.splitlines()[-1] == OWN_FOLDER
    assert [command[0] for command in list_commands(printed)] == [*COMMANDS]
    figures = read_figures(tmp_path / "d")
    assert figures["pointing_game"]["distinguishing_part"]["count"] == figures["pointing_game"]["images"]
    records = read_results(tmp_path / "d/explanations")
    assert len(records) == 120
    assert all(record["status"] == "ok" and record["model_sha256"] for record in records)
    assert "120 of 120 records match the model" in printed
    assert "was not checked" not in printed
    # what comes next is said with these very files: one of the commands, as printed
    explain = next(line for line in printed.splitlines() if line.startswith("  opal-deploy explain"))
    check(opal(*explain.split()[1:], cwd=tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_answers_are_right_for_the_right_reason_and_those_of_the_model_that_ships(opal, tmp_path):
    """The model that ships is the one of `make quick-model`: the demo of seed 0."""
    check(opal("demo", "--out", tmp_path / "demo"))
    figures = read_figures(tmp_path / "demo")
    distinguishing = figures["pointing_game"]["distinguishing_part"]
    assert figures["test_accuracy"] >= 0.95
    assert distinguishing["mean"] >= 2.5 * distinguishing["random"]
    shipped, trained = map(onnx_file.read_metadata, (SHIPPED, tmp_path / "demo/run/best.onnx"))
    assert shipped.training["options"] == trained.training["options"]
    before, again = shipped.evaluation, trained.evaluation
    assert before["accuracy"] == pytest.approx(again["accuracy"], abs=0.04)
    shares = [each["pointing_game"]["distinguishing_part"]["mean"] for each in (before, again)]
    assert shares[0] == pytest.approx(shares[1], abs=0.1)
