"""The table against the paper's figures, and that the comparison can fail."""

from dataclasses import replace
from decimal import Decimal

import pytest

from opal_deploy.bench import overhead as overheads
from opal_deploy.bench.options import OverheadOptions
from opal_deploy.bench.overhead import (
    compare_with_paper,
    count_rows,
    format_comparison,
    format_like,
    load_paper,
    require_agreement,
    summarise,
)
from opal_deploy.errors import VerificationError

# one of each family; all nine are `slow`
THREE = ("resnet50", "efficientnet_v2_s", "convnext_tiny")


def make(paper):
    return count_rows(paper.backbones, paper.datasets.items(), paper.prototypes_per_class, paper.input_size)


def read_reduced():
    """Three backbones of the paper's; the percentages of its text are over all nine."""
    paper = load_paper()
    cells, disputed = (
        {name: text for name, text in all_of_them.items() if name.startswith(THREE)}
        for all_of_them in (paper.cells, paper.disputed)
    )
    return replace(paper, backbones=THREE, cells=cells, disputed=disputed)


def read_altered(cell, text):
    """The three backbones with one figure replaced."""
    paper = read_reduced()
    assert cell in paper.cells
    return replace(paper, cells={**paper.cells, cell: text})


@pytest.fixture(scope="module")
def table():
    return make(read_reduced())


def test_every_cell_agrees_but_the_one_known(table):
    cells = compare_with_paper(table, read_reduced())
    assert len(cells) == 3 * (2 + 5 * 4)
    assert [cell.name for cell in cells if not cell.agrees] == ["efficientnet_v2_s.gflops"]
    require_agreement(cells)
    lines = format_comparison(cells)
    assert lines[0].startswith("65 of 66 figures")
    assert lines[1:] == [
        "known discrepancy of the paper: efficientnet_v2_s.gflops: printed 8.90, counted 2.89 (no counter gives it "
        "at 224x224, and none exactly at 384x384 or 480x480)"
    ]


@pytest.mark.slow
def test_all_nine_with_the_percentages_of_the_text():
    paper = load_paper()
    table = make(paper)
    cells = compare_with_paper(table, paper)
    require_agreement(cells)
    assert len(cells) == 9 * 22 + 9
    assert {cell.name: (cell.printed, cell.counted) for cell in cells if cell.disputed} == {
        "efficientnet_v2_s.gflops": ("8.90", "2.89"),
        "efficientnet_v2_m.gflops": ("24.54", "5.43"),
        "efficientnet_v2_l.gflops": ("56.12", "12.35"),
        "percentages.opal_gflops_min": ("0.02", "0.06"),
        "percentages.opal_gflops_mean": ("0.53", "0.73"),
    }
    # in the convention that counts nothing but products, the linear head is smaller still
    shares = summarise(table)
    assert shares["linear", "flops"][1] < shares["linear", "paper"][1]


@pytest.mark.parametrize(
    ("cell", "text", "line"),
    [
        ("resnet50.params", "23.6M", "DIFFERS"),
        ("resnet50.gflops", "4.14", "DIFFERS"),
        ("resnet50.opal_gflops.cub", "0.1006", "DIFFERS"),
        ("resnet50.linear_params.pets", "75.80k", "DIFFERS"),
        ("efficientnet_v2_s.gflops", "2.89", "NO LONGER A DISCREPANCY"),
    ],
)
def test_an_altered_figure_fails(table, cell, text, line):
    cells = compare_with_paper(table, read_altered(cell, text))
    assert [each.name for each in cells if not each.is_expected] == [cell]
    with pytest.raises(VerificationError, match=f"1 of 66 figures .*: {cell};") as caught:
        require_agreement(cells)
    assert caught.value.exit_code == 4
    assert any(each.startswith(f"{line}: {cell}: printed") for each in format_comparison(cells))


def test_a_bound_holds_below_it_only(table):
    largest = summarise(table)["linear", "paper"][1]
    for bound, agrees in ((f"{largest + 0.001:.3f}", True), (f"{largest - 0.001:.3f}", False)):
        cells = compare_with_paper(table, replace(read_reduced(), cells={"percentages.linear_gflops_below": bound}))
        assert [cell.agrees for cell in cells] == [agrees]


def test_the_command_fails_with_the_comparison(monkeypatch, capsys):
    from opal_deploy.cli.bench import overhead

    altered = read_altered("resnet50.params", "23.6M")
    monkeypatch.setattr(overheads, "load_paper", lambda: altered)
    with pytest.raises(VerificationError, match=r"resnet50\.params"):
        overhead(OverheadOptions(check=True))
    assert "DIFFERS: resnet50.params: printed 23.6M, counted 23.5M" in capsys.readouterr().err


def test_digits_are_those_printed():
    for value, printed, expected in (
        ("409800", "401.6k", "409.8k"),
        ("4130187264e-9", "4.14", "4.13"),
        # the paper's halves go to the even digit
        ("104550", "0.0k", "104.6k"),
        ("1004500", "0.000M", "1.004M"),
        ("11.6", "0.00", "11.60"),
        ("7", "3", "7"),
    ):
        assert format_like(Decimal(value), printed) == expected
