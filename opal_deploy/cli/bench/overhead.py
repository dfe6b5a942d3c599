"""`opal-deploy bench overhead`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from opal_deploy.cli.bench import options
from opal_deploy.cli.console import print_json, print_message
from opal_deploy.errors import UsageError, require
from opal_deploy.options import parse_size

if TYPE_CHECKING:
    from opal_deploy.bench.overhead.counting import CountedBackbone
    from opal_deploy.bench.overhead.paper import PaperTable
    from opal_deploy.model.config import Distance, HeadConfig

_PARTS = ("projection", "cws", "gmp", "anchors")


def overhead(
    backbone: options.Counted = None,
    classes: Annotated[
        list[int] | None,
        typer.Option(min=2, help="C, repeatable; default: those of the paper's data sets.", show_default=False),
    ] = None,
    prototypes: options.CountedPrototypes = 5,
    size: options.CountedSize = "224",
    stride: options.CountedStrides = None,
    keep_layers: options.CountedKeepLayers = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="Leave a part of the OPAL head out, repeatable: projection, cws, gmp, anchors.", show_default=False
        ),
    ] = None,
    distance: Annotated[
        Literal["l1", "l2", "l3", "linf", "kl", "tropical"], typer.Option(help="Distance of the OPAL head.")
    ] = "l2",
    check: Annotated[
        bool, typer.Option("--check", help="Compare with every figure that the paper prints; 4 if one differs.")
    ] = False,
    output: Annotated[
        Literal["text", "json", "csv", "markdown"], typer.Option("--format", help="Format of the table on stdout.")
    ] = "text",
    chart: options.ChartFile = None,
    out: options.Out = None,
    as_json: options.JsonLines = False,
) -> None:
    """The paper's computational overhead: parameters and operations of backbones and of the heads on them.

    The heads are OPAL's, the paper's linear baseline, which normalises its features to length 1, and the network's own
    classifier (plain).
    """
    for package in ("torch", "torchvision"):
        require(package, "train", "opal-deploy bench overhead")
    require("ptflops", "bench", "opal-deploy bench overhead")
    from opal_deploy.bench.overhead import formatting
    from opal_deploy.bench.overhead import paper as papers
    from opal_deploy.bench.overhead.operations import head_title
    from opal_deploy.bench.overhead.table import build_measurements, make_table
    from opal_deploy.bench.report.charts import draw_charts
    from opal_deploy.bench.report.drawing import check_chart_path, write_charts

    if as_json and output != "text":
        raise UsageError(f"--json with --format {output}: both write to stdout; give one of them")
    check_chart_path(chart)
    paper = papers.load_paper()
    head, input_size = _build_head(prototypes, without or [], distance), parse_size(size)
    if check:
        _require_defaults(paper, [*(backbone or []), *(classes or []), *(stride or [])], head, input_size)
    columns = [(name, dataset.classes) for name, dataset in paper.datasets.items()]
    if classes:
        columns = [(formatting.format_classes(number), number) for number in dict.fromkeys(classes)]
    table = make_table(
        backbone or list(paper.backbones),
        columns,
        head,
        input_size,
        strides=stride or (None,),
        keep_layers=keep_layers,
        on_backbone=_print_backbone,
    )
    measurements = list(build_measurements(table))
    for measurement in measurements if out is not None or as_json else ():
        options.write_measurement(measurement, out, as_json=as_json)
    cells = papers.compare_with_paper(table, paper) if check else None
    if output == "json":
        print_json(formatting.to_json(table, cells))
    elif output == "csv":
        print(formatting.to_csv(table), end="", flush=True)
    elif not as_json:
        print(formatting.to_text(table, paper.titles(), markdown=output == "markdown"), end="", flush=True)
    if chart is not None:
        heading = (
            f"What the {head_title(head)} head adds to its backbone (m = {prototypes}, {input_size[0]}x{input_size[1]})"
        )
        write_charts(draw_charts("overhead", measurements), heading, chart)
        print_message(f"{chart}: written")
    if cells is not None:
        for line in papers.format_comparison(cells):
            print_message(line)
        papers.require_agreement(cells)


def _print_backbone(backbone: CountedBackbone) -> None:
    from opal_deploy.bench.overhead.formatting import format_count

    counts = backbone.counts
    print_message(
        f"{backbone.name}, {backbone.cells}: {format_count(counts.params)} parameters, "
        f"{counts.paper / 1e9:.2f} GFLOPs as the paper counts, {counts.flops / 1e9:.2f} true GFLOPs"
    )


def _build_head(prototypes: int, without: list[str], distance: Distance) -> HeadConfig:
    from opal_deploy.model.config import HeadConfig

    if unknown := [part for part in without if part not in _PARTS]:
        raise UsageError(f"--without {unknown[0]!r}: expected one of {', '.join(_PARTS)}")
    return HeadConfig(
        projection="projection" not in without,
        cws="cws" not in without,
        pooling="avg" if "gmp" in without else "max",
        anchors="anchors" not in without,
        prototypes_per_class=prototypes,
        distance=distance,
    )


def _require_defaults(
    paper: PaperTable, chosen: list[str | int], head: HeadConfig, input_size: tuple[int, int]
) -> None:
    """Raise UsageError unless the call counts all that the paper counted, and nothing else."""
    from opal_deploy.model.config import HeadConfig

    same_head = head == HeadConfig(prototypes_per_class=paper.prototypes_per_class)
    if chosen or not same_head or input_size != paper.input_size:
        raise UsageError(
            "--check with another backbone, stride, head, size or number of classes: it compares the paper's own "
            "table; leave --backbone, --stride, --classes, --prototypes, --size, --without and --distance out"
        )
