"""`opal-deploy demo`: the whole job by the commands that it prints."""

import json

import pytest
from matplotlib.figure import Figure

from opal_deploy.cli.demo import MARKER
from opal_deploy.model.checkpoint import load
from tests.cli.calls import check

COMMANDS = ("train", "evaluate", "export", "infer", "verify")


def run_demo(opal, out, *options):
    done = check(opal("demo", "--out", out, *options))
    return done.stderr, json.loads((out / MARKER).read_text())


def list_commands(printed):
    return [line.split()[2:] for line in printed.splitlines() if line.startswith("$ opal-deploy")]


def test_a_folder_with_other_things_is_left_alone(opal, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    done = opal("demo", "--out", tmp_path, "--overwrite")
    assert (done.returncode, "nothing there is removed" in done.stderr) == (2, True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.fixture
def legends(monkeypatch):
    """The legends of the figures that are drawn."""
    drawn = []
    save = Figure.savefig

    def savefig(figure, *args, **options):
        drawn.append(figure.axes[0].get_legend_handles_labels()[1])
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return drawn


def test_the_demo_runs_the_commands_that_it_prints_and_checks_its_records(opal, tmp_path, legends):
    out = tmp_path / "demo"
    printed, figures = run_demo(opal, out, "--epochs", 2, "--train-per-class", 8)
    assert [command[0] for command in list_commands(printed)] == [*COMMANDS]
    assert figures["pointing_game"]["distinguishing_part"]["count"] == figures["pointing_game"]["images"]
    records = [json.loads(line) for line in (out / "explanations" / "results.jsonl").read_text().splitlines()]
    assert len(records) == 8 * 15
    assert all(record["status"] == "ok" and record["model_sha256"] for record in records)
    assert "120 of 120 records match the model" in printed
    assert "was not checked" not in printed
    # so short a training is no success, and is called none
    assert figures["test_accuracy"] < 0.95
    assert "That is low: 18 epochs on 250 images per species reach 95%" in printed
    # they were trained on as they are
    assert legends[0] == ["training", "validation", "best"]
    # what comes next is said with these very files: one of the commands, as printed
    explain = next(line for line in printed.splitlines() if line.startswith("  opal-deploy explain"))
    check(opal(*explain.split()[1:]))


def test_the_shortcut_is_found_dropped_and_trained_away_by_printed_commands(opal, tmp_path):
    out = tmp_path / "demo"
    printed, figures = run_demo(opal, out, "--shortcut", "--epochs", 3, "--train-per-class", 40)
    evaluations = ["evaluate"] * 3
    commands = list_commands(printed)
    assert [command[0] for command in commands] == [
        "train", *evaluations, "edit", "edit", *evaluations, "train", *evaluations
    ]  # fmt: skip
    assert commands[9][4:9] == [
        "--start-from", str(out / "edited.pt"), "--reset-dropped", "--keep-off", str(out / "stamped" / "stamps.json")
    ]  # fmt: skip
    # what was suggested was dropped
    (edit,) = load(out / "edited.pt").edits
    assert edit["dropped"] == figures["dropped"]
    assert all(len(row) == 3 for row in figures["accuracies"].values())
    assert (out / "slots.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_the_suggested_slots_the_stamps_change_nothing(opal, tmp_path):
    _, figures = run_demo(opal, tmp_path / "demo", "--shortcut")
    before, dropped, cured = figures["accuracies"].values()
    assert before[0] >= before[2] + 0.3
    assert max(dropped) - min(dropped) <= 0.02
    assert min(cured) >= max(before)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_answers_are_right_for_the_right_reason(opal, tmp_path):
    _, figures = run_demo(opal, tmp_path / "demo")
    distinguishing = figures["pointing_game"]["distinguishing_part"]
    assert figures["test_accuracy"] >= 0.95
    assert distinguishing["mean"] >= 2.5 * distinguishing["random"]
