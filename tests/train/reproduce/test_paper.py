"""paper.toml says what the paper says, digit by digit."""

import re
from pathlib import Path

import pytest

from opal_deploy.errors import UsageError
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.train import recipe
from opal_deploy.train.reproduce import paper

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


def test_methods_of_others_are_not_trained():
    assert [row.name for row in paper.load_table("methods").rows if row.run] == ["Baseline (ConvNeXt-Tiny)", "OPAL"]


def test_an_unknown_table_names_those_there_are():
    with pytest.raises(UsageError, match="table 'ablations': expected one of methods, backbones, ablation"):
        paper.load_table("ablations")
