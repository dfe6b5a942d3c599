"""The paper's table of computational overhead, read from paper.toml, and the comparison with it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files

from opal_deploy.bench.overhead.table import Row, summarise
from opal_deploy.bench.report import format_fixed
from opal_deploy.errors import VerificationError

_UNITS = {"k": 1_000, "M": 1_000_000}
_GIGA = 10**9


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
        """Whether the figure agrees, or is disputed and does not."""
        return self.agrees != bool(self.disputed)


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
    titled = {**raw["backbones"], **raw["datasets"]}
    return PaperTable(
        input_size=(height, width),
        prototypes_per_class=raw["prototypes_per_class"],
        datasets={name: entry["classes"] for name, entry in raw["datasets"].items()},
        backbones=tuple(raw["backbones"]),
        titles={name: entry["title"] for name, entry in titled.items()},
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


def format_like(value: Decimal, printed: str) -> str:
    """Return a value with the unit and the digits of a printed figure: 409800 like `401.6k` is `409.8k`."""
    unit = printed[-1] if printed[-1] in _UNITS else ""
    digits = len(printed.removesuffix(unit).partition(".")[2])
    return format_fixed(value, _UNITS.get(unit, 1), digits) + unit


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


def _count_cells(rows: Sequence[Row]) -> Mapping[str, Decimal]:
    values: dict[str, Decimal] = {}
    for row in rows:
        name, backbone = row.backbone.name, row.backbone.counts
        values[f"{name}.params"] = Decimal(backbone.params)
        values[f"{name}.gflops"] = Decimal(backbone.paper) / _GIGA
        for head, counts in row.heads.items():
            values[f"{name}.{head}_params.{row.dataset}"] = Decimal(counts.params)
            values[f"{name}.{head}_gflops.{row.dataset}"] = Decimal(counts.paper) / _GIGA
    for name, percentages in summarise(rows).items():
        figure = f"percentages.{name.replace('_paper', '_gflops')}"
        values[f"{figure}_min"] = Decimal(percentages.smallest)
        values[f"{figure}_max"] = Decimal(percentages.largest)
        values[f"{figure}_below"] = Decimal(percentages.largest)
        values[f"{figure}_mean"] = Decimal(percentages.mean)
    return values
