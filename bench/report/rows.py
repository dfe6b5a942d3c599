"""Measurements as a report numbers and names them: the fields that distinguish rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opal_deploy.bench.measurement import Figure, Measurement, Target
from opal_deploy.bench.tables import format_value, humanize

# fields whose value needs no title before it in a label
_SELF_EXPLAINING = ("name", "runtime", "device", "precision", "backbone", "head", "input", "layout")


@dataclass(frozen=True)
class Row:
    """One measurement with its number in the report; `machine` is the machine's letter where there are several."""

    number: int
    measurement: Measurement
    machine: str = ""


@dataclass(frozen=True)
class Field:
    """Something of subject or case that rows can differ in.

    Attributes:
        title: the column's.
        texts: one for each row.
        numeric: whether the texts are numbers.
        shown_if_redundant: whether it makes a column although other columns tell the same rows apart.
    """

    title: str
    texts: tuple[str, ...]
    numeric: bool = False
    shown_if_redundant: bool = True

    @property
    def is_name(self) -> bool:
        """Whether this is the subject's name, which always makes a column."""
        return self.title == "name"

    @property
    def differs(self) -> bool:
        """Whether any two rows differ in it."""
        return len(set(self.texts)) > 1


def number_rows(measurements: Iterable[Measurement]) -> list[Row]:
    """Number measurements of one machine from 1."""
    return [Row(number, measurement) for number, measurement in enumerate(measurements, 1)]


def list_fields(rows: Sequence[Row]) -> list[Field]:
    """Return everything of subject, case and machine that rows can differ in, in the order a person would read it."""

    def texts(get: Callable[[Target], object]) -> tuple[str, ...]:
        subjects = (row.measurement.target for row in rows)
        return tuple(format_value(get(subject) or None) if subject else "–" for subject in subjects)

    fields = [] if all(row.measurement.target is None for row in rows) else [Field("name", texts(lambda s: s.name))]
    fields += [
        Field("runtime", texts(lambda s: f"{s.runtime} {s.runtime_version}".strip())),
        Field("device", texts(lambda s: s.device)),
        Field("precision", texts(lambda s: s.precision)),
        Field("backbone", texts(lambda s: s.backbone), shown_if_redundant=False),
        Field("head", texts(lambda s: s.head), shown_if_redundant=False),
        Field("layout", texts(lambda s: s.layout), shown_if_redundant=False),
        Field("input", texts(lambda s: "x".join(map(str, s.input_size or ()))), shown_if_redundant=False),
        Field("classes", texts(lambda s: s.num_classes), numeric=True, shown_if_redundant=False),
        Field("prototypes per class", texts(lambda s: s.prototypes_per_class), numeric=True, shown_if_redundant=False),
    ]
    for name in dict.fromkeys(key for row in rows for key in row.measurement.case):
        values = [row.measurement.case.get(name) for row in rows]
        numeric = all(value is None or isinstance(value, int | float) for value in values)
        fields.append(Field(humanize(name), tuple(map(format_value, values)), numeric))
    if any(row.machine for row in rows):
        fields.append(Field("machine", tuple(row.machine for row in rows)))
    return fields


def select_columns(fields: Sequence[Field]) -> list[Field]:
    """Return the fields that make columns: those that differ, unless they tell no rows apart that others do not."""
    kept = [field for field in fields if field.is_name or (field.differs and field.shown_if_redundant)]
    kept = _add_distinguishing(kept, [field for field in fields if field.differs])
    return [field for field in fields if field in kept]


def label_rows(rows: Sequence[Row], without: Sequence[str] = (), *, named: bool = False) -> list[str]:
    """Return for each row the shortest label that tells it from the others.

    Args:
        rows: the rows to label.
        without: keys of the case that rows with the same label may differ in.
        named: keep the subject's name in the label though all rows may share it.
    """
    hidden = {humanize(name) for name in without}
    fields = [field for field in list_fields(rows) if field.title not in hidden]
    kept = _add_distinguishing([field for field in fields if field.is_name], fields)
    # a name that all share says nothing where something else tells them apart
    if not named and len(kept) > 1 and not kept[0].differs:
        kept = kept[1:]
    return [
        ", ".join(
            field.texts[row] if field.title in _SELF_EXPLAINING else f"{field.title} {field.texts[row]}"
            for field in kept
            if field.texts[row] != "–"
        )
        for row in range(len(rows))
    ]


def find_figure(measurement: Measurement, unit: str) -> Figure | None:
    """Return the first figure in a unit."""
    return next((figure for figure in measurement.figures.values() if figure.unit == unit), None)


def _add_distinguishing(kept: Sequence[Field], candidates: Sequence[Field]) -> list[Field]:
    """Add each candidate that tells apart rows which the fields before it do not."""
    kept = list(kept)
    for candidate in candidates:
        if candidate not in kept and _count_distinct([*kept, candidate]) > _count_distinct(kept):
            kept.append(candidate)
    return kept


def _count_distinct(fields: Sequence[Field]) -> int:
    return len(set(zip(*(field.texts for field in fields), strict=True)))
