"""`opal-deploy train`: from options to a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from opal_deploy.cli.train import head_from_options, parse_size, train
from opal_deploy.errors import UsageError
from opal_deploy.model import checkpoint
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.train.setup import default_weights


@pytest.mark.parametrize(("text", "expected"), [("224", (224, 224)), ("224x448", (224, 448)), ("32X64", (32, 64))])
def test_a_size_is_one_number_or_height_x_width(text: str, expected: tuple[int, int]) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "x", "224x", "0", "-224", "1x2x3", "big", "224.0"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number of pixels"):
        parse_size(text)


def test_head_options_make_the_papers_variants() -> None:
    def head(name: str, **switches: bool) -> HeadConfig:
        on = {"cws": True, "projection": True, "anchors": True, **switches}
        return head_from_options(name, 5, "l2", None, **on)  # type: ignore[arg-type]

    assert head("opal") == HeadConfig()
    assert head("linear") == LINEAR_BASELINE
    assert head("opal", cws=False).evidence == "exact"
    assert head("opal", cws=False, anchors=False).evidence == "none"
    with pytest.raises(UsageError, match="eleven variants"):
        head("opal", anchors=False)


def test_the_linear_baseline_refuses_max_pooling() -> None:
    with pytest.raises(UsageError, match="--head linear pools by average"):
        head_from_options("linear", 5, "l2", "max", cws=True, projection=True, anchors=True)


@pytest.mark.parametrize(
    ("backbone", "weights"),
    [("resnet50", "IMAGENET1K_V2"), ("resnet18", "IMAGENET1K_V1"), ("convnext_tiny", "IMAGENET1K_V1")],
)
def test_default_weights_are_the_papers(backbone: str, weights: str) -> None:
    assert default_weights(backbone) == weights


def test_the_command_trains_and_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(5):
            pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{index}.png")
    (tmp_path / "data" / "a" / "bad.jpg").touch()
    out = tmp_path / "run"
    train(tmp_path / "data", backbone="shufflenet_v2_x0_5", weights="none", epochs=1, size="64", out=out)
    said = capsys.readouterr().err
    assert "warning: 1 of 11 files cannot be used and are left out: a/bad.jpg (zero bytes)" in said
    assert "2 classes, 8 pictures to train on, 2 to validate, 0 to test" in said
    assert "the data set has no test pictures" in said
    assert said.endswith(f"next: opal-deploy export {out / 'best.pt'}\n")
    assert checkpoint.load(out / "best.pt").class_names == ["a", "b"]
