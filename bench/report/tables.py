"""Measurements of one kind as a table: what differs makes columns, what is the same in every row is said once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opal_deploy.bench.measurement import Better, Figure, Measurement, Target
from opal_deploy.bench.tables import format_exact, format_number, format_percent, format_value, humanize

# with more figures than this, and fewer measurements than that, each figure is a row and each measurement a column
_MANY_FIGURES, _FEW_MEASUREMENTS = 10, 8


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: what is read first. note: beside it, smaller: the interval, or the spread of the repeats.
        exact: every digit. alert: it is a doubt about the row.
    """

    text: str
    note: str = ""
    exact: str = ""
    alert: bool = False


@dataclass(frozen=True)
class Column:
    """A column's head; `better` only where it holds figures that can improve."""

    title: str
    unit: str = ""
    better: Better | None = None
    numeric: bool = False


@dataclass(frozen=True)
class Table:
    """Columns, rows, and what holds for every row; `title` where a section has several."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    common: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Row:
    """One measurement as a report numbers it, with the letter of its machine."""

    number: int
    measurement: Measurement
    machine: str = ""


@dataclass(frozen=True)
class _Field:
    """Something that tells rows apart. `shown_if_redundant`: although other columns tell the same rows apart."""

    title: str
    texts: tuple[str, ...]
    numeric: bool = False
    shown_if_redundant: bool = True
    always: bool = field(default=False)

    @property
    def differs(self) -> bool:
        return len(set(self.texts)) > 1


def tables_of(rows: Sequence[Row], several_machines: bool = False) -> tuple[Table, ...]:
    """The tables of measurements of one kind; at least one measurement.

    Figures named `part.name` have a table of their own for each part; what is marked, and what holds for every row,
    stands in the first one.
    """
    fields = fields_of(rows, several_machines)
    columns = distinguishing(fields)
    common = tuple((f.title, f.texts[0]) for f in fields if not f.differs and not f.always and f.texts[0] != "–")
    parts: dict[str, list[str]] = {"": []}
    for name in dict.fromkeys(name for row in rows for name in row.measurement.figures):
        part, dot, _ = name.partition(".")
        parts.setdefault(part if dot else "", []).append(name)
    first = _table("", rows, columns, parts.pop(""), common, any(row.measurement.marks for row in rows))
    return (first, *(_table(part, rows, columns, names) for part, names in parts.items()))


def _table(
    part: str,
    rows: Sequence[Row],
    columns: Sequence[_Field],
    names: Sequence[str],
    common: tuple[tuple[str, str], ...] = (),
    marked: bool = False,
) -> Table:
    title = humanize(part)
    if len(names) > _MANY_FIGURES and len(rows) <= _FEW_MEASUREMENTS:
        return _figures_down(title, rows, columns, names, common, marked)
    heads = [Column("#", numeric=True), *(Column(f.title, numeric=f.numeric) for f in columns)]
    figures = [_figure_column(rows, name, part) for name in names]
    body = []
    for place, row in enumerate(rows):
        cells = [Cell(str(row.number)), *(Cell(f.texts[place]) for f in columns)]
        for name, head in zip(names, figures, strict=True):
            cells.append(_figure_cell(row.measurement.figures.get(name), head.unit))
        body.append((*cells, _marks(row.measurement)) if marked else tuple(cells))
    return Table(title, (*heads, *figures, *((Column("doubts"),) if marked else ())), tuple(body), common)


def _figures_down(
    part: str,
    rows: Sequence[Row],
    columns: Sequence[_Field],
    names: Sequence[str],
    common: tuple[tuple[str, str], ...],
    marked: bool,
) -> Table:
    """Many figures of few measurements: a figure a row."""
    heads = [Column("", numeric=False), *(Column(f"# {row.number}", numeric=True) for row in rows)]
    body = [(Cell(f.title), *(Cell(text) for text in f.texts)) for f in columns]
    for name in names:
        head = _figure_column(rows, name, part)
        title = f"{head.title} ({head.unit})" if head.unit else head.title
        title += {"higher": " ↑", "lower": " ↓", None: ""}[head.better]
        body.append((Cell(title), *(_figure_cell(row.measurement.figures.get(name), head.unit) for row in rows)))
    if marked:
        body.append((Cell("doubts"), *(_marks(row.measurement) for row in rows)))
    return Table(part, tuple(heads), tuple(body), common)


def fields_of(rows: Sequence[Row], several_machines: bool = False) -> list[_Field]:
    """Everything of subject and case that rows can differ in, in the order a person would read it."""

    def of(get: Callable[[Target], object]) -> tuple[str, ...]:
        return tuple(format_value(get(s) or None) if (s := row.measurement.target) else "–" for row in rows)

    def size(subject: Target) -> str | None:
        return None if subject.input_size is None else "x".join(map(str, subject.input_size))

    out = [_Field("name", of(lambda s: s.name), always=True)]
    if all(row.measurement.target is None for row in rows):
        out = []
    out += [
        _Field("runtime", of(lambda s: f"{s.runtime} {s.runtime_version}".strip())),
        _Field("device", of(lambda s: s.device)),
        _Field("precision", of(lambda s: s.precision)),
        _Field("backbone", of(lambda s: s.backbone), shown_if_redundant=False),
        _Field("head", of(lambda s: s.head), shown_if_redundant=False),
        _Field("layout", of(lambda s: s.layout), shown_if_redundant=False),
        _Field("input", of(size), shown_if_redundant=False),
        _Field("classes", of(lambda s: s.num_classes), numeric=True, shown_if_redundant=False),
        _Field("prototypes per class", of(lambda s: s.prototypes_per_class), numeric=True, shown_if_redundant=False),
    ]
    for name in dict.fromkeys(key for row in rows for key in row.measurement.case):
        values = [row.measurement.case.get(name) for row in rows]
        numeric = all(value is None or isinstance(value, int | float) for value in values)
        out.append(_Field(humanize(name), tuple(map(format_value, values)), numeric))
    if several_machines:
        out.append(_Field("machine", tuple(row.machine for row in rows)))
    return out


def distinguishing(fields: Sequence[_Field]) -> list[_Field]:
    """Those fields that make columns: what differs, unless it tells no rows apart that others do not tell apart."""
    kept = [f for f in fields if f.always or (f.differs and f.shown_if_redundant)]
    told = len(set(zip(*(f.texts for f in kept), strict=True)))
    for candidate in fields:
        if candidate in kept or not candidate.differs:
            continue
        with_it = len(set(zip(*(f.texts for f in [*kept, candidate]), strict=True)))
        if with_it > told:
            kept, told = [*kept, candidate], with_it
    return [f for f in fields if f in kept]


def labels(rows: Sequence[Row], without: Sequence[str] = (), *, named: bool = False) -> list[str]:
    """The shortest name of each row that tells it from those that differ in anything but the case's `without`.

    Args:
        named: the subject's name is always part of it, though all may share it.
    """
    hidden = {humanize(name) for name in without}
    fields = [f for f in fields_of(rows, len({row.machine for row in rows}) > 1) if f.title not in hidden]
    kept: list[_Field] = [f for f in fields if f.title == "name"]
    told = len(set(zip(*(f.texts for f in kept), strict=True)))
    for candidate in fields:
        with_it = len(set(zip(*(f.texts for f in [*kept, candidate]), strict=True)))
        if candidate not in kept and with_it > told:
            kept, told = [*kept, candidate], with_it
    # a name that all share says nothing where something else tells them apart
    if not named and len(kept) > 1 and not kept[0].differs:
        kept = kept[1:]
    return [", ".join(_label(f, place) for f in kept if f.texts[place] != "–") for place in range(len(rows))]


def _label(field_: _Field, place: int) -> str:
    text = field_.texts[place]
    plain = field_.title in ("name", "runtime", "device", "precision", "backbone", "head", "input", "layout")
    return text if plain else f"{field_.title} {text}"


def _figure_column(rows: Sequence[Row], name: str, part: str) -> Column:
    figures = [row.measurement.figures[name] for row in rows if name in row.measurement.figures]
    units = {figure.unit for figure in figures}
    directions = {figure.better for figure in figures}
    unit = format_value(units.pop()) if len(units) == 1 else ""
    better = directions.pop() if len(directions) == 1 else None
    title = humanize(name.removeprefix(f"{part}.") if part else name, unit)
    return Column(title, "" if unit in ("ratio", "") else unit, better, numeric=True)


def _figure_cell(figure: Figure | None, unit: str) -> Cell:
    if figure is None:
        return Cell("–")
    text = format_number(figure.value, figure.unit)
    if figure.unit not in (unit, "ratio", ""):
        text = f"{text} {format_value(figure.unit)}"
    return Cell(text, precision_note(figure), f"{format_exact(figure.value)} {format_value(figure.unit)}".strip())


def precision_note(figure: Figure) -> str:
    """The 95 % interval, else the spread of the repeats; empty where there is neither."""
    if figure.interval is not None:
        low, high = (format_number(end, figure.unit) for end in figure.interval)
        return f"[{low}, {high}]"
    return "" if figure.spread is None else f"spread {format_percent(figure.spread)}"


def _marks(measurement: Measurement) -> Cell:
    return Cell("; ".join(map(format_value, measurement.marks)), alert=bool(measurement.marks))
