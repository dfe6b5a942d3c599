"""Whether a model's answers still look like its baseline: counts of observations, and the shifts that they show.

Observations are only counted, in bins whose edges are the baseline's quantiles: memory is bounded however many images
come, and adding a batch costs microseconds per image. A distribution is compared by the distance of Kolmogorov and
Smirnov at these edges, which is at most the distance of the samples, so that the test errs on the side of no shift. A
share (of a class among the answers, of a place among a slot's cells) is compared by Fisher's exact test, which needs no
minimum count and names the class or place.

The false discovery rate is controlled within each of three families, labels, quantities of images, and slots, at a
third of the level each: thousands of slots must not hide that the cosine fell.

A shift also has a size from 0, its `effect`, since with enough images any difference is significant: the distance of
the distributions, or half of Cohen's h of two shares, |asin(sqrt(p)) - asin(sqrt(q))|. 0.1 is small by either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.baseline import (
    DIGITS,
    LEVELS,
    MIN_IMAGES,
    PLACES,
    QUANTITIES,
    SLOT_LEVELS,
    Baseline,
    Observations,
    SlotBaseline,
)
from opal_deploy.artifact.outputs import DoubleArray
from opal_deploy.significance import control_false_discoveries, fisher_exact, kolmogorov_smirnov

Kind = Literal[
    "label", "cosine", "margin", "norm", "shared_cells", "strangeness", "score", "contribution", "place"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
# default limits of a shift: the false discovery rate, and the effect
MAX_Q, MIN_EFFECT = 0.01, 0.1
# images from which a sample can be compared at all
MIN_SAMPLE = 20

_WORDS: dict[str, str] = {
    "cosine": "cosine", "margin": "margin", "norm": "norm of the scores", "strangeness": "strangeness",
    "shared_cells": "share of slots that look at the same cell", "score": "score", "contribution": "contribution",
}  # fmt: skip
# a bit more than half a unit in the last of a baseline's digits, and the smallest number that has such digits
_HALF_UNIT, _SMALLEST = 0.501, 1e-12
_ABOUT_AS_MUCH = 0.9
# of tests: labels, quantities of images, slots
_FAMILIES = 3
_Counts = NDArray[np.int64]


class Share(NamedTuple):
    """Cases among trials; of pooled slots both may be fractions."""

    cases: float
    trials: float

    @property
    def value(self) -> float:
        """Cases per trial."""
        return self.cases / self.trials


@dataclass(frozen=True)
class Shift:
    """One comparison with the baseline, of which `Limits` says whether it is a shift.

    Attributes:
        kind: what was compared.
        class_id, slot: of a label, or of a slot's score, contribution or place; None for quantities of all images.
        pooled: whether the slot stands for all slots of the classes that the baseline pools; its own change is largest.
        p, q: p-value, and the value adjusted for all tests of the comparison.
        effect: size of the difference, see the module.
        rose: whether values rose, or the share did.
        place: index into `PLACES`; only of a place.
        value: the value below or above which the samples differ most; only of a distribution.
        before, after: share of the answers with the class or place, or beyond `value` (below it if values fell).
        answers_before, answers_after: the answers that were compared.
    """

    kind: Kind
    p: float
    effect: float
    rose: bool
    before: float
    after: float
    answers_before: int
    answers_after: int
    class_id: int | None = None
    slot: int | None = None
    pooled: bool = False
    place: int | None = None
    value: float | None = None
    q: float = 1.0

    def describe(self, class_names: Sequence[str]) -> str:
        """Return one line for people."""
        name = "" if self.class_id is None else class_names[self.class_id]
        after, before = f"{self.after:.0%} of {self.answers_after:,}", f"{self.before:.0%} of {self.answers_before:,}"
        shares = f"{after} answers, {before} in the baseline"
        if self.kind == "label":
            return f"{name} is predicted {'more' if self.rose else 'less'} often: {shares}"
        subject = "" if self.slot is None else f"slot {self.slot} of {name}: "
        if self.pooled:
            subject = f"slots of rarely predicted classes, most of all slot {self.slot} of {name}: "
        if self.place is not None:
            moved = "moved to" if self.rose else "left"
            return f"{subject[:-2]} {moved} the {PLACES[self.place]}: {shares}"
        change, side = ("rose", "above") if self.rose else ("fell", "below")
        return (
            f"{subject}{_WORDS[self.kind]} {change}: {after} answers {side} {self.value:.3g}, {before} in the baseline"
        )

    def to_dict(self, class_names: Sequence[str]) -> dict[str, Any]:
        """Return the shift for JSON, with the names of its class and place, and in words."""
        label = None if self.class_id is None else class_names[self.class_id]
        place = None if self.place is None else PLACES[self.place]
        return {**asdict(self), "label": label, "place": place, "text": self.describe(class_names)}


@dataclass(frozen=True)
class Limits:
    """What makes a difference a shift: a q-value of at most `max_q`, and an effect of at least `min_effect`."""

    max_q: float = MAX_Q
    min_effect: float = MIN_EFFECT

    def select(self, tests: Sequence[Shift]) -> list[Shift]:
        """Return the shifts among all tests of a comparison, the largest effect first."""
        found = [test for test in tests if test.q <= self.max_q and test.effect >= self.min_effect]
        return sorted(found, key=lambda shift: (-shift.effect, shift.p))

    def smallest_shift(self, tests: Sequence[Shift], answers: Share) -> float:
        """Return the distance from which the distribution of one quantity of all images would have been a shift.

        `answers` are the images compared (cases) and those of the baseline (trials).
        """
        low, high = 0.0, 1.0
        quantities = sum(test.kind in QUANTITIES for test in tests)
        for _ in range(30):
            middle = (low + high) / 2
            # the smallest of the p-values of a family of a few tests
            significant = kolmogorov_smirnov(middle, *answers) * _FAMILIES * quantities <= self.max_q
            low, high = (low, middle) if significant else (middle, high)
        return max(high, self.min_effect)


class _Edges:
    """Bins of values between quantiles, for any number of distributions with the same levels.

    Two edges around each quantile keep equal values apart from smaller and larger ones: baselines have ties.
    """

    def __init__(self, quantiles: DoubleArray, levels: Sequence[float]) -> None:
        """Prepare the bins of R distributions; `quantiles`: [R, L], NaN where unknown."""
        self.quantiles, self._levels = quantiles, np.asarray(levels)
        magnitude = np.floor(np.log10(np.maximum(np.abs(quantiles), _SMALLEST)))
        margin = _HALF_UNIT * 10.0 ** (magnitude + 1 - DIGITS)
        low, high = quantiles - margin, quantiles + margin
        self._edges = np.sort(np.concatenate([low, high], axis=1), axis=1)
        self._low, self._high = low, high
        self.bins = self._edges.shape[1] + 1

    def find(self, rows: NDArray[np.int64] | int, values: DoubleArray) -> NDArray[np.int64]:
        """Return the bins of values, [...], each by the distribution of its row."""
        found: NDArray[np.int64] = (values[..., None] > self._edges[rows]).sum(axis=-1)
        return found

    def compare(self, row: int, counts: _Counts, answers: int) -> tuple[float, bool, float, float, float] | None:
        """Return distance, whether values rose, the value where they differ most, and the shares beyond it.

        Args:
            row: of the distribution.
            counts: [bins].
            answers: number of values that the quantiles were computed from.
        """
        if (total := int(counts.sum())) == 0 or np.isnan(self.quantiles[row]).any():
            return None
        below = np.cumsum(counts) / total
        # the shares of the new values that are smaller, and not larger, than each quantile
        smaller = below[np.searchsorted(self._edges[row], self._low[row])]
        up_to = below[np.searchsorted(self._edges[row], self._high[row])]
        # bounds of the same shares of the baseline's values, whatever their ties
        steps = np.round(self._levels * (answers - 1), 9)
        most_smaller, least_up_to = np.ceil(steps) / answers, (np.floor(steps) + 1) / answers
        fell, rose = smaller - most_smaller, least_up_to - up_to
        if fell.max() >= rose.max():
            at = int(fell.argmax())
            return float(max(fell[at], 0.0)), False, float(self.quantiles[row, at]), most_smaller[at], smaller[at]
        at = int(rose.argmax())
        return float(rose[at]), True, float(self.quantiles[row, at]), 1 - least_up_to[at], 1 - up_to[at]


class DriftCounts:
    """Counts of observations in a baseline's bins.

    Attributes:
        images: number of images counted.
        classes: int64 [C], images with each predicted class.
    """

    def __init__(self, baseline: Baseline, slots: int) -> None:
        """Count nothing yet; `slots`: number of prototypes per class, m."""
        self.baseline, self._m = baseline, slots
        self._quantities: dict[Kind, _Edges] = {
            name: _Edges(np.array([values]), LEVELS)
            for name in KINDS
            if (values := baseline.quantiles.get(name)) is not None
        }
        channels = range(len(baseline.classes) * slots)
        # the row of each channel's distribution; those of pooled slots share the last one
        known = [channel for channel in channels if channel in baseline.slots]
        measured = [*(baseline.slots[channel] for channel in known), baseline.pooled]
        self._rows = np.full(len(channels), len(known))
        self._rows[known] = np.arange(len(known))
        self._slots = measured
        # the channels of each row
        self._channels = [*np.array(known, np.int64)[:, None], np.flatnonzero(self._rows == len(known))]
        self._slot_edges: dict[Kind, _Edges] = {
            "score": _Edges(_stack(measured, "score"), SLOT_LEVELS),
            "contribution": _Edges(_stack(measured, "contribution"), SLOT_LEVELS),
        }
        self.clear()

    def clear(self) -> None:
        """Set all counts to zero."""
        channels = len(self._rows)
        self.images = 0
        self.classes = np.zeros(len(self.baseline.classes), np.int64)
        self._counts = {name: np.zeros(edges.bins, np.int64) for name, edges in self._quantities.items()}
        self._slot_counts: dict[Kind, _Counts] = {
            name: np.zeros((channels, e.bins), np.int64) for name, e in self._slot_edges.items()
        }
        self._slot_counts["place"] = np.zeros((channels, len(PLACES)), np.int64)

    def add(self, observations: Observations) -> None:
        """Count N more images, whose classes are the baseline's."""
        self.images += len(observations)
        self.classes += np.bincount(observations.class_ids, minlength=len(self.classes))
        for name, edges in self._quantities.items():
            values = getattr(observations, name)
            bins = edges.find(0, values[~np.isnan(values)])
            self._counts[name] += np.bincount(bins, minlength=edges.bins)
        channels = observations.class_ids[:, None] * self._m + np.arange(self._m)
        for name, edges in self._slot_edges.items():
            values = observations.scores if name == "score" else observations.contributions
            known = ~np.isnan(values)
            bins = edges.find(self._rows[channels[known]], values[known])
            self._count_slots(name, channels[known], bins)
        known = observations.places >= 0
        self._count_slots("place", channels[known], observations.places[known])

    def _count_slots(self, name: Kind, channels: NDArray[np.int64], bins: NDArray[np.int64]) -> None:
        counts = self._slot_counts[name]
        # `add.at` touches only what changes, however many slots there are
        np.add.at(counts, (channels, bins), 1)

    def compare(self) -> list[Shift]:
        """Return all tests, with their q-values: of labels, of each quantity, and of each slot with enough answers."""
        families = self._compare_labels(), self._compare_quantities(), self._compare_slots()
        return [test for family in families for test in _adjust(list(family))]

    def _compare_labels(self) -> Iterator[Shift]:
        before = self.baseline.classes
        for class_id in np.flatnonzero(self.classes + np.array(before)).tolist():
            shares = Share(before[class_id], sum(before)), Share(int(self.classes[class_id]), self.images)
            yield _compare_share("label", *shares, class_id=class_id)

    def _compare_quantities(self) -> Iterator[Shift]:
        for name, edges in self._quantities.items():
            counts = self._counts[name]
            yield from _compare_values(name, edges, 0, counts, self.baseline.images, int(counts.sum()))

    def _compare_slots(self) -> Iterator[Shift]:
        pooled = len(self._slots) - 1
        for row, (measured, channels) in enumerate(zip(self._slots, self._channels, strict=True)):
            # slots of one image are not independent of each other: pooled ones count as one
            share = self._m if row == pooled else 1
            answers = self._slot_counts["place"][channels].sum()
            if measured is None or answers < MIN_IMAGES * share:
                continue
            before, after = max(measured.images // share, 1), int(answers) // share
            for name, edges in self._slot_edges.items():
                counts = self._slot_counts[name][channels]
                for test in _compare_values(name, edges, row, counts.sum(axis=0), before, after):
                    yield self._name_slot(
                        test, channels, self._own_distances(edges, row, counts, before), row == pooled
                    )
            yield self._compare_places(measured, channels, before, after, pooled=row == pooled)

    @staticmethod
    def _own_distances(edges: _Edges, row: int, counts: _Counts, before: int) -> DoubleArray:
        if len(counts) == 1:
            return np.zeros(1)
        enough = counts.sum(axis=1) >= MIN_IMAGES
        found = (edges.compare(row, own, before) if many else None for own, many in zip(counts, enough, strict=True))
        return np.array([0.0 if one is None else one[0] for one in found])

    def _compare_places(
        self, measured: SlotBaseline, channels: NDArray[np.int64], before: int, after: int, *, pooled: bool
    ) -> Shift:
        """Return the test of the place whose share differs most: its p-value counts for all places."""
        counts = self._slot_counts["place"][channels]
        old, new = np.array(measured.places), counts.sum(axis=0) / counts.sum()
        mean = (old * before + new * after) / (before + after)
        deviations = np.abs(old - new) / np.sqrt(np.maximum(mean * (1 - mean), 1e-12))
        # of places that changed about as much, the one that slots moved to says more than the one that they left
        most = deviations >= _ABOUT_AS_MUCH * deviations.max()
        place = int(np.where(most, new - old, -np.inf).argmax())
        shares = Share(round(old[place] * before), before), Share(round(new[place] * after), after)
        test = _compare_share("place", *shares, place=place)
        test = replace(test, p=min(1.0, test.p * int(np.count_nonzero(mean))))
        own = counts[:, place] / np.maximum(counts.sum(axis=1), 1) - old[place]
        own = np.where(counts.sum(axis=1) >= MIN_IMAGES, own if test.rose else -own, -1.0)
        return self._name_slot(test, channels, own, pooled)

    def _name_slot(self, test: Shift, channels: NDArray[np.int64], changes: DoubleArray, pooled: bool) -> Shift:
        class_id, slot = divmod(int(channels[changes.argmax()]), self._m)
        return replace(test, class_id=class_id, slot=slot, pooled=pooled)


def _adjust(tests: Sequence[Shift]) -> list[Shift]:
    """Return the tests of one family with their q-values, to which the number of families is a factor."""
    if not tests:
        return []
    all_q = control_false_discoveries([test.p for test in tests])
    return [replace(test, q=min(1.0, q * _FAMILIES)) for test, q in zip(tests, all_q, strict=True)]


def _stack(slots: Sequence[SlotBaseline | None], name: str) -> DoubleArray:
    unknown = (math.nan,) * len(SLOT_LEVELS)
    return np.array([unknown if slot is None else getattr(slot, name) or unknown for slot in slots])


def _compare_values(kind: Kind, edges: _Edges, row: int, counts: _Counts, before: int, after: int) -> Iterator[Shift]:
    if (found := edges.compare(row, counts, before)) is None:
        return
    distance, rose, value, share_before, share_after = found
    p = kolmogorov_smirnov(distance, before, after)
    yield Shift(kind, p, distance, rose, float(share_before), float(share_after), before, after, value=value)


def _compare_share(kind: Kind, before: Share, after: Share, **details: Any) -> Shift:
    p = fisher_exact((int(after.cases), int(after.trials)), (int(before.cases), int(before.trials)))
    angles = [math.asin(math.sqrt(share.value)) for share in (before, after)]
    return Shift(
        kind, p, abs(angles[1] - angles[0]), angles[1] > angles[0], before.value, after.value, int(before.trials),
        int(after.trials), **details,
    )  # fmt: skip
