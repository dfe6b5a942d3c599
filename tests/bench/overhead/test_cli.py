"""`opal-deploy bench overhead` as it is called."""

import pytest

from opal_deploy.bench.measurement import read_measurements
from tests.cli.calls import check

D, C, K, CELLS = 512, 1000, 3000, 5 * 6


def test_an_unusual_case_follows_the_closed_forms(opal, tmp_path):
    lines = tmp_path / "overhead.jsonl"
    arguments = "bench overhead --backbone resnet18 --classes 1000 --prototypes 3 --size 160x192"
    done = check(opal(*arguments.split(), "--out", lines))
    (measurement,) = read_measurements([lines])
    figures = {name: figure.value for name, figure in measurement.figures.items()}
    assert measurement.kind == "overhead"
    assert measurement.target.input_size == (160, 192)
    assert figures["opal_params"] == K * (D + 1)
    assert figures["opal_macs_paper"] == CELLS * K * (D + 4)
    assert figures["opal_flops"] == 2 * figures["opal_macs"] == 2 * CELLS * K * D
    assert figures["linear_macs_paper"] == D * C + 2 * CELLS * D
    assert (figures["plain_params"], figures["plain_macs"]) == ((D + 1) * C, D * C)
    share = 100 * figures["opal_macs_paper"] / figures["backbone_macs_paper"]
    assert figures["opal_macs_paper_percent"] == pytest.approx(share)
    operations = measurement.details["opal_operations"]
    assert sum(operation["paper_count"] for operation in operations) == figures["opal_macs_paper"]
    assert "resnet18, stride 32: 11.18M parameters" in done.stderr


def test_layers_kept_at_a_finer_stride_cost_operations_and_no_parameters(opal, tmp_path):
    lines = tmp_path / "overhead.jsonl"
    arguments = "--backbone resnet18 --stride 32 --stride 16 --keep-layers --classes 10 --out"
    done = check(opal("bench", "overhead", *arguments.split(), lines))
    assert "resnet18, stride 16, all layers" in done.stdout
    measurements = list(read_measurements([lines]))
    assert [(m.case["stride"], m.case["keep_layers"]) for m in measurements] == [(32, False), (16, True)]
    own, finer = ({name: figure.value for name, figure in m.figures.items()} for m in measurements)
    assert all(own[count] == finer[count] for count in ("backbone_params", "opal_params", "plain_params"))
    # layer4, which is 0.411 of ResNet-18's 1.814 G multiply-accumulates, and the head on four times the cells
    assert finer["backbone_macs"] - own["backbone_macs"] == pytest.approx(3 * 0.411e9, rel=0.01)
    assert finer["opal_macs"] == 4 * own["opal_macs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--check --stride 16", "--check compares the paper's own table"),
        ("--size 1x2x3", "--size '1x2x3': expected a number of pixels"),
        ("--check --classes 10", "--check compares the paper's own table"),
    ],
)
def test_wrong_calls_are_one_line_before_anything_is_counted(opal, arguments, message, tmp_path):
    done = opal("bench", "overhead", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_ptflops_it_says_what_to_install(opal):
    done = opal("bench", "overhead", blocked=("ptflops",))
    assert done.returncode == 2
    assert "needs ptflops" in done.stderr
    assert "opal-deploy[bench]" in done.stderr


@pytest.mark.slow
def test_check_passes_for_the_papers_nine_backbones(opal):
    done = check(opal("bench", "overhead", "--check", "--format", "markdown"))
    assert "202 of 207 figures of the paper agree" in done.stderr
    assert done.stderr.count("known discrepancy of the paper") == 5
    assert "| ResNet-50 | 23.51M | 4.13 | 8.17 | CUB (200) | 409.8k | 0.0006 |" in done.stdout
