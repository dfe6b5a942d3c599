"""A file of `export --outputs topk` answers as one of all outputs does, and what needs more is refused in a line."""

import shutil

import pytest

import opal_deploy
from tests.cli.calls import one_line, read_results

TOP = ("--top", "3", "--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def models(opal, exact_model, tmp_path_factory):
    """`best.onnx`, which lists 3 of its 4 classes, and `all.onnx`, which outputs all; both fp16 of `exact_model`."""
    folder = tmp_path_factory.mktemp("best")
    for name, options in (("best.onnx", ("--outputs", "topk", "--top-k", "3")), ("all.onnx", ())):
        command = ("export", exact_model, "--precision", "fp16", "--no-verify", *options, "--out", folder / name)
        assert opal(*command).returncode == 0
    return folder / "best.onnx", folder / "all.onnx"


@pytest.mark.data
def test_photographs_get_the_records_overlays_and_sheets_of_a_file_of_all_outputs(opal, models, photographs, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for photograph in photographs[::60]:
        shutil.copy(photograph, images)
    (images / "broken.jpg").write_bytes(photographs[0].read_bytes()[:999])
    for model in models:
        options = ("--explain", "--sheets", "--min-margin", "0.001", "--model", model, "--out", tmp_path / model.stem)
        assert opal("infer", images, *options, *TOP).returncode == 3
    records = [read_results(tmp_path / name) for name in ("best", "all")]
    assert len(records[0]) == 11
    for best, expected in zip(*records, strict=True):
        assert best.pop("model_sha256") != expected.pop("model_sha256")
        assert best == _approximate(expected)
    drawn = [_files(tmp_path / name, "overlays/*", "sheets/*") for name in ("best", "all")]
    assert len(drawn[0]) == 20
    assert drawn[0].keys() == drawn[1].keys()
    # but for a cosine that rounds to another last digit
    assert sum(drawn[0][name] == drawing for name, drawing in drawn[1].items()) >= 18
    checked = opal("verify", tmp_path / "best" / "results.jsonl", "--model", models[0], "--root", tmp_path)
    assert "11 of 11" in checked.stderr, checked.stderr
    # a record asked for more classes than are listed has those that are
    assert len(opal_deploy.load(models[0], device="cpu").predict(photographs[0], top=4)["top"]) == 3


def test_what_needs_all_outputs_is_refused_in_a_line(opal, models, make_pictures, tmp_path):
    make_pictures(tmp_path / "in", 1)

    def refuse(*arguments):
        line = one_line(opal(*arguments, "--model", models[0], cwd=tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        return line

    assert "it lists 3 of 4 classes; give --top 3, or a file that lists more: opal-deploy export exact.pt" in refuse(
        "infer", "in"
    )
    assert "best.onnx: outputs only the best 3 classes, and `evaluate` needs all" in refuse("evaluate", "in")
    command = "opal-deploy evaluate DATA --model exact.pt --faithfulness --record"
    advice = f"measure it with: {command}, and export exact.pt again"
    described = opal("inspect", models[0]).stderr
    assert advice in described
    assert "top_classes, top_logits, top_scores, top_cells, score_norm of the best 3 classes" in described


def _files(folder, *patterns):
    return {str(path.relative_to(folder)): path.read_bytes() for pattern in patterns for path in folder.glob(pattern)}


def _approximate(value, key=""):
    """Allow 1e-6 where the norm enters, which the graph computes in float32; all else must be equal."""
    if isinstance(value, dict):
        return {name: _approximate(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_approximate(entry) for entry in value]
    return pytest.approx(value, abs=1e-6) if key in ("cosine", "margin", "contribution") else value
