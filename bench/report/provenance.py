"""How each row of a report was measured: the command that gives it again, the timed region, when, and what else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.report.tables import Row
from opal_deploy.bench.tables import flatten_facts, format_ranges, format_value


@dataclass(frozen=True)
class Account:
    """How some rows were measured; equal for all of them.

    Attributes:
        rows: their numbers: `1–4, 7`. command: that gives them again. timed: what is inside the timed region.
        others: settings, time, artifacts, machine: (name, text).
    """

    rows: str
    command: str
    timed: str
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sampled:
    """What was recorded beside the figures of one row: conditions and details, (name, text)."""

    row: int
    facts: tuple[tuple[str, str], ...]


def accounts(rows: Sequence[Row], several_machines: bool) -> list[Account]:
    """One account for all rows that were measured by the same command in the same way."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.measurement.command, row.measurement.timed, row.machine), []).append(row)
    out = []
    for (command, timed, machine), group in groups.items():
        members = [row.measurement for row in group]
        others = [*_shared_settings(members), *_artifacts(members)]
        if several_machines:
            others.append(("machine", machine))
        if moments := sorted(format_value(m.when) for m in members if m.when):
            others.append(("measured", moments[0] if moments[0] == moments[-1] else f"{moments[0]} to {moments[-1]}"))
        out.append(
            Account(
                format_ranges(row.number for row in group), format_value(command), format_value(timed), tuple(others)
            )
        )
    return out


def sampled(rows: Sequence[Row]) -> list[Sampled]:
    """Conditions, settings and details of every row that has any."""
    out = []
    for row in rows:
        m = row.measurement
        if found := [*flatten_facts(m.conditions), *flatten_facts(m.settings), *flatten_facts(m.details)]:
            out.append(Sampled(row.number, tuple(found)))
    return out


def _shared_settings(measurements: Sequence[Measurement]) -> list[tuple[str, str]]:
    """What is equal for all; what differs stands with each row."""
    first, *rest = [flatten_facts(m.settings) for m in measurements]
    return [pair for pair in first if all(pair in other for other in rest)]


def _artifacts(measurements: Sequence[Measurement]) -> list[tuple[str, str]]:
    hashes = {(m.target.name, m.target.sha256) for m in measurements if m.target and m.target.sha256}
    return [(f"sha256 of {format_value(name)}", format_value(digest)) for name, digest in sorted(hashes, key=str)]
