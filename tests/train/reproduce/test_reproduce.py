"""`opal-deploy reproduce`: what is missing is trained, what is there is kept, and the table is printed."""

import json
from pathlib import Path

import pytest

from opal_deploy.cli.reproduce import reproduce
from opal_deploy.errors import StoppedEarly, UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.synthetic import generate_dataset
from opal_deploy.train.options import ReproduceOptions
from opal_deploy.train.reproduce import results
from tests.builders import SMALL_BACKBONE


@pytest.fixture(scope="module")
def creatures(tmp_path_factory):
    root = tmp_path_factory.mktemp("creatures") / "data"
    generate_dataset(root, num_species=3, train_per_class=6, val_per_class=2, test_per_class=2, size=(64, 64))
    return root


SMALL = {"backbone": SMALL_BACKBONE, "weights": "none", "epochs": 1, "batch_size": 6, "size": 64}


def test_a_table_is_trained_once_and_printed(creatures, tmp_path, capsys):
    arguments = {"data": [f"mine={creatures}"], "seeds": "0", "out": tmp_path / "runs", "output": "json", **SMALL}
    reproduce("collapse", ReproduceOptions(**arguments))
    first = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in first["rows"]] == ["Proj.+GMP+Orth.", "Proj.+GMP+CWS+Orth. (OPAL)"]
    for row in first["rows"]:
        summary = json.loads((Path(row["runs"][0]) / "summary.json").read_text())
        assert row["cells"][0]["ours"]["values"] == [100 * summary["spatial_prototype_collapse"]]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    reproduce("collapse", ReproduceOptions(**arguments))
    assert json.loads(capsys.readouterr().out) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*") if path.is_file()} == written


def test_a_run_that_diverges_does_not_stop_the_others(creatures, tmp_path, capsys, monkeypatch):
    fit = results.fit

    def diverging(*arguments, **options):
        assert options["resume"], "an interrupted run goes on"
        if arguments[1].head == HeadConfig(cws=False):
            raise results.DivergenceError("the training loss is nan")
        return fit(*arguments, **options)

    monkeypatch.setattr(results, "fit", diverging)
    with pytest.raises(StoppedEarly, match=r"1 of the runs failed: mine, Proj\.\+GMP\+Orth\., seed 0"):
        reproduce("collapse", ReproduceOptions(data=[f"mine={creatures}"], seeds="0", out=tmp_path, **SMALL))
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("Proj.+GMP+Orth.")).split()[1] == "-"
    assert next(line for line in lines if line.startswith("Proj.+GMP+CWS+Orth.")).split()[2] != "-"


def test_a_dry_run_needs_no_images_and_trains_nothing(tmp_path, capsys):
    reproduce("prototypes", ReproduceOptions(out=tmp_path, seeds="0,1", dry_run=True))
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 5 * 5 * 2
    assert "50 runs, 50 to do" in found.err
    assert "assumed 10 TFLOP/s" in found.err
    assert not list(tmp_path.iterdir())


def test_a_table_about_parts_needs_parts_before_anything_is_trained(creatures, tmp_path):
    with pytest.raises(UsageError, match="the table parts needs part locations"):
        reproduce("parts", ReproduceOptions(data=[f"mine={creatures}"], seeds="0", out=tmp_path, **SMALL))
    assert not list(tmp_path.iterdir())


SEEDS = "expected different whole numbers"


@pytest.mark.parametrize(
    ("data", "seeds", "message"),
    [
        ([], "0", "no data set: give --data NAME=FOLDER, of cub, cars"),
        (["cub"], "0", "expected NAME=FOLDER"),
        (["cub=/no/such/folder"], "0", "no such folder"),
        (["a=.", "a=."], "0", "given twice"),
        (["..=."], "0", "expected NAME=FOLDER"),
        (["a b=."], "0", "expected NAME=FOLDER"),
        *((["mine=."], seeds, SEEDS) for seeds in ("", "a", "0,0", "0,,1", "-1", "01,1")),
    ],
)
def test_data_sets_and_seeds_that_are_none(data, seeds, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        reproduce("ablation", ReproduceOptions(data=data, seeds=seeds, out=tmp_path))
