"""Rows as the series of plots, and series as plots that a person can still tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from opal_deploy.bench.measurement import Figure, Measurement
from opal_deploy.bench.report.tables import Row, fields_of, labels

MOST_SERIES = 9
_SPLIT_BY = ("machine", "device", "runtime", "precision", "head", "classes")


def batch_of(measurement: Measurement) -> int | None:
    """The batch of a case, where it is a number above 0."""
    batch = measurement.case.get("batch")
    return batch if isinstance(batch, int) and not isinstance(batch, bool) and batch > 0 else None


def figure_in(measurement: Measurement, *units: str) -> tuple[str, Figure] | None:
    """The first figure in one of these units, with its name."""
    return next(((name, f) for name, f in measurement.figures.items() if f.unit in units), None)


def by_label(rows: Sequence[Row], without: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Rows that differ in nothing but the case's `without`, by the name that tells them from the others."""
    out: dict[str, list[Row]] = {}
    for row, label in zip(rows, labels(rows, without), strict=True):
        out.setdefault(label, []).append(row)
    return out


def facets(rows: Sequence[Row], without: Sequence[str] = ()) -> list[tuple[str, list[Row]]]:
    """Rows in groups of few enough series for one plot each, with what a group has in common: (text, rows)."""
    if len(by_label(rows, without)) <= MOST_SERIES:
        return [("", list(rows))]
    fields = {f.title: f for f in fields_of(rows, len({row.machine for row in rows}) > 1)}
    for title in _SPLIT_BY:
        if title in fields and fields[title].differs:
            groups: dict[str, list[Row]] = {}
            for row, text in zip(rows, fields[title].texts, strict=True):
                groups.setdefault(text, []).append(row)
            named = {text: f"{title} {text}" if title in ("machine", "classes") else text for text in groups}
            return [
                (f"{named[text]}; {inner}" if inner else named[text], members)
                for text, group in groups.items()
                for inner, members in facets(group, without)
            ]
    names = list(by_label(rows, without).items())
    chunks = itertools.batched(names, MOST_SERIES) if hasattr(itertools, "batched") else _batched(names)
    return [
        (f"part {number}", [row for _, members in chunk for row in members]) for number, chunk in enumerate(chunks, 1)
    ]


def _batched(names: list[tuple[str, list[Row]]]) -> list[list[tuple[str, list[Row]]]]:
    return [names[start : start + MOST_SERIES] for start in range(0, len(names), MOST_SERIES)]


def titled(title: str, facet: str) -> str:
    """A plot's title with what its rows have in common."""
    return f"{title}: {facet}" if facet else title
