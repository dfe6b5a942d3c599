"""Compare what was counted with what the paper prints, at the digits that it prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from opal_deploy.bench.overhead.layout import fixed
from opal_deploy.bench.overhead.paper import PaperTable
from opal_deploy.bench.overhead.table import Table, summarise
from opal_deploy.errors import VerificationError

_UNITS = {"k": 1_000, "M": 1_000_000}
_GIGA = 10**9


@dataclass(frozen=True)
class Cell:
    """One figure of the paper.

    Attributes:
        name: see `PaperTable.cells`.
        printed: by the paper. counted: here, at the same digits.
        disputed: why the paper is taken to be wrong; empty for all others.
    """

    name: str
    printed: str
    counted: str
    agrees: bool
    disputed: str = ""

    @property
    def is_expected(self) -> bool:
        """It agrees, or is known not to."""
        return self.agrees != bool(self.disputed)


def check(table: Table, paper: PaperTable) -> list[Cell]:
    """Every cell of the paper's table and text.

    Args:
        table: of the paper's backbones, data sets, head and size.
        paper: see `paper.load`.
    """
    values = _counted(table)
    cells = []
    for name, printed in paper.cells().items():
        is_bound = name.endswith("_below")
        counted = at_digits(values[name], f"{printed}0" if is_bound else printed)
        agrees = values[name] < Decimal(printed) if is_bound else counted == printed
        cells.append(Cell(name, printed, counted, agrees, paper.disputed.get(name, "")))
    return cells


def at_digits(value: Decimal, printed: str) -> str:
    """A value with the unit and the digits of a printed figure: 409800 like `401.6k` is `409.8k`."""
    unit = printed[-1] if printed[-1] in _UNITS else ""
    digits = len(printed.removesuffix(unit).partition(".")[2])
    return fixed(value, _UNITS.get(unit, 1), digits) + unit


def report(cells: list[Cell]) -> list[str]:
    """Lines for a person: how many agree, each disputed cell with our count, and each other difference."""
    lines = [f"{sum(cell.agrees for cell in cells)} of {len(cells)} figures of the paper agree at the digits it prints"]
    for cell in cells:
        if cell.disputed and not cell.agrees:
            lines.append(
                f"known discrepancy of the paper: {cell.name}: printed {cell.printed}, counted {cell.counted} "
                f"({cell.disputed})"
            )
    for cell in cells:
        if cell.disputed and cell.agrees:
            lines.append(f"NO LONGER A DISCREPANCY: {cell.name}: printed and counted {cell.printed}")
        elif not cell.is_expected:
            lines.append(f"DIFFERS: {cell.name}: printed {cell.printed}, counted {cell.counted}")
    return lines


def require_agreement(cells: list[Cell]) -> None:
    """Raise VerificationError unless every figure agrees or is known not to."""
    if wrong := [cell.name for cell in cells if not cell.is_expected]:
        raise VerificationError(
            f"{len(wrong)} of {len(cells)} figures are not what the paper's file expects: {', '.join(wrong)}; "
            "torchvision's networks, ptflops or the file changed"
        )


def _counted(table: Table) -> Mapping[str, Decimal]:
    values: dict[str, Decimal] = {}
    for row in table.rows:
        name, counts = row.backbone.name, row.backbone.counts
        values[f"{name}.params"] = Decimal(counts.params)
        values[f"{name}.gflops"] = Decimal(counts.paper) / _GIGA
        for head, found in (("linear", row.linear), ("opal", row.opal)):
            values[f"{name}.{head}_params.{row.dataset}"] = Decimal(found.params)
            values[f"{name}.{head}_gflops.{row.dataset}"] = Decimal(found.paper) / _GIGA
    for name, share in summarise(table.rows).items():
        figure = name.replace("_paper", "_gflops")
        values[f"percentages.{figure}_min"] = Decimal(share.smallest)
        values[f"percentages.{figure}_max"] = Decimal(share.largest)
        values[f"percentages.{figure}_below"] = Decimal(share.largest)
        values[f"percentages.{figure}_mean"] = Decimal(share.mean)
    return values
