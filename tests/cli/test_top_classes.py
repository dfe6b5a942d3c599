"""What needs more than a file of `export --outputs topk` has is refused in a line."""

from tests.cli.calls import check, one_line


def test_what_needs_all_outputs_is_refused_in_a_line(opal, exact_model, make_pictures, tmp_path, tmp_path_factory):
    model = tmp_path_factory.mktemp("best") / "best.onnx"
    options = ("--precision", "fp16", "--no-verify", "--outputs", "topk", "--top-k", "3")
    check(opal("export", exact_model, *options, "--out", model))
    make_pictures(tmp_path / "in", 1)

    def refuse(*arguments):
        line = one_line(opal(*arguments, "--model", model, cwd=tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["in"]
        return line

    assert "it lists 3 of 4 classes; give --top 3, or a file that lists more: opal-deploy export exact.pt" in refuse(
        "infer", "in"
    )
    assert "best.onnx: outputs only the best 3 classes, and `evaluate` needs all" in refuse("evaluate", "in")
    described = opal("inspect", model).stderr
    assert "evaluate DATA --model exact.pt --faithfulness --record, and export exact.pt again" in described
    assert "top_classes, top_logits, top_scores, top_cells, score_norm of the best 3 classes" in described
