"""`opal-deploy bench overhead` as it is called."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest

from opal_deploy.bench.measurement import read_measurements

Opal = Callable[..., "CompletedProcess[str]"]
D, C, K, CELLS = 512, 1000, 3000, 5 * 6


def test_an_unusual_case_follows_the_closed_forms(opal: Opal, tmp_path: Path) -> None:
    lines, chart = tmp_path / "overhead.jsonl", tmp_path / "overhead.svg"
    arguments = "bench overhead --backbone resnet18 --classes 1000 --prototypes 3 --size 160x192 --format json"
    done = opal(*arguments.split(), "--out", lines, "--chart", chart)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    assert (row["backbone"], row["classes"], row["grid"]) == ("resnet18", C, "5x6")
    assert row["opal_params"] == K * (D + 1)
    assert row["opal_paper"] == CELLS * K * (D + 4)
    assert row["opal_flops"] == 2 * row["opal_macs"] == 2 * CELLS * K * D
    assert row["linear_paper"] == D * C + 2 * CELLS * D
    assert (row["plain_params"], row["plain_macs"]) == ((D + 1) * C, D * C)
    assert row["opal_paper_percent"] == pytest.approx(100 * row["opal_paper"] / row["backbone_paper"])
    assert sum(operation["paper_count"] for operation in document["operations"]["opal"]) == row["opal_paper"]
    assert document["percentages"]["opal_params"]["mean"] == pytest.approx(row["opal_params_percent"])

    (measurement,) = read_measurements([lines])
    assert measurement.kind == "overhead"
    assert measurement.figures["opal_macs_paper"].value == row["opal_paper"]
    assert measurement.figures["backbone_flops"].value == row["backbone_flops"]
    assert measurement.target is not None
    assert measurement.target.input_size == (160, 192)
    assert measurement.details["opal_operations"] == document["operations"]["opal"]

    texts = "".join(ElementTree.parse(chart).getroot().itertext())
    assert "linear head" in texts
    assert "What the OPAL head adds to its backbone (m = 3, 160x192)" in texts


def test_csv_has_a_line_for_every_backbone_and_number_of_classes(opal: Opal) -> None:
    arguments = "--backbone resnet18 --backbone shufflenet_v2_x0_5 --classes 10 --classes 20 --without gmp"
    done = opal("bench", "overhead", *arguments.split(), "--distance", "l1", "--format", "csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert [(row["backbone"], row["classes"]) for row in rows] == [
        (name, classes) for name in ("resnet18", "shufflenet_v2_x0_5") for classes in ("10", "20")
    ]
    assert "resnet18, stride 32: 11.18M parameters" in done.stderr


def test_layers_kept_at_a_finer_stride_cost_operations_and_no_parameters(opal: Opal, tmp_path: Path) -> None:
    arguments = "--backbone resnet18 --stride 32 --stride 16 --keep-layers --classes 10 --format csv --out"
    done = opal("bench", "overhead", *arguments.split(), tmp_path / "overhead.jsonl")
    assert done.returncode == 0, done.stderr
    own, finer = csv.DictReader(done.stdout.splitlines())
    assert [(row["stride"], row["keep_layers"], row["grid"]) for row in (own, finer)] == [
        ("32", "False", "7x7"), ("16", "True", "14x14"),
    ]  # fmt: skip
    assert all(own[count] == finer[count] for count in ("backbone_params", "opal_params", "plain_params"))
    # layer4, which is 0.411 of ResNet-18's 1.814 G multiply-accumulates, and the head on four times the cells
    assert int(finer["backbone_macs"]) - int(own["backbone_macs"]) == pytest.approx(3 * 0.411e9, rel=0.01)
    assert int(finer["opal_macs"]) == 4 * int(own["opal_macs"])
    cases = [measurement.case for measurement in read_measurements([tmp_path / "overhead.jsonl"])]
    assert [case.get("keep_layers") for case in cases] == [None, True]


def test_text_shows_the_operations_and_names_the_conventions(opal: Opal) -> None:
    done = opal(*["bench", "overhead", "--backbone", "resnet18", "--without", "anchors", "--without", "gmp"])
    assert done.returncode == 0, done.stderr
    for text in (
        "Operations of the OPAL without GMP, anchors head; counts for resnet18, D = 512, C = 200, m = 5",
        "logits: dense layer",
        "true FLOPs: two for each multiply-accumulate",
        "paper: what the paper prints as FLOPs",
    ):
        assert text in done.stdout
    # one line for each of the paper's data sets
    for dataset in ("CUB (200)", "CARS (196)", "PETS (37)", "DOGS (120)", "FLOWER (102)"):
        assert dataset in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--check --classes 10", "--check with another backbone"),
        ("--chart image.gif", "expected a name that ends in .svg or .png"),
        ("--chart nowhere/a.svg", "no such folder"),
        ("--without legs", "--without 'legs': expected one of projection, cws, gmp, anchors"),
        ("--without projection", "anchors without projection"),
        ("--json --format csv", "both write to stdout"),
    ],
)
def test_wrong_calls_are_one_line_before_anything_is_counted(
    opal: Opal, arguments: str, message: str, tmp_path: Path
) -> None:
    done = opal("bench", "overhead", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_ptflops_it_says_what_to_install(opal: Opal) -> None:
    done = opal("bench", "overhead", blocked=("ptflops",))
    assert done.returncode == 2
    assert "needs ptflops" in done.stderr
    assert "opal-deploy[bench]" in done.stderr


@pytest.mark.slow
def test_check_passes_for_the_papers_nine_backbones(opal: Opal) -> None:
    done = opal("bench", "overhead", "--check", "--format", "markdown")
    assert done.returncode == 0, done.stderr
    assert "202 of 207 figures of the paper agree" in done.stderr
    assert done.stderr.count("known discrepancy of the paper") == 5
    assert "| ResNet-50 | 23.51M | 4.13 | 8.17 | CUB (200) | 409.8k | 0.0006 |" in done.stdout
