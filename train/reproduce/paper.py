"""The paper's tables as data: rows, columns and the figures that stand there (`paper.toml`)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from opal_deploy.errors import UsageError
from opal_deploy.train.recipe import Sections

FigureName = Literal["accuracy", "collapse", "consistency", "stability"]


@dataclass(frozen=True)
class DatasetSize:
    """A data set's official splits: pictures to train on, validate (0: a fifth of those to train on) and test."""

    title: str
    classes: int
    train: int
    val: int
    test: int


@dataclass(frozen=True)
class Column:
    """A figure of a data set."""

    dataset: str
    figure: FigureName


@dataclass(frozen=True)
class PaperFigure:
    """What stands in the paper, in per cent; `std` is None where it gives none."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        name: ours, near the paper's.
        run: what a recipe is overridden with to train it; None for methods that this package does not train.
        paper: one entry a column of the table.
    """

    name: str
    run: Sections | None
    paper: tuple[PaperFigure, ...]


@dataclass(frozen=True)
class Table:
    """One of the paper's.

    Attributes:
        name: how it is asked for.
        title: what it is, and where.
        label: in the paper's source.
        spread: over what its standard deviations are: `seeds`, or the `pictures` of the test split.
        columns, rows: see Column and Row.
    """

    name: str
    title: str
    label: str
    spread: Literal["seeds", "pictures"]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def printed(self, row: Row, column: Column) -> PaperFigure | None:
        """The paper's figure; None for a column of another data set."""
        return row.paper[self.columns.index(column)] if column in self.columns else None


@cache
def _load_toml() -> dict[str, Any]:
    text = (resources.files("opal_deploy.train") / "reproduce" / "paper.toml").read_text("utf-8")
    return tomllib.loads(text)


def dataset_sizes() -> dict[str, DatasetSize]:
    """By the catalogue's name."""
    return {name: DatasetSize(**values) for name, values in _load_toml()["datasets"].items()}


def table_names() -> list[str]:
    """Of the tables, in the paper's order."""
    return [load_table["name"] for load_table in _load_toml()["table"]]


def load_table(name: str) -> Table:
    """One table.

    Raises:
        UsageError: no such table.
    """
    for raw in _load_toml()["table"]:
        if raw["name"] == name:
            rows = tuple(
                Row(row["name"], row.get("run"), tuple(PaperFigure(*figures) for figures in row["paper"]))
                for row in raw["row"]
            )
            columns = tuple(Column(**column) for column in raw["columns"])
            return Table(name, raw["title"], raw["label"], raw["spread"], columns, rows)
    raise UsageError(f"table {name!r}: expected one of {', '.join(table_names())}")
