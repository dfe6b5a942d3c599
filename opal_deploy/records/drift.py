"""Whether a model's answers still look like its baseline: counts of observations, and the shifts that they show.

Observations are only counted, in bins whose edges are the baseline's quantiles: memory is bounded however many images
come, and adding a batch costs microseconds per image. A distribution is compared by the distance of Kolmogorov and
Smirnov at these edges, which is at most the distance of the samples, so that the test errs on the side of no shift. A
share (of a class among the answers, of a place among a slot's cells) is compared by Fisher's exact test, since counts
are often small: for 1 case in 10 after 0 in 1,000, its p-value is 0.01, that of a chi-square test 7e-7.

The false discovery rate is controlled within each of three families, labels, quantities of images, and slots, at a
third of the level each: thousands of slots must not hide that the cosine fell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.baseline import (
    DIGITS,
    LEVELS,
    PLACES,
    SLOT_LEVELS,
    Baseline,
    Observations,
    SlotBaseline,
)
from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.outputs import DoubleArray
from opal_deploy.errors import require
from opal_deploy.records.shifts import FAMILIES, KINDS, Kind, Share, Shift, kolmogorov_smirnov

# images from which a sample can be compared at all
MIN_SAMPLE = 20
# answers with a class from which its slots are compared: each comparison makes the others less certain
_MIN_ANSWERS = 10
# a bit more than half a unit in the last of a baseline's digits, and the smallest number that has such digits
_HALF_UNIT, _SMALLEST = 0.501, 1e-12
# share of the largest change, and bars of a histogram
_ABOUT_AS_MUCH = 0.9
_RANGES = 15
_Counts = NDArray[np.int64]


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

    def histogram(self, row: int, counts: _Counts) -> list[tuple[str, float, float]]:
        """Return the ranges between the quantiles in words, and the shares of the old and the new values in each."""
        # at most about a dozen ranges
        step = 1 + len(self._levels) // _RANGES
        ranks = np.searchsorted(self._edges[row], self._high[row, ::step])
        after = np.diff(np.cumsum(counts)[ranks] / counts.sum(), prepend=0.0, append=1.0)
        before = np.diff(self._levels[::step], prepend=0.0, append=1.0)
        texts = [f"{value:.3g}" for value in self.quantiles[row, ::step]]
        inner = [f"{low} to {high}" for low, high in itertools.pairwise(texts)]
        names = [f"up to {texts[0]}", *inner, f"above {texts[-1]}"]
        return list(zip(names, map(float, before), map(float, after), strict=True))


class DriftCounts:
    """Counts of observations in a baseline's bins.

    Attributes:
        images: number of images counted.
        classes: int64 [C], images with each predicted class.
    """

    def __init__(self, baseline: Baseline, class_map: ClassMap) -> None:
        """Count nothing yet, for the model with this baseline and map."""
        self.baseline, self._map = baseline, class_map
        self._quantities: dict[Kind, _Edges] = {
            name: _Edges(np.array([values]), LEVELS)
            for name in KINDS
            if (values := baseline.quantiles.get(name)) is not None
        }
        # the row of each slot's distribution, by `ClassMap.entries`; those of pooled slots share the last one
        known = [entry for entry in range(len(class_map.prototypes)) if entry in baseline.slots]
        measured = [*(baseline.slots[entry] for entry in known), baseline.pooled]
        self._rows = np.full(len(class_map.prototypes), len(known))
        self._rows[known] = np.arange(len(known))
        self._slots = measured
        # the slots of each row
        self._entries = [*np.array(known, np.int64)[:, None], np.flatnonzero(self._rows == len(known))]
        self._slot_edges: dict[Kind, _Edges] = {
            "score": _Edges(_stack(measured, "score"), SLOT_LEVELS),
            "contribution": _Edges(_stack(measured, "contribution"), SLOT_LEVELS),
        }
        self.images, slots = 0, len(self._rows)
        self.classes = np.zeros(len(self.baseline.classes), np.int64)
        self._counts = {name: np.zeros(edges.bins, np.int64) for name, edges in self._quantities.items()}
        self._slot_counts: dict[Kind, _Counts] = {
            name: np.zeros((slots, e.bins), np.int64) for name, e in self._slot_edges.items()
        }
        self._slot_counts["place"] = np.zeros((slots, len(PLACES)), np.int64)

    def add(self, observations: Observations) -> None:
        """Count N more images, whose classes are the baseline's."""
        self.images += len(observations)
        self.classes += np.bincount(observations.class_ids, minlength=len(self.classes))
        for name, edges in self._quantities.items():
            values = getattr(observations, name)
            bins = edges.find(0, values[~np.isnan(values)])
            self._counts[name] += np.bincount(bins, minlength=edges.bins)
        entries = self._map.entries[observations.class_ids]
        for name, edges in self._slot_edges.items():
            values = observations.scores if name == "score" else observations.contributions
            known = ~np.isnan(values)
            bins = edges.find(self._rows[entries[known]], values[known])
            self._count_slots(name, entries[known], bins)
        known = observations.places >= 0
        self._count_slots("place", entries[known], observations.places[known])

    def _count_slots(self, name: Kind, entries: NDArray[np.int64], bins: NDArray[np.int64]) -> None:
        counts = self._slot_counts[name]
        # `add.at` touches only what changes, however many slots there are
        np.add.at(counts, (entries, bins), 1)

    def compare(self) -> list[Shift]:
        """Return all tests, with their q-values: of labels, of each quantity, and of each slot with enough answers."""
        require("scipy", "drift", "drift")
        families = self._compare_labels(), self._compare_quantities(), self._compare_slots()
        return [test for family in families for test in _adjust(list(family))]

    def histogram(self, shift: Shift) -> list[tuple[str, float, float]]:
        """Return the bars of a shift: each bar's meaning, and its share of the answers before and after.

        Bars are the `PLACES`, or the ranges between the baseline's quantiles; for labels, classes by number as texts.
        """
        if shift.class_id is None or shift.slot is None:
            if shift.kind == "label":
                before, after = np.array(self.baseline.classes), self.classes
                shares = zip(before / before.sum(), after / self.images, strict=True)
                return [(str(class_id), float(old), float(new)) for class_id, (old, new) in enumerate(shares)]
            return self._quantities[shift.kind].histogram(0, self._counts[shift.kind])
        row = int(self._rows[self._map.entries[shift.class_id, shift.slot]])
        counts = self._slot_counts[shift.kind][self._entries[row]].sum(axis=0)
        if shift.kind != "place":
            return self._slot_edges[shift.kind].histogram(row, counts)
        measured = self._slots[row]
        return [
            (name, 0.0 if measured is None else measured.places[place], float(counts[place] / counts.sum()))
            for place, name in enumerate(PLACES)
        ]

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
        for row, (measured, entries) in enumerate(zip(self._slots, self._entries, strict=True)):
            # slots of one image are not independent of each other: pooled ones count as one
            share = self._map.max_slots if row == pooled else 1
            answers = self._slot_counts["place"][entries].sum()
            if measured is None or answers < _MIN_ANSWERS * share:
                continue
            before, after = max(measured.images // share, 1), int(answers) // share
            for name, edges in self._slot_edges.items():
                counts = self._slot_counts[name][entries]
                for test in _compare_values(name, edges, row, counts.sum(axis=0), before, after):
                    yield self._name_slot(test, entries, self._own_distances(edges, row, counts, before), row == pooled)
            yield self._compare_places(measured, entries, before, after, pooled=row == pooled)

    @staticmethod
    def _own_distances(edges: _Edges, row: int, counts: _Counts, before: int) -> DoubleArray:
        if len(counts) == 1:
            return np.zeros(1)
        enough = counts.sum(axis=1) >= _MIN_ANSWERS
        found = (edges.compare(row, own, before) if many else None for own, many in zip(counts, enough, strict=True))
        return np.array([0.0 if one is None else one[0] for one in found])

    def _compare_places(
        self, measured: SlotBaseline, entries: NDArray[np.int64], before: int, after: int, *, pooled: bool
    ) -> Shift:
        """Return the test of the place whose share differs most; its p-value accounts for all places."""
        counts = self._slot_counts["place"][entries]
        old, new = np.array(measured.places), counts.sum(axis=0) / counts.sum()
        mean = (old * before + new * after) / (before + after)
        deviations = np.abs(old - new) / np.sqrt(np.maximum(mean * (1 - mean), 1e-12))
        # among places that changed about as much, the place that slots moved to says more than the one that they left
        most = deviations >= _ABOUT_AS_MUCH * deviations.max()
        place = int(np.where(most, new - old, -np.inf).argmax())
        shares = Share(round(old[place] * before), before), Share(round(new[place] * after), after)
        test = _compare_share("place", *shares, place=place)
        test = replace(test, p=min(1.0, test.p * int(np.count_nonzero(mean))))
        own = counts[:, place] / np.maximum(counts.sum(axis=1), 1) - old[place]
        own = np.where(counts.sum(axis=1) >= _MIN_ANSWERS, own if test.rose else -own, -1.0)
        return self._name_slot(test, entries, own, pooled)

    def _name_slot(self, test: Shift, entries: NDArray[np.int64], changes: DoubleArray, pooled: bool) -> Shift:
        class_id, slot = self._map.locate(int(entries[changes.argmax()]))
        return replace(test, class_id=class_id, slot=slot, pooled=pooled)


def _adjust(tests: Sequence[Shift]) -> list[Shift]:
    """Return the tests of one family with their q-values, multiplied by the number of families."""
    if not tests:
        return []
    from scipy.stats import false_discovery_control

    all_q = false_discovery_control([test.p for test in tests]).tolist()
    return [replace(test, q=min(1.0, q * FAMILIES)) for test, q in zip(tests, all_q, strict=True)]


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
    from scipy.stats import fisher_exact

    table = [[int(share.cases), int(share.trials) - int(share.cases)] for share in (before, after)]
    p = float(fisher_exact(table)[1])
    angles = [math.asin(math.sqrt(share.value)) for share in (before, after)]
    return Shift(
        kind, p, abs(angles[1] - angles[0]), angles[1] > angles[0], before.value, after.value, int(before.trials),
        int(after.trials), **details,
    )  # fmt: skip
