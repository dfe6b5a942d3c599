"""The content of a report, before it becomes HTML or Markdown: machines, and a section for each kind of measurement.

A section's tables have a column for what differs between measurements; what is the same in every row is said once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opal_deploy.bench.machine import hardware_facts, machine_key, machine_title, software_facts
from opal_deploy.bench.measurement import Better, Figure, Kind, Measurement
from opal_deploy.bench.report.rows import Field, Row, list_fields, select_columns
from opal_deploy.bench.tables import (
    flatten_facts,
    format_exact,
    format_number,
    format_percent,
    format_ranges,
    format_value,
    humanize,
)

Pairs = tuple[tuple[str, str], ...]

# in the order of the page: (kind, its heading, what a reader must know to read it)
SECTIONS: tuple[tuple[Kind, str, str], ...] = (
    (
        "compare",
        "Comparisons",
        "The subjects took turns, so that what disturbed the machine disturbed them alike. A ratio is the subject's "
        "throughput over the reference's; in brackets its 95 % confidence interval. Where the interval includes 1, no "
        "difference was shown.",
    ),
    (
        "throughput",
        "Throughput",
        "Images a second when the next batch is always ready. Offline, in MLPerf's words, is the best of all batches.",
    ),
    (
        "latency",
        "Latency",
        "The time of one batch from call to answer. Half of all calls were faster than p50, 99 % faster than p99.",
    ),
    (
        "server",
        "Server",
        "Images arrive at random times (Poisson arrivals); each waits for its turn and its batch. The figure is the "
        "largest rate at which the limit of the latency still held.",
    ),
    (
        "pipeline",
        "The pipeline",
        "A folder of images, from files to records, as infer does it. Stages run in parallel, so that their times "
        "add up to more than the run took.",
    ),
    (
        "overhead",
        "What the head adds",
        "Counted, not timed: parameters and operations of the backbone, of a linear head and of the OPAL head.",
    ),
    (
        "roofline",
        "Roofline",
        "The arithmetic of a network for each byte that it moves, and with that the most that a processor could "
        "reach: its arithmetic or its memory sets the limit, whichever is lower.",
    ),
    (
        "ceiling",
        "Measured ceilings",
        "The best that this machine reached in a large copy and in a large product of matrices.",
    ),
)
ARROWS: dict[Better | None, str] = {"higher": " ↑", "lower": " ↓", None: ""}

# with more figures than this, and fewer measurements than that, each figure is a row and each measurement a column
_MANY_FIGURES, _FEW_MEASUREMENTS = 10, 8


@dataclass(frozen=True)
class Cell:
    """A cell: text, a smaller note (interval or spread), the figure's every digit, and whether it states a doubt."""

    text: str
    note: str = ""
    exact: str = ""
    alert: bool = False


@dataclass(frozen=True)
class Column:
    """A column's head; `better` only where the column holds figures that can improve."""

    title: str
    unit: str = ""
    better: Better | None = None
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """Columns, rows, and what holds for every row; `title` where a section has several tables."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    common: Pairs = ()


@dataclass(frozen=True)
class Provenance:
    """How some rows (`1–4, 7`) were measured: command, timed region, and settings, artifacts, machine and time."""

    rows: str
    command: str
    timed: str
    others: Pairs


@dataclass(frozen=True)
class Section:
    """All measurements of one kind.

    Attributes:
        lead: the introduction.
        recorded: conditions, settings and details of each row that has any: (row number, facts).
        replaced: number of earlier measurements of the same things on the same machine, which are not shown.
    """

    kind: Kind
    heading: str
    lead: str
    rows: tuple[Row, ...]
    tables: tuple[Table, ...]
    provenance: tuple[Provenance, ...]
    recorded: tuple[tuple[int, list[tuple[str, str]]], ...]
    replaced: int

    @property
    def can_improve(self) -> bool:
        """Whether any figure has a better direction."""
        return any(figure.better for row in self.rows for figure in row.measurement.figures.values())

    @property
    def doubtful(self) -> int:
        """Number of rows with a mark."""
        return sum(1 for row in self.rows if row.measurement.marks)


@dataclass(frozen=True)
class Machine:
    """One machine with its software; rows name it by its letter."""

    letter: str
    title: str
    facts: Pairs


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    machines: tuple[Machine, ...]
    sections: tuple[Section, ...]

    @property
    def measured(self) -> int:
        """Number of measurements."""
        return sum(len(section.rows) for section in self.sections)

    @property
    def doubtful(self) -> int:
        """Number of measurements with a mark."""
        return sum(section.doubtful for section in self.sections)

    @property
    def period(self) -> str:
        """First and last day of the measurements."""
        moments = (row.measurement.when for section in self.sections for row in section.rows)
        return _format_period(format_value(moment[:10]) for moment in moments if moment)


def build_report(measurements: Iterable[Measurement], title: str = "Benchmarks") -> Report:
    """Sort measurements into a report; of several of the same thing on the same machine the last one counts."""
    every = list(measurements)
    machines = _list_machines(every)
    letters = {key: machine.letter for key, machine in machines.items()}
    sections = []
    for kind, heading, lead in SECTIONS:
        if not (of_kind := [m for m in every if m.kind == kind]):
            continue
        last = {(m.key, machine_key(m.machine)): m for m in of_kind}
        rows = [
            Row(number, m, letters.get(machine_key(m.machine), "–") if len(machines) > 1 else "")
            for number, m in enumerate(last.values(), 1)
        ]
        provenance = tuple(_list_provenance(rows))
        recorded = tuple((row.number, facts) for row in rows if (facts := _list_recorded(row.measurement)))
        replaced = len(of_kind) - len(last)
        tables = _build_tables(rows)
        sections.append(Section(kind, heading, lead, tuple(rows), tables, provenance, recorded, replaced))
    return Report(format_value(title), tuple(machines.values()), tuple(sections))


def format_uncertainty(figure: Figure) -> str:
    """Return the 95 % interval, else the spread of the repeats; empty where there is neither."""
    if figure.interval is not None:
        low, high = (format_number(end, figure.unit) for end in figure.interval)
        return f"[{low}, {high}]"
    return "" if figure.spread is None else f"spread {format_percent(figure.spread)}"


def _list_machines(measurements: Sequence[Measurement]) -> dict[str, Machine]:
    machines: dict[str, Machine] = {}
    for measurement in measurements:
        machine, key = measurement.machine, machine_key(measurement.machine)
        if machine and key not in machines:
            # the versions of all libraries stand in one text, since there are many
            software: dict[str, str] = {}
            for name, text in software_facts(machine).items():
                group, colon, library = name.partition(": ")
                version = f"{library} {text}" if colon else text
                software[group] = f"{software[group]}, {version}" if group in software else version
            facts = (*hardware_facts(machine).items(), *software.items())
            machines[key] = Machine(_letter(len(machines)), machine_title(machine), facts)
    return machines


def _letter(index: int) -> str:
    """Return A, B, ... Z, AA, AB, ..."""
    first, last = divmod(index, 26)
    return (_letter(first - 1) if first else "") + chr(ord("A") + last)


def _build_tables(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Return the tables of measurements of one kind; figures named `part.name` have a table for each part.

    Marks, and what holds for every row, stand in the first table.
    """
    fields = list_fields(rows)
    columns = select_columns(fields)
    common = tuple((f.title, f.texts[0]) for f in fields if not f.differs and not f.is_name and f.texts[0] != "–")
    parts: dict[str, list[str]] = {"": []}
    for name in dict.fromkeys(name for row in rows for name in row.measurement.figures):
        part, dot, _ = name.partition(".")
        parts.setdefault(part if dot else "", []).append(name)
    marked = any(row.measurement.marks for row in rows)
    return tuple(
        _build_table(part, rows, columns, names, () if part else common, marked=marked and not part)
        for part, names in parts.items()
    )


def _build_table(
    part: str, rows: Sequence[Row], fields: Sequence[Field], names: Sequence[str], common: Pairs, *, marked: bool
) -> Table:
    figures = [_figure_column(rows, name, part) for name in names]
    columns = [Column("#", numeric=True), *(Column(f.title, numeric=f.numeric) for f in fields), *figures]
    body = []
    for index, row in enumerate(rows):
        cells = [Cell(str(row.number)), *(Cell(field.texts[index]) for field in fields)]
        for name, column in zip(names, figures, strict=True):
            cells.append(_figure_cell(row.measurement.figures.get(name), column.unit))
        body.append([*cells, _marks_cell(row.measurement)] if marked else cells)
    if marked:
        columns.append(Column("doubts"))
    if len(names) > _MANY_FIGURES and len(rows) <= _FEW_MEASUREMENTS:
        columns, body = _transpose(columns, body)
    return Table(humanize(part), tuple(columns), tuple(map(tuple, body)), common)


def _transpose(columns: Sequence[Column], body: Sequence[Sequence[Cell]]) -> tuple[list[Column], list[list[Cell]]]:
    """Turn a table of many figures and few measurements: a figure a row."""
    heads = [Column(""), *(Column(f"# {cells[0].text}", numeric=True) for cells in body)]
    turned = []
    for index, column in enumerate(columns[1:], 1):
        unit = f" ({column.unit})" if column.unit else ""
        title = f"{column.title}{unit}{ARROWS[column.better]}"
        turned.append([Cell(title), *(cells[index] for cells in body)])
    return heads, turned


def _figure_column(rows: Sequence[Row], name: str, part: str) -> Column:
    figures = [row.measurement.figures[name] for row in rows if name in row.measurement.figures]
    units = {figure.unit for figure in figures}
    directions = {figure.better for figure in figures}
    unit = format_value(units.pop()) if len(units) == 1 else ""
    better = directions.pop() if len(directions) == 1 else None
    title = humanize(name.removeprefix(f"{part}.") if part else name, unit)
    return Column(title, "" if unit == "ratio" else unit, better, numeric=True)


def _figure_cell(figure: Figure | None, unit: str) -> Cell:
    if figure is None:
        return Cell("–")
    text = format_number(figure.value, figure.unit)
    if figure.unit not in (unit, "ratio", ""):
        text = f"{text} {format_value(figure.unit)}"
    exact = f"{format_exact(figure.value)} {format_value(figure.unit)}".strip()
    return Cell(text, format_uncertainty(figure), exact)


def _marks_cell(measurement: Measurement) -> Cell:
    return Cell("; ".join(map(format_value, measurement.marks)), alert=bool(measurement.marks))


def _list_provenance(rows: Sequence[Row]) -> list[Provenance]:
    """Return one entry for all rows that were measured by the same command in the same way."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.measurement.command, row.measurement.timed, row.machine), []).append(row)
    entries = []
    for (command, timed, machine), group in groups.items():
        first, *rest = [flatten_facts(row.measurement.settings) for row in group]
        others = [pair for pair in first if all(pair in facts for facts in rest)]
        subjects = [row.measurement.target for row in group]
        digests = {(subject.name, subject.sha256) for subject in subjects if subject and subject.sha256}
        others += [(f"sha256 of {format_value(name)}", format_value(digest)) for name, digest in sorted(digests)]
        if machine:
            others.append(("machine", machine))
        if period := _format_period(format_value(row.measurement.when) for row in group if row.measurement.when):
            others.append(("measured", period))
        numbers = format_ranges(row.number for row in group)
        entries.append(Provenance(numbers, format_value(command), format_value(timed), tuple(others)))
    return entries


def _list_recorded(measurement: Measurement) -> list[tuple[str, str]]:
    return [fact for facts in (measurement.conditions, measurement.settings, measurement.details)
            for fact in flatten_facts(facts)]  # fmt: skip


def _format_period(moments: Iterable[str]) -> str:
    ordered = sorted(set(moments))
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1]))) if ordered else ""
