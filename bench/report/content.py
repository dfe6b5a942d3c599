"""What a report says, before anybody decides how it looks: machines, and a section for each kind of measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from opal_deploy.bench.measurement import Kind, Measurement
from opal_deploy.bench.report.machines import hardware, identity, software, title
from opal_deploy.bench.report.provenance import Account, Sampled, accounts, sampled
from opal_deploy.bench.report.tables import Row, Table, tables_of
from opal_deploy.bench.tables import format_value

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
        "How long one batch takes from call to answer. Half of all calls were faster than p50, 99 % faster than p99.",
    ),
    (
        "server",
        "Server",
        "Pictures arrive at random times (Poisson arrivals); each waits for its turn and its batch. The figure is the "
        "largest rate at which the limit of the latency still held.",
    ),
    (
        "pipeline",
        "The pipeline",
        "A folder of pictures, from files to records, as infer does it. Stages run in parallel, so that their times "
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
        "How much arithmetic a network does for each byte that it moves, and with that the most that a processor could "
        "reach: its arithmetic or its memory sets the limit, whichever is lower.",
    ),
    (
        "ceiling",
        "Measured ceilings",
        "The best that this machine reached in a large copy and in a large product of matrices.",
    ),
)


@dataclass(frozen=True)
class Machine:
    """One machine with its software, as the letter that rows name it by."""

    letter: str
    title: str
    hardware: tuple[tuple[str, str], ...]
    software: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Section:
    """All measurements of one kind.

    Attributes:
        anchor: fit for an address. rows: the measurements, numbered from 1 in each section.
        accounts: how they were measured. sampled: what was recorded beside the figures, for who looks closer.
        replaced: how many earlier measurements of the same things on the same machine are not shown.
    """

    kind: Kind
    heading: str
    lead: str
    rows: tuple[Row, ...]
    tables: tuple[Table, ...]
    accounts: tuple[Account, ...]
    sampled: tuple[Sampled, ...]
    replaced: int

    @property
    def anchor(self) -> str:
        return f"section-{self.kind}"

    @property
    def can_improve(self) -> bool:
        """Whether any figure has a better direction."""
        return any(figure.better for row in self.rows for figure in row.measurement.figures.values())

    @property
    def doubtful(self) -> int:
        """How many rows carry a mark."""
        return sum(1 for row in self.rows if row.measurement.marks)


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    machines: tuple[Machine, ...]
    sections: tuple[Section, ...]

    @property
    def measured(self) -> int:
        return sum(len(section.rows) for section in self.sections)

    @property
    def doubtful(self) -> int:
        return sum(section.doubtful for section in self.sections)

    @property
    def period(self) -> str:
        """First and last day of the measurements."""
        days = sorted(
            {format_value(row.measurement.when[:10]) for s in self.sections for row in s.rows if row.measurement.when}
        )
        if not days:
            return ""
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def report_of(measurements: Iterable[Measurement], title: str = "Benchmarks") -> Report:
    """Sort measurements into a report; of several of the same thing on the same machine the last one counts."""
    every = list(measurements)
    machines = _machines(every)
    several = len(machines) > 1
    sections = []
    for kind, heading, lead in SECTIONS:
        of_kind = [m for m in every if m.kind == kind]
        if not of_kind:
            continue
        last = {(m.key, identity(m.machine)): m for m in of_kind}
        rows = [
            Row(place, m, machines[identity(m.machine)].letter if m.machine else "–")
            for place, m in enumerate(last.values(), 1)
        ]
        sections.append(
            Section(
                kind,
                heading,
                lead,
                tuple(rows),
                tables_of(rows, several),
                tuple(accounts(rows, several)),
                tuple(sampled(rows)),
                len(of_kind) - len(last),
            )
        )
    return Report(format_value(title), tuple(machines.values()), tuple(sections))


def _machines(measurements: Sequence[Measurement]) -> dict[str, Machine]:
    out: dict[str, Machine] = {}
    for measurement in measurements:
        key = identity(measurement.machine)
        if key not in out and measurement.machine:
            hard, soft = hardware(measurement.machine), software(measurement.machine)
            out[key] = Machine(_letter(len(out)), title(measurement.machine), tuple(hard.items()), _versions(soft))
    return out


def _versions(software: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """With all versions of libraries in one text, since there are many."""
    out: dict[str, str] = {}
    for name, text in software.items():
        group, colon, library = name.partition(": ")
        told = f"{library} {text}" if colon else text
        out[group] = f"{out[group]}, {told}" if group in out else told
    return tuple(out.items())


def _letter(place: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    first, last = divmod(place, 26)
    return (_letter(first - 1) if first else "") + chr(ord("A") + last)
