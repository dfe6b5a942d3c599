"""Whether a model's answers still look like its baseline: the tests, and what their outcome means in words.

A distribution is compared by the distance of Kolmogorov and Smirnov at the baseline's quantiles, which is at most the
distance of the samples, so that the test errs on the side of no shift. A share (of a class among the answers, of a
place among a slot's cells) is compared by Fisher's exact test, since counts are often small: for 1 case in 10 after 0
in 1,000, its p-value is 0.01, that of a chi-square test 7e-7.

The false discovery rate is controlled within each of three families, labels, quantities of images, and slots, at a
third of the level each: thousands of slots must not hide that the cosine fell.

A shift also has a size from 0, its `effect`, since with enough images any difference is significant: the distance of
the distributions, or half of Cohen's h of two shares, |asin(sqrt(p)) - asin(sqrt(q))|. 0.1 is small by either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import false_discovery_control, fisher_exact, kstwobign

from opal_deploy.artifact.baseline import DIGITS, LEVELS, PLACES, SLOT_LEVELS, Baseline, Observations, SlotBaseline
from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.outputs import DoubleArray

Kind = Literal["label", "cosine", "margin", "norm", "shared_cells", "ood_score", "score", "contribution", "place"]
_QUANTITIES: tuple[Kind, ...] = ("cosine", "margin", "norm", "shared_cells", "ood_score")
_WORDS: dict[str, str] = {
    "cosine": "cosine", "margin": "margin", "norm": "norm of the scores", "ood_score": "OOD score",
    "shared_cells": "share of slots that look at the same cell", "score": "score", "contribution": "contribution",
}  # fmt: skip
# families of tests: labels, quantities of images, slots
_FAMILIES = 3
# answers with a class from which its slots are compared: each comparison makes the others less certain
_MIN_ANSWERS = 10
# a bit more than half a unit in the last of a baseline's digits, and the smallest number that has such digits
_HALF_UNIT, _SMALLEST = 0.501, 1e-12
# share of the largest change; ranges of a distribution and classes that have bars
_ABOUT_AS_MUCH, _RANGES, _CLASSES = 0.9, 15, 10
# name, and shares before and after
Bar = tuple[str, float, float]


@dataclass(frozen=True)
class Shift:
    """One comparison with the baseline; `select_shifts` decides whether it is a shift."""

    kind: Kind  # what was compared
    p: float  # p-value
    effect: float  # size of the difference, as the module's text defines it
    rose: bool  # whether values rose, or the share did
    before: float  # share of the answers with the class or place, or beyond `value` (below it if values fell)
    after: float
    answers_before: int  # the answers that were compared
    answers_after: int
    # of a label, or of a slot's score, contribution or place; None for quantities of all images
    class_id: int | None = None
    slot: int | None = None
    place: int | None = None  # index into `PLACES`; only of a place
    value: float | None = None  # the value below or above which the samples differ most; only of a distribution
    q: float = 1.0  # p-value adjusted for all tests of the comparison

    @property
    def subject(self) -> str:
        """The name of the quantity that was compared: `cosine`, `predicted classes`."""
        return _WORDS.get(self.kind, "predicted classes")

    def describe(self, class_names: Sequence[str]) -> str:
        """Return one line for people."""
        name = "" if self.class_id is None else class_names[self.class_id]
        after, before = f"{self.after:.0%} of {self.answers_after:,}", f"{self.before:.0%} of {self.answers_before:,}"
        shares = f"{after} answers, {before} before"
        if self.kind == "label":
            return f"{name} is predicted {'more' if self.rose else 'less'} often: {shares}"
        subject = "" if self.slot is None else f"slot {self.slot} of {name}: "
        if self.place is not None:
            moved = "moved to" if self.rose else "left"
            return f"{subject[:-2]} {moved} the {PLACES[self.place]}: {shares}"
        change, side = ("rose", "above") if self.rose else ("fell", "below")
        return f"{subject}{self.subject} {change}: {after} answers {side} {self.value:.3g}, {before} before"

    def find_images(self, observations: Observations, *, shows: bool) -> NDArray[np.intp]:
        """Return the rows of the images that show the shift, or of the others that could have.

        Images show it by their class, the slot's place, or a value beyond `value`. A slot's others have its class.
        """
        own = observations.class_ids == self.class_id
        if self.kind == "label":
            return np.flatnonzero(own == shows)
        if self.slot is None:
            own, values = np.ones_like(own), getattr(observations, self.kind)
        else:
            # attributes of slots are in the plural
            values = getattr(observations, f"{self.kind}s")[:, self.slot]
        if self.place is not None:
            cases = values == self.place
        else:
            cases = values > self.value if self.rose else values < self.value
        return np.flatnonzero(own & (cases == shows))

    def to_dict(self, class_names: Sequence[str]) -> dict[str, Any]:
        """Return the shift for JSON, with the names of its class and place, and in words."""
        label = None if self.class_id is None else class_names[self.class_id]
        place = None if self.place is None else PLACES[self.place]
        return {**asdict(self), "label": label, "place": place, "text": self.describe(class_names)}


def select_shifts(tests: Sequence[Shift], max_q: float, min_effect: float) -> list[Shift]:
    """Return the shifts among all tests of a comparison, the smallest p-value first, then the largest effect."""
    shifts = [test for test in tests if test.q <= max_q and test.effect >= min_effect]
    return sorted(shifts, key=lambda shift: (shift.p, -shift.effect))


def find_smallest_shift(tests: Sequence[Shift], images: tuple[int, int], max_q: float, min_effect: float) -> float:
    """Return the distance from which one quantity of all `images`, before and after, would have been a shift."""
    quantities = sum(test.kind in _QUANTITIES for test in tests)
    # the smallest of the p-values of a family of a few tests
    p = max_q / (_FAMILIES * max(quantities, 1))
    return max(min(float(kstwobign.isf(p)) / _scale(*images), 1.0), min_effect)


# kinds of shifts with `+` for those that rose and `-` for those that fell, one of which must be among them; the section
# of docs/howto/drift.md that says what to do; and the likely cause
_CAUSES: tuple[tuple[set[str], str, str], ...] = (
    ({"+ood_score"}, "OpalUnknownImages", "Pictures are less like the training images"),
    ({"+shared_cells", "-norm"}, "OpalEvidenceChanged",
     "Evidence is weaker in all classes, as with blur or another lens"),
    ({"+score", "-score", "+contribution", "-contribution"}, "OpalEvidenceChanged",
     "Single slots match more weakly or strongly"),
    ({"+place", "-place"}, "OpalSlotsMoved", "Slots look elsewhere: another framing, or something new at that place"),
    ({"-cosine", "-margin"}, "OpalConfidenceChanged", "Answers are less certain; expect more wrong ones"),
    ({"+cosine", "+margin"}, "OpalConfidenceChanged", "Answers are more certain, as with many similar pictures"),
    ({"+label", "-label"}, "OpalClassShares", "Class shares have changed"),
)  # fmt: skip


def interpret(shifts: Sequence[Shift]) -> dict[str, str]:
    """Return the likely causes of a pattern of shifts, by the section of docs/howto/drift.md that says what to do."""
    changes, causes = {("+" if shift.rose else "-") + shift.kind for shift in shifts}, dict[str, str]()
    for kinds, section, text in _CAUSES:
        if kinds & changes:
            causes.setdefault(section, text)
    return causes


class _Slot(NamedTuple):
    """The observations of one slot in the n answers with its class; those that are not known are left out."""

    measured: SlotBaseline
    score: DoubleArray
    contribution: DoubleArray
    places: NDArray[np.int64]  # number of answers in each of `PLACES`


class Comparison:
    """Observations of N images, compared with a baseline of the same model.

    Slots of classes that the baseline pools, since they were predicted for a handful of images, are not compared.
    """

    def __init__(self, now: Observations, baseline: Baseline, class_map: ClassMap) -> None:
        self._now, self._baseline = now, baseline
        self._class_counts = np.bincount(now.class_ids, minlength=len(baseline.classes))
        self._slots: dict[tuple[int, int], _Slot] = {}
        for class_id in np.flatnonzero(self._class_counts >= _MIN_ANSWERS).tolist():
            own = now.select(now.class_ids == class_id)
            for slot in class_map.slots(class_id):
                measured = baseline.slots.get(int(class_map.entries[class_id, slot]))
                scores, contributions, places = own.scores[:, slot], own.contributions[:, slot], own.places[:, slot]
                known = np.bincount(places[places >= 0], minlength=len(PLACES))
                if measured is not None and known.sum() >= _MIN_ANSWERS:
                    known_parts = contributions[~np.isnan(contributions)]
                    self._slots[class_id, slot] = _Slot(measured, scores[~np.isnan(scores)], known_parts, known)

    def list_tests(self) -> list[Shift]:
        """Return all tests, with their q-values: of labels, of each quantity, and of each slot with enough answers."""
        tests: list[Shift] = []
        for family in map(list, (self._compare_labels(), self._compare_quantities(), self._compare_slots())):
            all_q = false_discovery_control([test.p for test in family]).tolist() if family else []
            # each family at a third of the level
            tests += [replace(test, q=min(1.0, q * _FAMILIES)) for test, q in zip(family, all_q, strict=True)]
        return tests

    def list_bars(self, shift: Shift, class_names: Sequence[str]) -> list[Bar]:
        """Return the bars of a shift: each bar's meaning, and its share of the answers before and after.

        Bars are the `PLACES`, the ranges between the baseline's quantiles, or the classes whose share changed most.
        """
        if shift.class_id is None:
            values = getattr(self._now, shift.kind)
            return _list_ranges(self._baseline.quantiles[shift.kind], LEVELS, values[~np.isnan(values)])
        if shift.slot is None:
            before = np.array(self._baseline.classes) / self._baseline.images
            after = self._class_counts / len(self._now)
            most = np.argsort(-np.abs(after - before), kind="stable")[:_CLASSES].tolist()
            return [(class_names[class_id], float(before[class_id]), float(after[class_id])) for class_id in most]
        slot = self._slots[shift.class_id, shift.slot]
        if shift.kind != "place":
            return _list_ranges(getattr(slot.measured, shift.kind), SLOT_LEVELS, getattr(slot, shift.kind))
        return list(zip(PLACES, slot.measured.places, (slot.places / slot.places.sum()).tolist(), strict=True))

    def _compare_labels(self) -> Iterator[Shift]:
        before = self._baseline.classes
        for class_id in np.flatnonzero(self._class_counts + np.array(before)).tolist():
            shares = (before[class_id], sum(before)), (int(self._class_counts[class_id]), len(self._now))
            yield _compare_share("label", *shares, class_id=class_id)

    def _compare_quantities(self) -> Iterator[Shift]:
        for kind in _QUANTITIES:
            values = getattr(self._now, kind)
            values = values[~np.isnan(values)]
            if kind in self._baseline.quantiles and len(values):
                yield _compare_values(kind, self._baseline.quantiles[kind], LEVELS, values, self._baseline.images)

    def _compare_slots(self) -> Iterator[Shift]:
        kinds: tuple[Kind, ...] = ("score", "contribution")
        for (class_id, number), slot in self._slots.items():
            for kind in kinds:
                quantiles, values = getattr(slot.measured, kind), getattr(slot, kind)
                if len(quantiles) and len(values):
                    test = _compare_values(kind, quantiles, SLOT_LEVELS, values, slot.measured.images)
                    yield replace(test, class_id=class_id, slot=number)
            yield _compare_places(slot, class_id=class_id, slot=number)


def _find_distance(
    quantiles: Sequence[float], levels: Sequence[float], values: DoubleArray, answers: int
) -> tuple[float, bool, float, float, float]:
    """Return distance, whether values rose, the value where they differ most, and the shares beyond it.

    Args:
        quantiles: [L] of the baseline, at `levels`.
        values: [n], n at least 1.
        answers: number of values that the quantiles were computed from.
    """
    low, high = _round_off(quantiles)
    ordered = np.sort(values)
    # the shares of the new values that are smaller, and not larger, than each quantile
    smaller, up_to = (np.searchsorted(ordered, edges, side="right") / len(values) for edges in (low, high))
    # bounds of the same shares of the baseline's values, whatever their ties
    steps = np.round(np.asarray(levels) * (answers - 1), 9)
    most_smaller, least_up_to = np.ceil(steps) / answers, (np.floor(steps) + 1) / answers
    fell, rose = smaller - most_smaller, least_up_to - up_to
    if fell.max() >= rose.max():
        at = int(fell.argmax())
        return float(max(fell[at], 0.0)), False, quantiles[at], float(most_smaller[at]), float(smaller[at])
    at = int(rose.argmax())
    return float(rose[at]), True, quantiles[at], float(1 - least_up_to[at]), float(1 - up_to[at])


def _round_off(quantiles: Sequence[float]) -> tuple[DoubleArray, DoubleArray]:
    """Return edges below and above each quantile, between which values are equal to it as far as it was stored."""
    values = np.asarray(quantiles)
    magnitude = np.floor(np.log10(np.maximum(np.abs(values), _SMALLEST)))
    margin = _HALF_UNIT * 10.0 ** (magnitude + 1 - DIGITS)
    return values - margin, values + margin


def _list_ranges(quantiles: Sequence[float], levels: Sequence[float], values: DoubleArray) -> list[Bar]:
    """Return the ranges between the quantiles in words, and the shares of the old and the new values in each."""
    # at most about a dozen ranges
    step = 1 + len(levels) // _RANGES
    up_to = np.searchsorted(np.sort(values), _round_off(quantiles[::step])[1], side="right") / len(values)
    after, before = (np.diff(shares, prepend=0.0, append=1.0) for shares in (up_to, levels[::step]))
    texts = [f"{value:.3g}" for value in quantiles[::step]]
    inner = [f"{low} to {high}" for low, high in itertools.pairwise(texts)]
    names = [f"up to {texts[0]}", *inner, f"above {texts[-1]}"]
    return list(zip(names, before.tolist(), after.tolist(), strict=True))


def _compare_values(
    kind: Kind, quantiles: Sequence[float], levels: Sequence[float], values: DoubleArray, before: int
) -> Shift:
    distance, rose, value, *shares = _find_distance(quantiles, levels, values, before)
    # two-sided and asymptotic, with Stephens' correction for small samples (1970)
    p = float(kstwobign.sf(_scale(before, len(values)) * distance))
    return Shift(kind, p, distance, rose, shares[0], shares[1], before, len(values), value=value)


def _scale(first: float, second: float) -> float:
    size = math.sqrt(first * second / (first + second))
    return size + 0.12 + 0.11 / size


def _compare_share(kind: Kind, before: tuple[int, int], after: tuple[int, int], **details: Any) -> Shift:
    """Return the test of two shares, each as cases and trials."""
    p = float(fisher_exact([[cases, trials - cases] for cases, trials in (before, after)])[1])
    old, new = (cases / trials for cases, trials in (before, after))
    change = math.asin(math.sqrt(new)) - math.asin(math.sqrt(old))
    return Shift(kind, p, abs(change), change > 0, old, new, before[1], after[1], **details)


def _compare_places(observed: _Slot, **details: Any) -> Shift:
    """Return the test of the place whose share differs most; its p-value accounts for all places."""
    before, after = observed.measured.images, int(observed.places.sum())
    old, new = np.array(observed.measured.places), observed.places / after
    mean = (old * before + new * after) / (before + after)
    deviations = np.abs(old - new) / np.sqrt(np.maximum(mean * (1 - mean), 1e-12))
    # among places that changed about as much, the place that slots moved to says more than the one that they left
    most = deviations >= _ABOUT_AS_MUCH * deviations.max()
    place = int(np.where(most, new - old, -np.inf).argmax())
    shares = (round(old[place] * before), before), (int(observed.places[place]), after)
    test = _compare_share("place", *shares, place=place, **details)
    return replace(test, p=min(1.0, test.p * int(np.count_nonzero(mean))))
