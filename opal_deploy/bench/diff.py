"""Compare two sets of measurements: what became worse or better by more than the noise, and what cannot be compared.

A figure has changed if its relative change exceeds the tolerance and the noise of both measurements, the spread of
their repeats. If both figures have 95 % intervals, these must not overlap instead: with many repeats the median is
known much better than the spread suggests. A change in a marked measurement (noisy, throttled, busy) is doubtful, never
a regression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from opal_deploy.bench.measurement import Figure, Measurement
from opal_deploy.bench.report import (
    format_number,
    format_value,
    hardware_facts,
    humanize,
    label_measurements,
    software_facts,
)

TOLERANCE = 0.03
Verdict = Literal["regression", "improvement", "doubtful", "unchanged"]


@dataclass(frozen=True)
class FigureChange:
    """One figure that both sets have.

    Attributes:
        relative: (new - old) / |old|; None if old is 0 and new is not.
        noise: relative change that does not count: the largest of the tolerance and the spreads.
    """

    label: str
    figure: str
    unit: str
    old: float
    new: float
    relative: float | None
    noise: float
    verdict: Verdict
    marks: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line for a person: figure, values, relative change and noise."""
        unit = "" if self.unit in ("", "ratio") else f" {format_value(self.unit)}"
        change = "from 0" if self.relative is None else f"{self.relative:+.1%}"
        doubts = f"; marked {', '.join(map(format_value, self.marks))}" if self.marks else ""
        values = f"{format_number(self.old, self.unit)} -> {format_number(self.new, self.unit)}{unit}"
        return f"{self.label}: {humanize(self.figure)} {values} ({change}; noise up to {self.noise:.1%}{doubts})"


@dataclass(frozen=True)
class MeasurementDiff:
    """The differences of two sets of measurements.

    Attributes:
        changes: every figure that both sets have and that can improve, in the order of OLD.
        only_old, only_new: measurements, or `measurement: figure`, that the other set lacks.
        not_comparable: figures whose unit or direction differs, with the reason.
        repeated: `OLD` or `NEW` with a measurement that occurs more than once in it; the last one counts.
    """

    changes: tuple[FigureChange, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    not_comparable: tuple[str, ...]
    repeated: tuple[str, ...]
    machines: tuple[str, ...]
    software: tuple[str, ...]

    def with_verdict(self, verdict: Verdict) -> tuple[FigureChange, ...]:
        """Return the changes with one verdict."""
        return tuple(change for change in self.changes if change.verdict == verdict)

    @property
    def missing(self) -> int:
        """Number of measurements and figures that cannot be compared."""
        return len(self.only_old) + len(self.only_new) + len(self.not_comparable)

    def to_dict(self) -> dict[str, Any]:
        """Return the differences for JSON, unchanged figures included."""
        return asdict(self)


def compare_measurements(
    old: Iterable[Measurement], new: Iterable[Measurement], tolerance: float = TOLERANCE
) -> MeasurementDiff:
    """Compare measurements by their keys.

    Args:
        old, new: in the order they were written; of several with the same key the last counts.
        tolerance: relative change that never counts, such as 0.03.
    """
    (before, repeated_old), (after, repeated_new) = _last_by_key(old), _last_by_key(new)
    names = _label_measurements([*before.values(), *after.values()])
    compared: list[FigureChange] = []
    not_comparable: list[str] = []
    only_old = [names[key] for key in before if key not in after]
    only_new = [names[key] for key in after if key not in before]
    pairs = {key: (before[key], after[key]) for key in before if key in after}
    for key, (a, b) in pairs.items():
        label, old_figures, new_figures = names[key], a.figures, b.figures
        only_old += [f"{label}: {humanize(figure)}" for figure in old_figures if figure not in new_figures]
        only_new += [f"{label}: {humanize(figure)}" for figure in new_figures if figure not in old_figures]
        for figure in (name for name in old_figures if name in new_figures):
            was, now = old_figures[figure], new_figures[figure]
            if (was.unit, was.better) != (now.unit, now.better):
                texts = [format_value(f"{each.unit} ({each.better or 'neither'} is better)") for each in (was, now)]
                not_comparable.append(f"{label}: {humanize(figure)}: was in {texts[0]}, is in {texts[1]}")
            elif now.better is not None:
                compared.append(_change(label, figure, was, now, tuple(dict.fromkeys((*a.marks, *b.marks))), tolerance))
    both = [(a.machine, b.machine) for a, b in pairs.values()]
    machines = (text for a, b in both for text in _list_changes(hardware_facts(a), hardware_facts(b)))
    versions = (text for a, b in both for text in _list_changes(software_facts(a), software_facts(b)))
    return MeasurementDiff(
        changes=tuple(compared),
        only_old=tuple(only_old),
        only_new=tuple(only_new),
        not_comparable=tuple(not_comparable),
        repeated=(*(f"OLD: {names[key]}" for key in repeated_old), *(f"NEW: {names[key]}" for key in repeated_new)),
        machines=tuple(dict.fromkeys(machines)),
        software=tuple(dict.fromkeys(versions)),
    )


def _change(label: str, name: str, old: Figure, new: Figure, marks: tuple[str, ...], tolerance: float) -> FigureChange:
    relative = (new.value - old.value) / abs(old.value) if old.value else None if new.value else 0.0
    worse = new.value < old.value if new.better == "higher" else new.value > old.value
    verdict: Verdict = "unchanged"
    if old.interval is not None and new.interval is not None:
        noise = tolerance
        beyond = new.interval[0] > old.interval[1] or old.interval[0] > new.interval[1]
    else:
        noise = max(tolerance, old.spread or 0.0, new.spread or 0.0)
        beyond = True
    if beyond and (relative is None or abs(relative) > noise):
        verdict = "doubtful" if marks else "regression" if worse else "improvement"
    return FigureChange(label, name, new.unit, old.value, new.value, relative, noise, verdict, marks)


def _list_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the differences of two sets of facts, such as `versions: torch 2.9.0 -> 2.9.1`."""
    pairs = [(name, old.get(name, "none"), new.get(name, "none")) for name in dict.fromkeys([*old, *new])]
    return [f"{name} {before} -> {after}" for name, before, after in pairs if before != after]


def _last_by_key(measurements: Iterable[Measurement]) -> tuple[dict[str, Measurement], list[str]]:
    """Return the last measurement of each key, and the keys that occur more than once."""
    last: dict[str, Measurement] = {}
    repeated: dict[str, None] = {}
    for measurement in measurements:
        if measurement.key in last:
            repeated[measurement.key] = None
        last[measurement.key] = measurement
    return last, list(repeated)


def _label_measurements(measurements: Sequence[Measurement]) -> dict[str, str]:
    """Return a label per key that distinguishes the measurement from the others of its kind."""
    by_key = {m.key: m for m in measurements}
    names: dict[str, str] = {}
    for kind in dict.fromkeys(m.kind for m in by_key.values()):
        # versions are compared, so they do not belong to the label
        of_kind = {
            key: replace(m, target=replace(m.target, runtime_version="", sha256=None))
            for key, m in by_key.items()
            if m.kind == kind
        }
        labels = label_measurements(list(of_kind.values()))
        names |= {key: f"{kind}: {label}" for key, label in zip(of_kind, labels, strict=True)}
    return names
