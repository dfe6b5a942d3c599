"""The paper's tables as data: rows, columns and the printed numbers (`paper.toml`)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
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
        baseline: the row that the paper compares this one with; None for the baseline itself, and where it does not.
    """

    name: str
    run: Sections | None
    paper: tuple[PaperNumber, ...]
    baseline: PaperRow | None = None


@dataclass(frozen=True)
class PaperAverage:
    """A mean difference that the paper's text prints, over pairs of rows and all columns.

    Attributes:
        name: what is compared with what.
        pairs: rows, each with the row that it is compared with.
    """

    name: str
    pairs: tuple[tuple[PaperRow, PaperRow], ...]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Attributes:
        name: the name on the command line.
        title: a title with the place in the paper.
        label: the label in the paper's source.
        spread: what its standard deviations are over: `seeds`, or the `images` of the test split.
        columns, rows: see Column and PaperRow.
        averages: see PaperAverage.
    """

    name: str
    title: str
    label: str
    spread: Literal["seeds", "images"]
    columns: tuple[Column, ...]
    rows: tuple[PaperRow, ...]
    averages: tuple[PaperAverage, ...] = ()

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
            columns = tuple(Column(**column) for column in raw["columns"])
            rows = _load_rows(raw)
            averages = tuple(_load_average(average, rows) for average in raw.get("average", ()))
            return PaperTable(name, raw["title"], raw["label"], raw["spread"], columns, tuple(rows.values()), averages)
    raise UsageError(f"table {name!r}: expected one of {', '.join(table_names())}")


def _load_rows(table: dict[str, Any]) -> dict[str, PaperRow]:
    """Return a table's rows by name."""
    rows = {
        row["name"]: PaperRow(row["name"], row.get("run"), tuple(PaperNumber(*numbers) for numbers in row["paper"]))
        for row in table["row"]
    }
    baselines = {row["name"]: row.get("baseline", table.get("baseline")) for row in table["row"]}
    return {
        name: row if baselines[name] in (None, name) else replace(row, baseline=rows[baselines[name]])
        for name, row in rows.items()
    }


def _load_average(average: dict[str, Any], rows: dict[str, PaperRow]) -> PaperAverage:
    chosen = [rows[name] for name in average["rows"]]
    against: list[PaperRow | None] = [rows[name] for name in average.get("against", ())]
    against = against or [row.baseline for row in chosen]
    pairs = [(row, other) for row, other in zip(chosen, against, strict=True) if other is not None]
    return PaperAverage(average["name"], tuple(pairs))
