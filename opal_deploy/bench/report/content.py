"""The content of a report: machines, and for each kind of measurement a section of tables.

A table has a column for what differs between measurements; what is the same in every row is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opal_deploy.bench.machine import hardware_facts, machine_key, machine_title, software_facts
from opal_deploy.bench.measurement import Better, Figure, Kind, Measurement, Target
from opal_deploy.bench.tables import (
    flatten_facts,
    format_exact,
    format_number,
    format_percent,
    format_ranges,
    format_value,
    humanize,
)

Pairs = Sequence[tuple[str, str]]

# in the order of the report: heading, and what a reader must know
# fmt: off
SECTIONS: dict[Kind, tuple[str, str]] = {
    "compare": ("Comparisons",
        "The subjects took turns, so that what disturbed the machine disturbed them alike. A ratio is the subject's "
        "throughput over the reference's; in brackets its 95 % confidence interval. Where the interval includes 1, no "
        "difference was shown."),
    "throughput": ("Throughput",
        "Images a second when the next batch is always ready. Offline, in MLPerf's words, is the best of all batches."),
    "latency": ("Latency",
        "The time of one batch from call to answer. Half of all calls were faster than p50, 99 % faster than p99."),
    "server": ("Server",
        "Images arrive at random times (Poisson arrivals); each waits for its turn and its batch. The figure is the "
        "largest rate at which the limit of the latency still held."),
    "pipeline": ("The pipeline",
        "A folder of images, from files to records, as infer does it. Stages run in parallel, so that their times "
        "add up to more than the run took."),
    "overhead": ("What the head adds",
        "Counted, not timed: parameters and operations of the backbone, of a linear head and of the OPAL head."),
    "roofline": ("Roofline",
        "The arithmetic of a network for each byte that it moves, and with that the most that a processor could "
        "reach: its arithmetic or its memory sets the limit, whichever is lower."),
    "ceiling": ("Measured ceilings",
        "The best that this machine reached in a large copy and in a large product of matrices."),
}
# fmt: on

# in the order a person would read them; after the precision, those that make a column only if nothing else tells rows
# apart, and that need their title in a label unless they are self-explaining
_TARGET_FIELDS: dict[str, Callable[[Target], Any]] = {
    "name": lambda target: target.name,
    "runtime": lambda target: f"{target.runtime} {target.runtime_version}".strip(),
    "device": lambda target: target.device,
    "precision": lambda target: target.precision,
    "backbone": lambda target: target.backbone,
    "head": lambda target: target.head,
    "layout": lambda target: target.layout,
    "options": lambda target: target.options,
    "input": lambda target: "x".join(map(str, target.input_size or ())),
    "classes": lambda target: target.num_classes,
    "prototypes per class": lambda target: target.prototypes_per_class,
}
_MAIN = ("name", "runtime", "device", "precision")
_SELF_EXPLAINING = (*_MAIN, "backbone", "head", "layout", "options", "input")
_ARROWS: dict[Better | None, str] = {"higher": " ↑", "lower": " ↓", None: ""}
# with more figures than this, and fewer measurements than that, each figure is a row and each measurement a column
_MANY_FIGURES, _FEW_MEASUREMENTS = 10, 8


@dataclass(frozen=True)
class Field:
    """Something of target or case that measurements can differ in; `is_main` makes a column wherever they do."""

    title: str
    texts: tuple[str, ...]
    numeric: bool
    is_main: bool

    @property
    def differs(self) -> bool:
        """Whether any two measurements differ in it."""
        return len(set(self.texts)) > 1


@dataclass(frozen=True)
class TableCell:
    """A cell: text, a smaller note (interval or spread), the figure's every digit, and whether it states a doubt."""

    text: str
    note: str = ""
    exact: str = ""
    alert: bool = False


@dataclass(frozen=True)
class Table:
    """Columns (title, whether they hold numbers) and rows; `common` is what holds for every row of all tables."""

    title: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[TableCell]]
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
        notes: sentences under the tables.
        recorded: conditions, settings and details of each measurement that has any: (row number, facts).
    """

    kind: Kind
    heading: str
    lead: str
    measurements: Sequence[Measurement]
    tables: Sequence[Table]
    notes: Sequence[str]
    provenance: Sequence[Provenance]
    recorded: Sequence[tuple[int, Pairs]]


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        machines: (letter, title, facts); rows name the letter if there are several.
        measured, doubtful: number of measurements, and of those with a mark.
        period: first and last day.
    """

    title: str
    machines: Sequence[tuple[str, str, Pairs]]
    sections: Sequence[Section]
    measured: int
    doubtful: int
    period: str


def build_report(measurements: Iterable[Measurement], title: str = "Benchmarks") -> Report:
    """Sort measurements into a report; of several of the same thing on the same machine the last one counts."""
    every = list(measurements)
    machines = {machine_key(m.machine): m.machine for m in every if m.machine}
    letters = {key: _letter(index) for index, key in enumerate(machines)}
    last = {(m.key, key): m for m, key in ((m, machine_key(m.machine)) for m in every)}
    if len(machines) > 1:
        # the machine is one more thing that tells measurements apart
        last = {keys: replace(m, case={**m.case, "machine": letters.get(keys[1])}) for keys, m in last.items()}
    sections = []
    for kind, (heading, lead) in SECTIONS.items():
        if not (rows := [m for m in last.values() if m.kind == kind]):
            continue
        notes = []
        if any(figure.better for m in rows for figure in m.figures.values()):
            notes.append(
                "↑ higher is better, ↓ lower is better. Spread: largest less smallest repeat, over the median."
            )
        if replaced := sum(m.kind == kind for m in every) - len(rows):
            notes.append(f"Earlier measurements of the same things on the same machine, replaced by these: {replaced}.")
        recorded = []
        for number, m in enumerate(rows, 1):
            if facts := [*flatten_facts(m.conditions), *flatten_facts(m.settings), *flatten_facts(m.details)]:
                recorded.append((number, facts))
        tables, provenance = list(_build_tables(rows)), list(_list_provenance(rows))
        sections.append(Section(kind, heading, lead, rows, tables, notes, provenance, recorded))
    described = [(letters[key], machine_title(machine), _list_facts(machine)) for key, machine in machines.items()]
    doubtful, period = sum(bool(m.marks) for m in last.values()), _format_period(m.when[:10] for m in last.values())
    return Report(format_value(title), described, sections, len(last), doubtful, period)


def label_measurements(
    measurements: Sequence[Measurement], without: Sequence[str] = (), *, named: bool = False
) -> list[str]:
    """Return for each measurement the shortest label that tells it from the others.

    Args:
        measurements: all of one kind.
        without: keys of the case that measurements with the same label may differ in.
        named: keep the target's name in the label though all may share it.
    """
    hidden = {humanize(name) for name in without}
    fields = [field for field in _list_fields(measurements) if field.title not in hidden]
    kept = _add_distinguishing([field for field in fields if field.title == "name"], fields)
    # a name that all share says nothing where something else tells them apart
    if not named and len(kept) > 1 and not kept[0].differs:
        kept = kept[1:]
    return [
        ", ".join(
            field.texts[index] if field.title in _SELF_EXPLAINING else f"{field.title} {field.texts[index]}"
            for field in kept
            if field.texts[index] != "–"
        )
        for index in range(len(measurements))
    ]


def _list_fields(measurements: Sequence[Measurement]) -> list[Field]:
    columns: dict[str, list[Any]] = {}
    if any(m.target for m in measurements):
        for title, get in _TARGET_FIELDS.items():
            columns[title] = [get(m.target) or None if m.target else None for m in measurements]
    fields = [(title, values, title in _MAIN) for title, values in columns.items()]
    for name in dict.fromkeys(key for m in measurements for key in m.case):
        fields.append((humanize(name), [m.case.get(name) for m in measurements], True))
    return [
        Field(title, tuple(map(format_value, values)), all(isinstance(v, int | float | None) for v in values), is_main)
        for title, values, is_main in fields
    ]


def _add_distinguishing(kept: list[Field], candidates: Iterable[Field]) -> list[Field]:
    """Add each candidate that tells apart measurements which the fields before it do not."""

    def count_distinct(fields: Sequence[Field]) -> int:
        return len(set(zip(*(field.texts for field in fields), strict=True)))

    for candidate in candidates:
        if count_distinct([*kept, candidate]) > count_distinct(kept):
            kept = [*kept, candidate]
    return kept


def _build_tables(rows: Sequence[Measurement]) -> Iterator[Table]:
    """Yield the tables of measurements of one kind; figures named `part.name` have a table for each part.

    Marks, and what holds for every row, stand in the first table.
    """
    fields = _list_fields(rows)
    shown = [field for field in fields if field.title == "name" or (field.differs and field.is_main)]
    shown = _add_distinguishing(shown, [field for field in fields if field.differs])
    shown = [field for field in fields if field in shown]
    parts: dict[str, list[str]] = {"": []}
    for name in dict.fromkeys(name for m in rows for name in m.figures):
        part, dot, _ = name.partition(".")
        parts.setdefault(part if dot else "", []).append(name)
    for part, names in parts.items():
        columns = [("#", True), *((field.title, field.numeric) for field in shown)]
        body = [[TableCell(str(i + 1)), *(TableCell(field.texts[i]) for field in shown)] for i in range(len(rows))]
        for name in names:
            title, cells = _build_figure_column(name.removeprefix(f"{part}."), [m.figures.get(name) for m in rows])
            columns.append((title, True))
            body = [[*row, cell] for row, cell in zip(body, cells, strict=True)]
        if not part and any(m.marks for m in rows):
            columns.append(("doubts", False))
            for row, m in zip(body, rows, strict=True):
                row.append(TableCell("; ".join(map(format_value, m.marks)), alert=bool(m.marks)))
        if len(names) > _MANY_FIGURES and len(rows) <= _FEW_MEASUREMENTS:
            titles = [TableCell(title) for title, _ in columns]
            columns = [("", False), *((f"# {row[0].text}", True) for row in body)]
            body = [list(cells) for cells in zip(titles, *body, strict=True)][1:]
        common = [(f.title, f.texts[0]) for f in fields if not f.differs and f.title != "name" and f.texts[0] != "–"]
        yield Table(humanize(part), columns, body, () if part else common)


def _build_figure_column(name: str, figures: Sequence[Figure | None]) -> tuple[str, list[TableCell]]:
    """Return a column's title with unit and arrow, and its cells; figures in several units have theirs in the cell."""
    units = {figure.unit for figure in figures if figure}
    directions = {figure.better for figure in figures if figure}
    unit = units.pop() if len(units) == 1 else ""
    title = humanize(name, format_value(unit)) + (f" ({format_value(unit)})" if unit not in ("", "ratio") else "")
    cells = []
    for figure in figures:
        if figure is None:
            cells.append(TableCell("–"))
            continue
        text, exact = format_number(figure.value, figure.unit), format_exact(figure.value)
        own_unit = f" {format_value(figure.unit)}" if figure.unit else ""
        shown = own_unit if figure.unit not in (unit, "ratio") else ""
        cells.append(TableCell(f"{text}{shown}", _format_uncertainty(figure), f"{exact}{own_unit}"))
    return title + (_ARROWS[directions.pop()] if len(directions) == 1 else ""), cells


def _format_uncertainty(figure: Figure) -> str:
    """Return the 95 % interval, else the spread of the repeats; empty where there is neither."""
    if figure.interval is not None:
        low, high = (format_number(end, figure.unit) for end in figure.interval)
        return f"[{low}, {high}]"
    return "" if figure.spread is None else f"spread {format_percent(figure.spread)}"


def _list_provenance(rows: Sequence[Measurement]) -> Iterator[Provenance]:
    """Yield one entry for all rows that were measured by the same command in the same way."""
    groups: dict[tuple[str, str, Any], dict[int, Measurement]] = {}
    for number, m in enumerate(rows, 1):
        groups.setdefault((m.command, m.timed, m.case.get("machine")), {})[number] = m
    for (command, timed, machine), group in groups.items():
        first, *rest = [flatten_facts(m.settings) for m in group.values()]
        others = [pair for pair in first if all(pair in facts for facts in rest)]
        digests = {(m.target.name, m.target.sha256) for m in group.values() if m.target and m.target.sha256}
        others += [(f"sha256 of {format_value(name)}", format_value(digest)) for name, digest in sorted(digests)]
        if machine:
            others.append(("machine", format_value(machine)))
        if period := _format_period(m.when for m in group.values()):
            others.append(("measured", period))
        yield Provenance(format_ranges(group), format_value(command), format_value(timed), others)


def _list_facts(machine: dict[str, Any]) -> Pairs:
    """Return hardware and software; the versions of all libraries stand in one text, since there are many."""
    software: dict[str, str] = {}
    for name, text in software_facts(machine).items():
        group, colon, library = name.partition(": ")
        version = f"{library} {text}" if colon else text
        software[group] = f"{software[group]}, {version}" if group in software else version
    return [*hardware_facts(machine).items(), *software.items()]


def _letter(index: int) -> str:
    """Return A, B, ... Z, AA, AB, ..."""
    first, last = divmod(index, 26)
    return (_letter(first - 1) if first else "") + chr(ord("A") + last)


def _format_period(moments: Iterable[str]) -> str:
    ordered = sorted({format_value(moment) for moment in moments if moment})
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1]))) if ordered else ""
