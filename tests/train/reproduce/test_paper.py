"""paper.toml says what the paper says, digit by digit."""

import re
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.train import recipe
from opal_deploy.train.reproduce import plan as paper
from opal_deploy.train.reproduce import results
from opal_deploy.train.reproduce.plan import make_plan

SOURCE = Path(__file__).parents[3].parent / "shared" / "paper" / "opal.tex"
# a figure, with its standard deviation where it has one; differences to the baseline begin with an arrow instead
_FIGURE = re.compile(r"(\d+\.\d)\}?\s*(?:\{\\tiny\$\\pm\$(\d+\.\d)\})?")


@pytest.fixture(scope="module")
def source():
    if not SOURCE.is_file():
        pytest.skip(f"no {SOURCE}")
    return SOURCE.read_text(encoding="utf-8")


def _printed(source, label):
    table = source[source.index(rf"\label{{{label}}}") :]
    table = table[table.index(r"\midrule") : table.index(r"\bottomrule")]
    # differences to the baseline: an arrow, then a number
    table = re.sub(r"\$\\(?:up|down)arrow\$[\d.]+|%.*", "", table)
    found = _FIGURE.findall(re.sub(r"\\vskip \S+", "", table))
    return [(float(mean), float(std) if std else None) for mean, std in found]


@pytest.mark.data
@pytest.mark.parametrize("name", paper.table_names())
def test_every_figure_is_the_papers(name, source):
    table = paper.load_table(name)
    ours = [(number.mean, number.std) for row in table.rows for number in row.paper]
    assert ours == _printed(source, table.label)
    assert all(len(row.paper) == len(table.columns) for row in table.rows)


@pytest.mark.data
@pytest.mark.parametrize("table", ["methods", "backbones", "ablation", "prototypes"])
def test_averages_come_to_what_the_text_prints(table, source, tmp_path):
    names = [column.dataset for column in paper.load_table(table).columns]
    plan = make_plan(paper.load_table(table), names, [0], recipe.load_recipe("paper"), {}, tmp_path)
    found = results.measure_averages(plan)
    assert found
    assert all(f"{average.mean.paper:+.2f}" in source for average in found)
    if table == "backbones":
        assert "39 out of 45" in source
        assert (found[0].not_worse.paper, found[0].count) == (39, 45)


@pytest.mark.data
@pytest.mark.parametrize("name", ["tab:sota_comparison", "tab:backbone_scalability", "tab:ablation_full"])
def test_differences_to_the_baseline_are_those_that_the_paper_prints(name, source):
    table = next(t for t in map(paper.load_table, paper.table_names()) if t.label == f"{name}_supp")
    text = source[source.index(rf"\label{{{name}}}") :]
    text = text[text.index(r"\midrule") : text.index(r"\bottomrule")]
    printed = [
        0.0 if equal else float(points) * (1 if arrow == "up" else -1)
        for arrow, points, equal in re.findall(r"\$\\(up|down)arrow\$([\d.]+)|(- 0\.0)", text)
    ]
    ours = [
        round(number.mean - base.mean, 1)
        for row in table.rows
        if row.baseline
        for number, base in zip(row.paper, row.baseline.paper, strict=True)
    ]
    assert ours == printed


def _heads(name):
    rows = [row for row in paper.load_table(name).rows if row.run]
    return [recipe.resolve_recipe(recipe.load_recipe("paper"), row.run).options.head for row in rows]


def test_the_ablation_is_all_eleven_variants():
    heads = _heads("ablation")
    assert len(set(heads)) == 11
    assert heads[0] == LINEAR_BASELINE
    assert heads[-1] == HeadConfig()
    parts = [(h.projection, h.pooling == "max", h.cws, h.anchors) for h in heads]
    assert [sum(on) for on in parts] == [0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4]


def test_rows_train_what_their_names_say():
    assert [head.prototypes_per_class for head in _heads("prototypes")[1:]] == [1, 3, 5, 10]
    assert [head.distance for head in _heads("distances")[1:]] == ["l1", "l3", "linf", "kl", "tropical", "l2"]
    assert [head.cws for head in _heads("collapse")] == [False, True]
    without = _heads("components")[0]
    assert (without.cws, without.pooling, without.anchors) == (False, "avg", True)
    backbones = [row.run["model"]["backbone"] for row in paper.load_table("backbones").rows if row.run]
    assert backbones[::2] == backbones[1::2]
    assert len(set(backbones)) == 9


def test_an_unknown_table_names_those_there_are():
    with pytest.raises(UsageError, match="table 'ablations': expected one of methods, backbones, ablation"):
        paper.load_table("ablations")
