"""`opal-deploy bench overhead` as it is called."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from opal_deploy.bench.measurement import read_measurements
from opal_deploy.cli import app

Opal = Callable[..., "CompletedProcess[str]"]
UNUSUAL = ("--backbone", "resnet18", "--classes", "1000", "--prototypes", "3", "--size", "160x192")
D, C, K, CELLS = 512, 1000, 3000, 5 * 6


def _run(*arguments: str) -> Result:
    """In this process, which has imported torch already."""
    return CliRunner().invoke(app, arguments)


class TestItsOutputs:
    def test_an_unusual_case_follows_the_closed_forms(self, tmp_path: Path) -> None:
        lines, chart = tmp_path / "overhead.jsonl", tmp_path / "overhead.svg"
        done = _run("bench", "overhead", *UNUSUAL, "--format", "json", "--out", str(lines), "--chart", str(chart))
        assert done.exit_code == 0, done.output
        document = json.loads(done.stdout)
        (row,) = document["rows"]
        assert (row["backbone"], row["classes"], row["grid"]) == ("resnet18", C, "5x6")
        assert row["opal_params"] == K * (D + 1)
        assert row["opal_paper"] == CELLS * K * (D + 4)
        assert row["opal_flops"] == 2 * row["opal_macs"] == 2 * CELLS * K * D
        assert row["linear_paper"] == D * C + 2 * CELLS * D
        assert row["opal_paper_percent"] == pytest.approx(100 * row["opal_paper"] / row["backbone_paper"])
        counted = sum(operation["paper_count"] for operation in document["operations"]["opal"])
        assert counted == row["opal_paper"]
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

    def test_csv_has_a_line_for_every_backbone_and_number_of_classes(self) -> None:
        done = _run(
            "bench", "overhead", "--backbone", "resnet18", "--backbone", "shufflenet_v2_x0_5", "--classes", "10",
            "--classes", "20", "--format", "csv", "--without", "gmp", "--distance", "l1",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        rows = list(csv.DictReader(done.stdout.splitlines()))
        assert [(row["backbone"], row["classes"]) for row in rows] == [
            (name, classes) for name in ("resnet18", "shufflenet_v2_x0_5") for classes in ("10", "20")
        ]
        assert "resnet18: 11.18M parameters" in done.stderr

    def test_text_shows_the_operations_and_names_both_conventions(self) -> None:
        done = _run("bench", "overhead", "--backbone", "resnet18", "--without", "anchors", "--without", "gmp")
        assert done.exit_code == 0, done.output
        for expected in (
            "Operations of the OPAL without GMP, anchors head; counts for resnet18, D = 512, C = 200, m = 5",
            "logits: dense layer",
            "true FLOPs: two for each multiply-accumulate",
            "paper: what the paper prints as FLOPs",
        ):
            assert expected in done.stdout
        # one line for each data set of the paper's
        assert [name in done.stdout for name in ("CUB (200)", "CARS (196)", "PETS (37)", "DOGS (120)", "FLOWER (102)")]


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--check", "--classes", "10"), "--check with another backbone, head, size or number of classes"),
            (("--chart", "picture.gif"), "expected a name that ends in .svg or .png"),
            (("--chart", "nowhere/a.svg"), "no such folder"),
            (("--without", "legs"), "--without 'legs': expected one of projection, cws, gmp, anchors"),
            (("--without", "projection"), "anchors without projection"),
            (("--json", "--format", "csv"), "both write to stdout"),
        ],
    )
    def test_are_one_line_before_anything_is_counted(
        self, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        done = _run("bench", "overhead", *arguments)
        assert message in str(done.exception) + done.output
        assert done.exit_code != 0

    def test_without_ptflops_it_says_what_to_install(self, opal: Opal) -> None:
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
