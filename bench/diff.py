"""Two sets of measurements compared: what became worse or better by more than the noise, and what cannot be said.

A figure has changed when its relative change is larger than the tolerance and than the noise of both measurements. The
noise is the spread of the repeats; where both figures have 95 % intervals it is the intervals instead, which must not
overlap: they say how well the median is known, which with many repeats is far better than the repeats are alike.
A change in a measurement that carries a mark (noisy, throttled, or another doubt) is doubtful, never a regression.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from opal_deploy.bench.measurement import Figure, Measurement
from opal_deploy.bench.report.machines import changes, hardware, software
from opal_deploy.bench.report.tables import Row, labels
from opal_deploy.bench.tables import format_number, format_value, humanize

TOLERANCE = 0.03
Verdict = Literal["regression", "improvement", "doubtful", "unchanged"]


@dataclass(frozen=True)
class FigureChange:
    """One figure in both sets.

    Attributes:
        label: which measurement. figure: which of its figures, as the record names it. unit: its unit.
        old, new: values.
        relative: (new - old) / |old|; None where old is 0 and new is not.
        noise: the change that it takes: the largest of the tolerance and the spreads.
        worse: whether the change is for the worse.
        verdict: see the module.
        marks: doubts about either measurement.
    """

    label: str
    figure: str
    unit: str
    old: float
    new: float
    relative: float | None
    noise: float
    worse: bool
    verdict: Verdict
    marks: tuple[str, ...] = ()

    def line(self) -> str:
        """For a person: what, from where to where, by how much, and what would have been noise."""
        unit = "" if self.unit in ("", "ratio") else f" {format_value(self.unit)}"
        by = "from 0" if self.relative is None else f"{self.relative:+.1%}"
        doubts = f"; marked {', '.join(map(format_value, self.marks))}" if self.marks else ""
        values = f"{format_number(self.old, self.unit)} -> {format_number(self.new, self.unit)}{unit}"
        return f"{self.label}: {humanize(self.figure)} {values} ({by}; noise up to {self.noise:.1%}{doubts})"


@dataclass(frozen=True)
class MeasurementDiff:
    """Everything that is to be said about two sets.

    Attributes:
        changes: every figure that both have and that can improve, in the order of OLD.
        only_old, only_new: measurements, or `measurement: figure`, that the other set lacks.
        not_comparable: figures whose unit or direction is another one, with the reason.
        repeated: `OLD` or `NEW` and a measurement that stands there more than once: the last one counted.
        machines: what differs between the machines themselves. software: what differs in versions.
    """

    changes: tuple[FigureChange, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    not_comparable: tuple[str, ...]
    repeated: tuple[str, ...]
    machines: tuple[str, ...]
    software: tuple[str, ...]

    def of(self, verdict: Verdict) -> tuple[FigureChange, ...]:
        """The changes with one verdict."""
        return tuple(change for change in self.changes if change.verdict == verdict)

    @property
    def missing(self) -> int:
        """How much cannot be compared since one set lacks it."""
        return len(self.only_old) + len(self.only_new) + len(self.not_comparable)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; changes in full, the unchanged ones too."""
        return asdict(self)


def compare_measurements(
    old: Iterable[Measurement], new: Iterable[Measurement], tolerance: float = TOLERANCE
) -> MeasurementDiff:
    """Compare measurements by their keys.

    Args:
        old, new: in the order they were written; of several with one key the last counts.
        tolerance: relative change that is never called one, such as 0.03.
    """
    before, again_old = _last(old)
    after, again_new = _last(new)
    names = _names([*before.values(), *after.values()])
    found: list[FigureChange] = []
    odd: list[str] = []
    lost = [names[key] for key in before if key not in after]
    gained = [names[key] for key in after if key not in before]
    for key, a in before.items():
        if (b := after.get(key)) is None:
            continue
        lost += [f"{names[key]}: {humanize(figure)}" for figure in a.figures if figure not in b.figures]
        gained += [f"{names[key]}: {humanize(figure)}" for figure in b.figures if figure not in a.figures]
        for figure in a.figures:
            if figure not in b.figures:
                continue
            if reason := _incomparable(a.figures[figure], b.figures[figure]):
                odd.append(f"{names[key]}: {humanize(figure)}: {reason}")
            elif b.figures[figure].better is not None:
                marks = tuple(dict.fromkeys((*a.marks, *b.marks)))
                found.append(_change(names[key], figure, a.figures[figure], b.figures[figure], marks, tolerance))
    both = [(before[key], after[key]) for key in before if key in after]
    return MeasurementDiff(
        tuple(found),
        tuple(lost),
        tuple(gained),
        tuple(odd),
        tuple([f"OLD: {names[key]}" for key in again_old] + [f"NEW: {names[key]}" for key in again_new]),
        tuple(dict.fromkeys(text for a, b in both for text in changes(hardware(a.machine), hardware(b.machine)))),
        tuple(dict.fromkeys(text for a, b in both for text in changes(software(a.machine), software(b.machine)))),
    )


def _change(label: str, name: str, old: Figure, new: Figure, marks: tuple[str, ...], tolerance: float) -> FigureChange:
    relative = _relative(old.value, new.value)
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
    return FigureChange(label, name, new.unit, old.value, new.value, relative, noise, worse, verdict, marks)


def _relative(old: float, new: float) -> float | None:
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old else None


def _incomparable(old: Figure, new: Figure) -> str:
    if old.unit != new.unit:
        return f"was in {format_value(old.unit)}, is in {format_value(new.unit)}"
    if old.better != new.better:
        return f"better was {old.better or 'neither'}, is {new.better or 'neither'}"
    return ""


def _last(measurements: Iterable[Measurement]) -> tuple[dict[str, Measurement], list[str]]:
    """The last measurement of each key, and the keys that stood there more than once."""
    out: dict[str, Measurement] = {}
    again: dict[str, None] = {}
    for measurement in measurements:
        if measurement.key in out:
            again[measurement.key] = None
        out[measurement.key] = measurement
    return out, list(again)


def _names(measurements: Sequence[Measurement]) -> dict[str, str]:
    """For each key, the shortest name that tells it from the others of its kind."""
    # versions and machines are what a comparison is about: they name nothing
    plain = {m.key: m for m in measurements}
    out: dict[str, str] = {}
    for kind in dict.fromkeys(m.kind for m in plain.values()):
        rows = [Row(0, _unversioned(m)) for m in plain.values() if m.kind == kind]
        keys = [key for key, m in plain.items() if m.kind == kind]
        out |= {
            key: f"{kind}: {label}" if label else kind
            for key, label in zip(keys, labels(rows, named=True), strict=True)
        }
    return out


def _unversioned(measurement: Measurement) -> Measurement:
    if measurement.target is None:
        return measurement
    return replace(measurement, target=replace(measurement.target, runtime_version="", sha256=None))
