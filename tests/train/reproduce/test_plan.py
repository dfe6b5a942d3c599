"""The paper's tables: which runs they need, what is shown of them, what they may take, and the paper's numbers."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from PIL import Image

from opal_deploy.errors import UsageError
from opal_deploy.logs import no_progress
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
from opal_deploy.train.recipe import TrainOptions, load_recipe, resolve_recipe
from opal_deploy.train.reproduce import render
from opal_deploy.train.reproduce.plan import estimate_hours, load_table, make_plan, run_folder_name, table_names
from opal_deploy.train.reproduce.results import collect_metric, measure_averages, run_plan

PAPER = load_recipe("paper")


def _plan(name, out, datasets=("cub",), seeds=(0,), **more):
    return make_plan(load_table(name), datasets, seeds, PAPER, more.pop("overrides", {}), out, **more)


def _finish(run, record=None, **summary):
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "summary.json").write_text(json.dumps(summary))
    stored = {"options": asdict(run.options), "device": "cuda:0", **(record or {})}
    (run.folder / "config.json").write_text(json.dumps(stored))


def _run(plan, row, seed=0):
    return next(run for run in plan.runs if run.row.name == row and run.seed == seed)


def test_tables_share_their_runs(tmp_path):
    folders = [
        {run.folder for run in _plan(name, tmp_path).runs}
        for name in ("methods", "ablation", "prototypes", "distances")
    ]
    assert set.intersection(*folders) == {
        tmp_path / "cub" / "convnext_tiny-opal-m5-l2-seed0",
        tmp_path / "cub" / "convnext_tiny-linear-seed0",
    }


@pytest.mark.parametrize("name", table_names())
def test_different_rows_have_different_folders(name, tmp_path):
    runs = _plan(name, tmp_path, ("dtd",) if name == "beyond" else ("cub",), (0, 1)).runs
    assert len({run.folder for run in runs}) == len(runs)
    assert len({run.options for run in runs}) == len(runs)


def test_a_runs_folder_has_no_colon():
    assert run_folder_name(TrainOptions("timm:resnet18.tv_in1k")) == "timm-resnet18.tv_in1k-opal-m5-l2-seed0"
    kept = TrainOptions("resnet50", stride=16, keep_layers=True)
    assert run_folder_name(kept) == "resnet50-stride16-all-layers-opal-m5-l2-seed0"


def test_a_whole_table_of_one_seed_comes_first(tmp_path):
    seeds = [run.seed for run in _plan("ablation", tmp_path, ("cub", "pets"), (0, 1)).runs]
    assert seeds == sorted(seeds)
    assert len(seeds) == 11 * 2 * 2


def test_a_data_set_of_ones_own_is_a_column_without_the_papers_figures(tmp_path):
    plan = _plan("ablation", tmp_path, ("mine",))
    assert [(column.dataset, column.metric) for column in plan.columns] == [("mine", "accuracy")]
    assert "no folder given: cub, cars, pets, dogs, flowers" in render.to_text(plan)


def test_rows_can_be_chosen_by_name(tmp_path):
    assert [run.row.name for run in _plan("prototypes", tmp_path, only=("m=1",)).runs] == ["OPAL m=1"]
    assert [run.row.name for run in _plan("prototypes", tmp_path, only=("opal",)).runs][:2] == ["OPAL m=1", "OPAL m=3"]
    with pytest.raises(UsageError, match=r"no row of prototypes matches m=7; expected one of Baseline"):
        _plan("prototypes", tmp_path, only=("m=7",))


def test_what_a_table_varies_cannot_be_fixed(tmp_path):
    with pytest.raises(UsageError, match="the table backbones varies backbone; leave it out"):
        _plan("backbones", tmp_path, overrides={"model": {"backbone": "resnet18"}})


def test_departures_from_the_protocol_are_said(tmp_path):
    overrides = {
        "model": {"backbone": "resnet18", "weights": "none"},
        "head": {"epsilon": 1e-3},
        "training": {"epochs": 2, "lr": 1e-3, "precision": "auto"},
    }
    plan = _plan("ablation", tmp_path, overrides=overrides, only=("OPAL",))
    assert plan.deviations == (
        "backbone resnet18 instead of convnext_tiny",
        "weights None instead of IMAGENET1K_V1",
        "epochs 2 instead of 30",
        "lr 0.001 instead of 0.0001",
        "precision auto instead of fp32",
        "epsilon 0.001 instead of 1e-08",
    )
    assert "not the paper's protocol: backbone resnet18" in render.to_text(plan)
    assert _plan("ablation", tmp_path).deviations == ()
    assert _plan("backbones", tmp_path).deviations == ()


def test_departures_are_those_of_the_runs_that_were_done_whatever_is_asked_for_now(tmp_path):
    plan = _plan("methods", tmp_path)
    run = _run(plan, "OPAL")
    short = replace(run, options=replace(run.options, epochs=1))
    data = {"classes": 10, "train": 240, "val": 60, "test": 243}
    _finish(short, {"data": data, "precision": "bf16"}, test_accuracy=0.5)
    assert plan.deviations == (
        "epochs 1 instead of 30",
        "precision bf16 instead of fp32",
        "cub has 10 classes, 300 training and validation images and 243 test images instead of 200, 5,994 and 5,794",
    )


def test_a_finished_run_of_other_options_is_refused(tmp_path):
    plan = _plan("methods", tmp_path)
    for run in plan.runs:
        _finish(replace(run, options=replace(run.options, epochs=1, lr=0.1)), test_accuracy=0.5)
    with pytest.raises(UsageError, match=r"a finished run with other options: epochs was 1 and is 30; lr was 0\.1 and"):
        run_plan(plan, {}, progress=no_progress, log=lambda line: None)


@pytest.mark.parametrize("text", ["{", "[]", '{"test_accuracy": [1]}', '{"test_accuracy": 1' + "0" * 400 + "}"])
def test_a_damaged_summary_is_named(tmp_path, text):
    plan = _plan("methods", tmp_path)
    run = _run(plan, "OPAL")
    _finish(run)
    (run.folder / "summary.json").write_text(text)
    with pytest.raises(UsageError, match=r"summary\.json: .*remove its folder and reproduce again"):
        render.to_text(plan)
    assert estimate_hours(run, tmp_path, 10) is not None


@pytest.mark.parametrize(
    "stored", [{"options": {"head": 7}}, {"data": {"classes": "ten", "train": None}}, {"data": []}, {"options": []}]
)
def test_a_damaged_configuration_is_no_departure(tmp_path, stored):
    plan = _plan("methods", tmp_path)
    run = _run(plan, "OPAL")
    _finish(run, stored, test_accuracy=0.5, images_per_second=10**400)
    assert plan.deviations == ()
    assert not estimate_hours(run, tmp_path, 10).measured


def test_means_and_spreads_are_over_seeds(tmp_path):
    plan = _plan("methods", tmp_path, seeds=(0, 1, 2))
    for seed, accuracy in enumerate((0.84, 0.86, 0.85)):
        _finish(_run(plan, "OPAL", seed), test_accuracy=accuracy)
    _finish(_run(plan, "Baseline (ConvNeXt-Tiny)", 1), test_accuracy=0.83)
    opal, baseline = plan.table.rows[-1], plan.table.rows[0]
    found = collect_metric(plan, opal, plan.columns[0])
    assert found is not None
    assert found.mean == pytest.approx(85.0)
    assert found.std == pytest.approx(1.0)  # n - 1
    lines = render.to_text(plan).splitlines()
    assert " ".join(next(line for line in lines if line.startswith("OPAL")).split()) == (
        "OPAL 85.0 ± 1.0 (+2.0) 85.6 ± 0.2 (+1.4)"
    )
    assert "83.0 (1 of 3)" in next(line for line in lines if line.startswith("Baseline"))
    assert "unfinished: 2 of 6 runs" in lines[-1]
    document = render.to_json(plan)
    cell = document["rows"][-1]["cells"][0]
    assert cell["ours"]["values"] == pytest.approx([84.0, 86.0, 85.0])
    assert cell["ours"]["difference"] == pytest.approx(2.0)
    assert cell["paper"] == {"mean": 85.6, "std": 0.2, "difference": pytest.approx(1.4)}
    assert collect_metric(plan, baseline, plan.columns[0]).std is None


def test_averages_are_over_the_same_data_sets_for_ours_and_the_papers(tmp_path):
    plan = _plan("prototypes", tmp_path, ("cub", "cars", "mine"))
    for run in plan.runs:
        m = run.options.head.prototypes_per_class if run.options.head.anchors else 0
        _finish(run, test_accuracy={"cub": 0.80, "cars": 0.90, "mine": 0.1}[run.dataset] + m / 100)
    text = render.to_text(plan)
    assert next(line for line in text.splitlines() if line.startswith("OPAL m=3")).split()[-4:] == [
        "88.00", "(+3.00)", "87.40", "(+1.40)",
    ]  # fmt: skip
    assert "m = 1 against the baseline, mean difference: ours +1.00 (2 of 2 not worse), the paper's -2.90 (0 of" in text
    (tmp_path / "mine" / "convnext_tiny-opal-m1-l2-seed0" / "summary.json").unlink()
    (tmp_path / "cars" / "convnext_tiny-opal-m1-l2-seed0" / "summary.json").unlink()
    assert "mean difference: ours -, the paper's -2.90" in render.to_text(plan)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_figure_has_a_panel_for_each_data_set_and_their_average(tmp_path, suffix):
    plan = _plan("prototypes", tmp_path, ("cub", "pets", "mine"))
    for run in plan.runs[:-1]:
        _finish(run, test_accuracy=0.8)
    path = tmp_path / f"fig4{suffix}"
    render.draw_prototypes(plan, path)
    if suffix == ".png":
        with Image.open(path) as image:
            assert image.size == (3 * 600, 2 * 480)
    else:
        # matplotlib writes a text's characters as a comment before its outlines
        text = path.read_text()
        titles = ("CUB-200-2011", "Oxford-IIIT Pet", "mine", "average", "OPAL, ours", "baseline, paper")
        assert all(f"<!-- {title} -->" in text for title in titles)
    with pytest.raises(UsageError, match="only `prototypes`"):
        render.check_chart(_plan("ablation", tmp_path), path)
    with pytest.raises(UsageError, match=r"ends in \.png or \.svg"):
        render.check_chart(plan, tmp_path / "fig4.pdf")


def test_collapse_spreads_over_images_as_in_the_paper(tmp_path):
    plan = _plan("collapse", tmp_path, seeds=(0, 1))
    for seed in (0, 1):
        run = _run(plan, "Proj.+GMP+CWS+Orth. (OPAL)", seed)
        _finish(run, spatial_prototype_collapse=0.01 + 0.02 * seed, spatial_prototype_collapse_std=0.08)
    assert "2.0 ± 8.0" in render.to_text(plan)
    assert "standard deviation over the test images" in render.to_text(plan)


def test_markdown_is_a_table(tmp_path):
    lines = render.to_markdown(_plan("distances", tmp_path)).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 7
    assert len({line.count("|") for line in table}) == 1
    assert table[2] == "| Baseline (ConvNeXt-Tiny) | - | 84.2 |"


def test_hours_come_from_counted_operations(tmp_path):
    run = _run(_plan("backbones", tmp_path), "ResNet-50")
    found = estimate_hours(run, tmp_path, tflops=100.0)
    # ResNet-50 without its dense layer: 4.09 G multiply-accumulates (He et al. 2016; torchvision's page)
    train, val = 5994 - 1198, 1198
    flops = 2 * 4.087e9 * (30 * (3 * train + val) + 5794)
    assert found is not None
    assert found.hours == pytest.approx(flops / 100e12 / 3600, rel=0.01)
    assert not found.measured
    assert estimate_hours(replace(run, dataset="mine"), tmp_path, 10) is None


def test_a_finished_run_replaces_the_assumption(tmp_path):
    plan = _plan("methods", tmp_path)
    _finish(_run(plan, "OPAL"), test_accuracy=0.5, images_per_second=1000.0)
    found = estimate_hours(_run(plan, "Baseline (ConvNeXt-Tiny)"), tmp_path, 10)
    assert found is not None
    assert found.measured
    _finish(_run(plan, "OPAL"), {"device": "cpu"}, test_accuracy=0.5, images_per_second=1000.0)
    assert not estimate_hours(_run(plan, "Baseline (ConvNeXt-Tiny)"), tmp_path, 10).measured
    assert found.hours == pytest.approx(30 * (4796 + 1198 / 3) / 1000 / 3600, rel=1e-3)


# paper.toml says what the paper says, digit by digit ------------------------------------------------------------------

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
@pytest.mark.parametrize("name", table_names())
def test_every_figure_is_the_papers(name, source):
    table = load_table(name)
    ours = [(number.mean, number.std) for row in table.rows for number in row.paper]
    assert ours == _printed(source, table.label)
    assert all(len(row.paper) == len(table.columns) for row in table.rows)


@pytest.mark.data
@pytest.mark.parametrize("table", ["methods", "backbones", "ablation", "prototypes"])
def test_averages_come_to_what_the_text_prints(table, source, tmp_path):
    found = measure_averages(_plan(table, tmp_path, [column.dataset for column in load_table(table).columns]))
    assert found
    assert all(f"{average.mean.paper:+.2f}" in source for average in found)
    if table == "backbones":
        assert "39 out of 45" in source
        assert (found[0].not_worse.paper, found[0].count) == (39, 45)


@pytest.mark.data
@pytest.mark.parametrize("name", ["tab:sota_comparison", "tab:backbone_scalability", "tab:ablation_full"])
def test_differences_to_the_baseline_are_those_that_the_paper_prints(name, source):
    table = next(t for t in map(load_table, table_names()) if t.label == f"{name}_supp")
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
    rows = [row for row in load_table(name).rows if row.run]
    return [resolve_recipe(PAPER, row.run).options.head for row in rows]


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
    backbones = [row.run["model"]["backbone"] for row in load_table("backbones").rows if row.run]
    assert backbones[::2] == backbones[1::2]
    assert len(set(backbones)) == 9


def test_an_unknown_table_names_those_there_are():
    with pytest.raises(UsageError, match="table 'ablations': expected one of methods, backbones, ablation"):
        load_table("ablations")
