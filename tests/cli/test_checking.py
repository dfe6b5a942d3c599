"""`opal-deploy verify RESULTS` and `opal-deploy diff`, run before a record is believed or a model replaced."""

import json

import pytest

from tests.cli.calls import check, one_line


@pytest.fixture(scope="module")
def run(opal, exact_model, make_pictures, tmp_path_factory):
    """A folder with `in/` and the results of `infer` in `explanations/`."""
    folder = tmp_path_factory.mktemp("run")
    make_pictures(folder / "in", 3)
    (folder / "in/broken.png").write_bytes((folder / "in/000.png").read_bytes()[:200])
    options = ("--explain", "--min-margin", "0.3", "--top", "2", "--no-isolate")
    check(opal("infer", "in", "--model", exact_model, *options, cwd=folder), 3)
    return folder


def test_a_runs_records_are_what_its_model_computes(opal, run, exact_model):
    done = check(opal("verify", "explanations", "--model", exact_model, "--all", "--json", cwd=run))
    expected = {"records": 4, "checked": 4, "different": 0, "findings": []}
    assert json.loads(done.stdout).items() >= expected.items()
    assert "give --model MODEL, or only --public-key KEY" in one_line(opal("verify", "explanations", cwd=run))
    # a sample says how to take it again
    arguments = ["explanations/results.jsonl", "in", "--model", exact_model, "--sample", "2", "--seed", "5", "--json"]
    done = check(opal("verify", *arguments, cwd=run))
    assert "2 of 4 records (--seed 5)" in done.stderr
    assert json.loads(done.stdout)["checked"] == 2


def test_a_model_has_not_changed_against_its_own_results(opal, run, exact_model):
    done = check(opal("diff", "explanations", "explanations", "--json", "--fail-on", "any", cwd=run))
    assert json.loads(done.stdout)["changed"] == 0
    call = ("diff", exact_model, exact_model, "in", "--json", "--tolerance", "0", "--fail-on", "any")
    done = check(opal(*call, cwd=run))
    assert (json.loads(done.stdout)["changed"], json.loads(done.stdout)["paired"]) == (0, 4)


@pytest.mark.parametrize(
    "arguments",
    [
        "drift explanations --baseline x.onnx --html",
        "diff explanations explanations --out",
        "convert explanations --to coco --out",
    ],
)
def test_the_results_that_are_read_are_not_written_over(opal, run, arguments):
    results = run / "explanations/results.jsonl"
    before = results.read_bytes()
    done = check(opal(*arguments.split(), "explanations/results.jsonl", "--overwrite", cwd=run), 2)
    assert "explanations/results.jsonl: " in one_line(done)
    assert results.read_bytes() == before
