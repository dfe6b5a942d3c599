"""The paper's tables as data: rows, columns and the printed numbers (`paper.toml`)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from opal_deploy.errors import UsageError
from opal_deploy.train.recipe import Sections

MetricName = Literal["accuracy", "collapse", "consistency", "stability"]


@dataclass(frozen=True)
class DatasetSize:
    """Numbers of classes and images of a data set's official splits; `val` 0 is set aside from the training images."""

    title: str
    classes: int
    train: int
    val: int
    test: int


@dataclass(frozen=True)
class Column:
    """A metric on a data set."""

    dataset: str
    metric: MetricName


@dataclass(frozen=True)
class PaperNumber:
    """A number of the paper, in per cent; `std` is None where the paper gives none."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class PaperRow:
    """A row of a table.

    Attributes:
        name: our name, close to the paper's.
        run: overrides of a recipe that train this row; None for methods that this package does not train.
        paper: one number per column of the table.
    """

    name: str
    run: Sections | None
    paper: tuple[PaperNumber, ...]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Attributes:
        name: the name on the command line.
        title: a title with the place in the paper.
        label: the label in the paper's source.
        spread: what its standard deviations are over: `seeds`, or the `images` of the test split.
        columns, rows: see Column and Row.
    """

    name: str
    title: str
    label: str
    spread: Literal["seeds", "images"]
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]

    def paper_number(self, row: PaperRow, column: Column) -> PaperNumber | None:
        """Return the paper's number; None for a column of another data set."""
        return row.paper[self.columns.index(column)] if column in self.columns else None


@cache
def _load_toml() -> dict[str, Any]:
    text = (resources.files("opal_deploy.train") / "reproduce" / "paper.toml").read_text("utf-8")
    return tomllib.loads(text)


def dataset_sizes() -> dict[str, DatasetSize]:
    """Return the official sizes by data set name."""
    return {name: DatasetSize(**values) for name, values in _load_toml()["datasets"].items()}


def table_names() -> list[str]:
    """Return the names of the tables, in the paper's order."""
    return [table["name"] for table in _load_toml()["table"]]


def load_table(name: str) -> PaperTable:
    """Return a table by name.

    Raises:
        UsageError: no such table.
    """
    for raw in _load_toml()["table"]:
        if raw["name"] == name:
            rows = tuple(
                PaperRow(row["name"], row.get("run"), tuple(PaperNumber(*numbers) for numbers in row["paper"]))
                for row in raw["row"]
            )
            columns = tuple(Column(**column) for column in raw["columns"])
            return PaperTable(name, raw["title"], raw["label"], raw["spread"], columns, rows)
    raise UsageError(f"table {name!r}: expected one of {', '.join(table_names())}")
