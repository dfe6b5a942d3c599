"""The overhead table: backbones with numbers of classes and the heads on them, compared with the paper's figures.

The linear head is the paper's, on features normalised to length 1; the plain one is the network's own classifier.
`paper.toml` holds the figures that the paper prints.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from importlib.resources import files

from opal_deploy.bench.counting import (
    HEAD_OPERATIONS,
    CountedBackbone,
    Counts,
    Shape,
    count_backbone,
    count_classifier,
    evaluate_operations,
    sum_operations,
)
from opal_deploy.bench.measurement import Figure, Measurement, Scalar, Target, provenance
from opal_deploy.bench.report import format_table
from opal_deploy.errors import VerificationError
from opal_deploy.logs import Log

CONVENTIONS = {
    "paper": "what the paper prints as FLOPs: multiply-accumulates counted as one, with biases, activations, "
    "normalisation and pooling, as ptflops counts PyTorch modules",
    "MACs": "only multiply-accumulates of convolutions and matrix products",
    "true FLOPs": "two per multiply-accumulate of a convolution or matrix product",
}
# attributes of `Counts` that are given in % of the backbone: the figure's name and the title
SHARES = {
    "params": ("params", "parameters"),
    "paper": ("macs_paper", "operations, paper's convention"),
    "flops": ("flops", "true FLOPs"),
}
_HEADER = (
    "backbone", "params", "paper GFLOPs", "true GFLOPs", "classes",
    "linear params", "paper GFLOPs", "true GFLOPs",
    "OPAL params", "paper GFLOPs", "true GFLOPs", "params %", "paper %", "true %",
)  # fmt: skip
# stride of the paper's nine backbones, which needs no mention
_PAPER_STRIDE = 32
_UNITS = {"": 1, "k": 1_000, "M": 1_000_000}
_GIGA = 10**9


@dataclass(frozen=True)
class Row:
    """One backbone with one number of classes.

    Attributes:
        heads: counts by head: `linear`, `opal`, and `plain` unless the backbone is cut too early for its classifier.
    """

    backbone: CountedBackbone
    dataset: str
    shape: Shape
    heads: dict[str, Counts]

    def percent(self, head: str, count: str) -> float:
        """Return what a head adds to its backbone, in %; `count` is one of SHARES."""
        return float(100 * getattr(self.heads[head], count) / getattr(self.backbone.counts, count))


@dataclass(frozen=True)
class PaperTable:
    """The content of paper.toml; `cells` holds every printed figure: `resnet50.params`, `resnet50.opal_gflops.cub`, ...

    Attributes:
        disputed: reasons for taking a cell as the paper's mistake, by the cell's name.
    """

    input_size: tuple[int, int]
    prototypes_per_class: int
    datasets: Mapping[str, int]
    backbones: tuple[str, ...]
    titles: Mapping[str, str]
    cells: Mapping[str, str]
    disputed: Mapping[str, str]


@dataclass(frozen=True)
class Cell:
    """One figure of the paper, compared.

    Attributes:
        name: as in `PaperTable.cells`.
        agrees: whether both are the same, or whether a bound holds.
        disputed: why the paper is taken to be wrong; empty if it is not.
    """

    name: str
    printed: str
    counted: str
    agrees: bool
    disputed: str = ""

    @property
    def is_expected(self) -> bool:
        """Whether the figure agrees, or differs and is disputed."""
        return self.agrees != bool(self.disputed)


def count_rows(
    backbones: Sequence[str],
    classes: Iterable[tuple[str, int]],
    prototypes: int,
    input_size: tuple[int, int],
    *,
    strides: Sequence[int | None] = (None,),
    keep_layers: bool = False,
    log: Log = lambda line: None,
) -> list[Row]:
    """Count every backbone and evaluate every head.

    Args:
        classes: numbers of classes by name, such as a data set's.
        strides: input pixels per cell, at which every backbone is cut; None cuts before its pooling.

    Raises:
        UsageError: no such backbone or stride, its layers cannot be kept, or the stride does not divide the size.
        MissingExtra: ptflops is not installed.
    """
    from opal_deploy.model.backbones import list_variants

    columns = list(classes)
    rows: list[Row] = []
    for name, stride, keep in list_variants(backbones, strides, keep_layers):
        backbone = count_backbone(name, input_size, stride, keep)
        counts = backbone.counts
        log(
            f"{name}, {backbone.cells}: {format_count(counts.params)} parameters, {counts.paper / 1e9:.2f} GFLOPs in "
            f"the paper's convention, {counts.flops / 1e9:.2f} true GFLOPs"
        )
        for dataset, number in columns:
            shape = Shape(backbone.num_features, number, prototypes, backbone.grid)
            heads = {head: sum_operations(operations, shape) for head, operations in HEAD_OPERATIONS.items()}
            if backbone.has_classifier:
                heads["plain"] = count_classifier(name, number, (backbone.num_features, *backbone.grid))
            rows.append(Row(backbone, dataset, shape, heads))
    return rows


def summarise(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return a head's smallest, largest and mean share of its backbone over all rows, in %, by head and count."""
    shares = {}
    for head in dict.fromkeys(head for row in rows for head in row.heads):
        for count in SHARES:
            values = [row.percent(head, count) for row in rows if head in row.heads]
            shares[head, count] = min(values), max(values), statistics.fmean(values)
    return shares


def build_measurements(rows: Sequence[Row], input_size: tuple[int, int]) -> Iterator[Measurement]:
    """Yield one measurement per row; counts are neither timed nor better or worse."""
    origin = provenance()
    for row in rows:
        backbone, shape = row.backbone, row.shape
        target = Target(
            f"{backbone.name} + opal", backbone.name, "opal", input_size=input_size,
            num_classes=shape.num_classes, prototypes_per_class=shape.prototypes_per_class,
        )  # fmt: skip
        case: dict[str, Scalar] = {
            "dataset": row.dataset,
            "stride": backbone.stride,
            "keep_layers": backbone.keep_layers,
        }
        details = {f"{head}_operations": evaluate_operations(each, shape) for head, each in HEAD_OPERATIONS.items()}
        yield Measurement(
            "overhead", target, case, _build_figures(row), settings={"conventions": CONVENTIONS},
            details={"letters": shape.letters, **details}, **origin,
        )  # fmt: skip


def _build_figures(row: Row) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for name, counts in {"backbone": row.backbone.counts, **row.heads}.items():
        figures |= {
            f"{name}_params": Figure(counts.params, "parameters"),
            f"{name}_macs_paper": Figure(counts.paper, "operations"),
            f"{name}_macs": Figure(counts.macs, "MACs"),
            f"{name}_flops": Figure(counts.flops, "FLOPs"),
        }
        for count, (figure, _) in SHARES.items() if name in row.heads else ():
            figures[f"{name}_{figure}_percent"] = Figure(row.percent(name, count), "%")
    return figures


# the table ------------------------------------------------------------------------------------------------------------


def format_classes(number: int) -> str:
    """Return a name for a number of classes without a data set."""
    return f"{number} classes"


def format_count(value: int) -> str:
    """Return a count as the paper writes it: 409.8k, 2.049M, 23.51M."""
    return format_like(value, "0.00M" if value >= 10_000_000 else "0.000M" if value >= 1_000_000 else "0.0k")


def format_like(value: int | Decimal, printed: str) -> str:
    """Return a value with the unit and the digits of a printed figure, halves rounded to even as in the paper.

    For example, 409800 formatted like `401.6k` is `409.8k`.
    """
    unit = printed[-1] if printed[-1] in _UNITS else ""
    digits = len(printed.removesuffix(unit).partition(".")[2])
    return str((Decimal(value) / _UNITS[unit]).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN)) + unit


def format_tables(
    rows: Sequence[Row], input_size: tuple[int, int], titles: Mapping[str, str], *, markdown: bool = False
) -> str:
    """Return all tables for a terminal or as Markdown; `titles` are the titles of backbones and data sets, by name."""
    mark = "### " if markdown else ""
    shares = [
        [f"{'OPAL' if head == 'opal' else head}: {SHARES[count][1]}", *(f"{value:.3f}" for value in values)]
        for (head, count), values in summarise(rows).items()
    ]
    parts = [
        f"Parameters and operations per image of {input_size[0]}x{input_size[1]}, m = "
        f"{rows[0].shape.prototypes_per_class}; head counts come on top of the backbone's, % are relative to the "
        "backbone. The linear head normalises its features to length 1; the plain head is the network's own classifier",
        format_table(_HEADER, [_format_row(row, titles) for row in rows], markdown=markdown),
        f"{mark}Head relative to backbone, over all rows",
        format_table(("%", "smallest", "largest", "mean"), shares, markdown=markdown),
        f"{mark}Conventions",
        "\n".join(f"- {name}: {text}" for name, text in CONVENTIONS.items()),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _format_row(row: Row, titles: Mapping[str, str]) -> list[str]:
    backbone, number = row.backbone, row.shape.num_classes
    name = titles.get(backbone.name, backbone.name)
    classes = f"{titles.get(row.dataset, row.dataset)} ({number})"
    counts = [(backbone.counts, "0.00"), (row.heads["linear"], "0.0000"), (row.heads["opal"], "0.0000")]
    texts = [
        [format_count(each.params), *(format_like(Decimal(value) / _GIGA, like) for value in (each.paper, each.flops))]
        for each, like in counts
    ]
    return [
        name if backbone.stride == _PAPER_STRIDE else f"{name}, {backbone.cells}", *texts[0],
        str(number) if row.dataset == format_classes(number) else classes, *texts[1], *texts[2],
        *(f"{row.percent('opal', count):.2f}" for count in SHARES),
    ]  # fmt: skip


# the paper's figures --------------------------------------------------------------------------------------------------


def load_paper() -> PaperTable:
    """Read the paper's table."""
    raw = tomllib.loads(files(__package__).joinpath("paper.toml").read_text(encoding="utf-8"))
    height, width = raw["input_size"]
    cells = {f"percentages.{name}": text for name, text in raw["percentages"].items()}
    for name, backbone in raw["backbones"].items():
        for figure, value in backbone.items():
            if isinstance(value, dict):
                cells |= {f"{name}.{figure}.{dataset}": text for dataset, text in value.items()}
            elif figure != "title":
                cells[f"{name}.{figure}"] = value
    return PaperTable(
        input_size=(height, width),
        prototypes_per_class=raw["prototypes_per_class"],
        datasets={name: entry["classes"] for name, entry in raw["datasets"].items()},
        backbones=tuple(raw["backbones"]),
        titles={name: entry["title"] for name, entry in {**raw["backbones"], **raw["datasets"]}.items()},
        cells=cells,
        disputed=raw["disputed"],
    )


def compare_with_paper(rows: Sequence[Row], paper: PaperTable) -> list[Cell]:
    """Compare every figure of the paper's table and text with the counts, at the digits that the paper prints."""
    values = _count_cells(rows)
    cells = []
    for name, printed in paper.cells.items():
        is_bound = name.endswith("_below")
        counted = format_like(values[name], f"{printed}0" if is_bound else printed)
        agrees = values[name] < Decimal(printed) if is_bound else counted == printed
        cells.append(Cell(name, printed, counted, agrees, paper.disputed.get(name, "")))
    return cells


def format_comparison(cells: Sequence[Cell]) -> list[str]:
    """Return lines for a person: the number of figures that agree, and every figure that does not."""
    lines = [f"{sum(cell.agrees for cell in cells)} of {len(cells)} figures of the paper agree at the printed digits"]
    # the known ones first
    for cell in sorted(cells, key=lambda cell: not cell.is_expected):
        found = f"{cell.name}: printed {cell.printed}, counted {cell.counted}"
        if cell.disputed:
            title = "NO LONGER A DISCREPANCY" if cell.agrees else "known discrepancy of the paper"
            lines.append(f"{title}: {found}" + ("" if cell.agrees else f" ({cell.disputed})"))
        elif not cell.agrees:
            lines.append(f"DIFFERS: {found}")
    return lines


def require_agreement(cells: Sequence[Cell]) -> None:
    """Raise VerificationError unless every figure is as expected."""
    if wrong := [cell.name for cell in cells if not cell.is_expected]:
        raise VerificationError(
            f"{len(wrong)} of {len(cells)} figures are not what the paper's file expects: {', '.join(wrong)}; "
            "torchvision's networks, ptflops or the file changed"
        )


def _count_cells(rows: Sequence[Row]) -> dict[str, Decimal]:
    values: dict[str, Decimal] = {}
    for row in rows:
        name, backbone = row.backbone.name, row.backbone.counts
        values[f"{name}.params"] = Decimal(backbone.params)
        values[f"{name}.gflops"] = Decimal(backbone.paper) / _GIGA
        for head, counts in row.heads.items():
            values[f"{name}.{head}_params.{row.dataset}"] = Decimal(counts.params)
            values[f"{name}.{head}_gflops.{row.dataset}"] = Decimal(counts.paper) / _GIGA
    for (head, count), (smallest, largest, mean) in summarise(rows).items():
        figure = f"percentages.{head}_{'gflops' if count == 'paper' else count}"
        ends = {"min": smallest, "max": largest, "below": largest, "mean": mean}
        values |= {f"{figure}_{name}": Decimal(value) for name, value in ends.items()}
    return values
