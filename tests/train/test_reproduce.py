"""`opal-deploy reproduce`: missing runs are trained, finished ones kept; our metrics stand beside the paper's."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opal_deploy import train_model
from opal_deploy.cli import app
from opal_deploy.errors import ExitCode, StoppedEarly, UsageError
from opal_deploy.synthetic import generate_dataset
from opal_deploy.train import reproduce
from opal_deploy.train.reproduce import PAPER, make_plan, render, tabulate
from tests.builders import SMALL_BACKBONE

TABLES = [table["name"] for table in PAPER["table"]]
SOURCE = Path(__file__).parents[2].parent / "shared" / "paper" / "opal.tex"
# a figure, with its standard deviation where it has one; differences to the baseline begin with an arrow instead
FIGURE = re.compile(r"(\d+\.\d)\}?\s*(?:\{\\tiny\$\\pm\$(\d+\.\d)\})?")
RECIPE = f"""
backbone = "{SMALL_BACKBONE}"
weights = "none"
size = [64, 64]
epochs = 2
batch_size = 6
"""


@pytest.fixture(scope="module")
def creatures(tmp_path_factory):
    root = tmp_path_factory.mktemp("creatures") / "data"
    generate_dataset(root, num_species=3, train_per_class=6, val_per_class=2, test_per_class=2, size=(64, 64))
    return root


@pytest.fixture
def call(creatures, tmp_path):
    """The command on one seed of the creatures, with a small recipe."""
    recipe, data = tmp_path / "small.toml", f"mine={creatures}"
    recipe.write_text(RECIPE)
    options = ["--data", data, "--seeds", "0", "--recipe", str(recipe), "--out", str(tmp_path / "runs")]
    return lambda table, *more: CliRunner().invoke(app, ["reproduce", table, *options, *more])


def _finish(plan, row, summaries, config=None):
    """Store runs as finished: of `row`, a summary per data set and seed."""
    for run in plan.runs:
        if run.row.name == row and (run.dataset, run.seed) in summaries:
            run.folder.mkdir(parents=True)
            (run.folder / "summary.json").write_text(json.dumps(summaries[run.dataset, run.seed]))
            (run.folder / "config.json").write_text(json.dumps(config or {"options": {"head": {}}}))


def _line(text, start):
    return " ".join(next(line for line in text.splitlines() if line.startswith(start)).split())


def test_a_row_is_resumed_then_kept_and_refused_with_other_options(call, tmp_path, monkeypatch):
    def interrupt(line):
        if line.startswith("epoch 1/2"):
            raise KeyboardInterrupt

    row = ("collapse", "--row", "(OPAL)", "--format", "json")
    with monkeypatch.context() as patched:
        patched.setattr(reproduce, "train_model", lambda data, **more: train_model(data, **{**more, "log": interrupt}))
        assert call(*row).exit_code == ExitCode.INTERRUPTED
    done, folder = call(*row), tmp_path / "runs" / "mine" / "timm-test_resnet-opal-m5-l2-seed0"
    assert "epoch 2/2" in done.stderr
    assert "epoch 1/2" not in done.stderr
    document, summary = json.loads(done.stdout), json.loads((folder / "summary.json").read_text())
    assert document["rows"][0]["runs"] == [str(folder)]
    assert document["rows"][0]["cells"][0]["ours"]["values"] == [100 * summary["spatial_prototype_collapse"]]
    assert len(document["deviations"]) == 5
    assert {"epochs 2 instead of 30", "weights None instead of IMAGENET1K_V1"} < set(document["deviations"])
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert json.loads(call(*row).stdout) == document
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    (tmp_path / "small.toml").write_text(RECIPE + "lr = 1.0")
    done = call(*row)
    assert done.exit_code == ExitCode.USAGE
    assert "lr was 0.0001 and is 1.0" in done.stderr


def test_a_run_that_fails_does_not_stop_the_others(call, monkeypatch):
    def train(data, *, out, cws=True, **options):
        if not cws:
            raise StoppedEarly("the training loss is nan")
        out.mkdir(parents=True)
        (out / "summary.json").write_text('{"spatial_prototype_collapse": 0.5}')

    monkeypatch.setattr(reproduce, "train_model", train)
    done = call("collapse")
    assert done.exit_code == ExitCode.STOPPED_EARLY
    assert "mine, Proj.+GMP+Orth., seed 0: the training loss is nan" in done.stderr
    assert _line(done.stdout, "Proj.+GMP+Orth.") == "Proj.+GMP+Orth. - -"
    assert _line(done.stdout, "Proj.+GMP+CWS") == "Proj.+GMP+CWS+Orth. (OPAL) 50.0 -"


def test_a_table_about_parts_needs_parts_before_anything_is_trained(call, tmp_path):
    assert "needs part locations" in call("parts").stderr
    assert not (tmp_path / "runs").exists()


REFUSED = {
    "ablations": "expected one of methods", "ablation": "no data set", "ablation --data cub": "NAME=FOLDER",
    "ablation --data cub=/no/such/folder": "no such folder", "ablation --dry-run --row m=7": "no row",
    "ablation --recipe /no/such.toml": "no such file", "ablation --seeds 0,0": "whole numbers",
}  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_reproduced_is_refused_in_one_line(arguments):
    done = CliRunner().invoke(app, ["reproduce", *arguments.split()])
    assert (done.exit_code, len(done.stderr.splitlines())) == (ExitCode.USAGE, 1)
    assert REFUSED[arguments] in done.stderr


def test_tables_share_runs_rows_do_not_and_names_are_kept(tmp_path):
    plans = {name: make_plan(name, ["cub"], [0, 1], "paper", tmp_path) for name in TABLES}
    folders = {name: [run.folder.name for run in plan.runs] for name, plan in plans.items()}
    assert all(len(set(names)) == len(names) for names in folders.values())
    assert set.intersection(*(set(folders[name]) for name in ("methods", "ablation", "prototypes", "distances"))) == {
        f"convnext_tiny-{head}-seed{seed}" for head in ("opal-m5-l2", "linear") for seed in (0, 1)
    }
    assert [run.seed for run in plans["ablation"].runs] == [0] * 11 + [1] * 11
    assert folders["collapse"][0] == "convnext_tiny-proj+gmp+orth-m5-l2-seed0"
    for only, number in (("m=1", 1), ("opal", 4)):
        assert len(make_plan("prototypes", [], [0], "paper", tmp_path, [only]).chosen) == number


def test_rows_train_what_their_names_say(tmp_path):
    rows = {name: make_plan(name, [], [0], "paper", tmp_path).chosen for name in TABLES}
    full = {"projection": True, "cws": True, "pooling": "max", "anchors": True}
    for row in (*rows["ablation"][1:], *rows["collapse"]):
        on = [part in row.name.split(" ")[0].split("+") for part in ("Proj.", "CWS", "GMP", "Orth.")]
        values = [on[0], on[1], "max" if on[2] else "avg", on[3]]
        assert {**full, **row.keywords()} == {"head": "opal", **dict(zip(full, values, strict=True))}
    assert rows["components"][0].keywords() == {"head": "opal", "cws": False, "pooling": "avg"}
    for row in (*rows["prototypes"][1:], *rows["distances"][1:]):
        assert re.split("m=| ", row.name)[-1] == str(*row.options.values())
    for plain, opal in zip(rows["backbones"][::2], rows["backbones"][1::2], strict=True):
        assert (plain.head, opal.head, opal.options, opal.baseline) == ("linear", "opal", plain.options, plain.name)


def test_mean_spread_difference_and_average_are_printed(tmp_path):
    plan = make_plan("methods", ["mine", "cars", "cub"], [0, 1, 2], "paper", tmp_path)
    accuracies = {("cub", 0): 0.84, ("cub", 1): 0.86, ("cub", 2): 0.85, ("cars", 0): 0.91}
    _finish(plan, "OPAL", {key: {"test_accuracy": value} for key, value in accuracies.items()})
    _finish(plan, "Baseline (ConvNeXt-Tiny)", {(name, 1): {"test_accuracy": 0.83} for name in ("cub", "cars")})
    document = tabulate(plan)
    assert document["rows"][-1]["cells"][0]["ours"]["values"] == pytest.approx([84.0, 86.0, 85.0])
    text = render(plan, document)
    ours = "OPAL 85.0 ± 1.0 (+2.0) 85.6 ± 0.2 (+1.4) 91.0 (1 of 3) (+8.0) 90.3 ± 0.1 (+2.5) - - "
    assert _line(text, "OPAL") == ours + "88.00 (+5.00) 87.95 (+1.95)"
    assert "no folder given: pets, dogs, flowers" in text
    assert "unfinished: 12 of 18 runs" in text


def test_departures_from_the_protocol_are_those_of_the_finished_runs(tmp_path):
    plan = make_plan("methods", ["cub"], [0], "paper", tmp_path)
    options = {"backbone": "resnet18", "epochs": None, "lr": 1e-4, "patience": 3, "workers": 2, "precision": "auto"}
    data = {"classes": 10, "train": 240, "val": 60, "test": 243}
    config = {"options": {**options, "head": {"epsilon": 1e-3}}, "epochs": 2, "precision": "bf16", "data": data}
    _finish(plan, "OPAL", {("cub", 0): {"test_accuracy": 0.5}}, config)
    assert tabulate(plan)["deviations"] == [
        "backbone resnet18 instead of convnext_tiny", "epochs 2 instead of 30", "patience 3 instead of None",
        "precision bf16 instead of fp32", "epsilon 0.001 instead of 1e-08",
        "cub has 10 classes, 300 training and validation images and 243 test images instead of 200, 5,994 and 5,794",
    ]  # fmt: skip
    (plan.runs[1].folder / "summary.json").write_text("{")
    with pytest.raises(UsageError, match="summary"):
        tabulate(plan)


@pytest.mark.data
@pytest.mark.parametrize("table", PAPER["table"], ids=TABLES)
def test_every_figure_is_the_papers(table):
    if not SOURCE.is_file():
        pytest.skip(f"no {SOURCE}")
    printed = SOURCE.read_text(encoding="utf-8").partition(rf"\label{{{table['label']}}}")[2]
    printed = printed[printed.index(r"\midrule") : printed.index(r"\bottomrule")]
    figures = FIGURE.findall(re.sub(r"\$\\(?:up|down)arrow\$[\d.]+|%.*|\\vskip \S+", "", printed))
    assert [numbers for row in table["rows"] for numbers in row["paper"]] == [
        [float(number) for number in figure if number] for figure in figures
    ]
