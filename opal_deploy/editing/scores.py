"""The effect of dropping slots, computed from scores without the network.

A dropped slot's score becomes 0 and its class's anchor is shared among the slots that are left (`artifact.slots`); the
softmax and all other scores stay what they were. So logits for any set of drops follow from the scores [N, K] of one
pass over the images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import DoubleArray, FloatArray, embedding
from opal_deploy.artifact.slots import KL_EPSILON, Slots
from opal_deploy.editing.drops import SlotName, check_drops, parse_slots

# smallest argument of a root, as in the network (`model.distances`)
_TINY = 1e-12
# values of an array of intermediate results
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Effect:
    """What a set of drops does to the answers for N labelled images.

    Attributes:
        before, after: predicted classes, int64 [N].
        labels: int64 [N].
    """

    before: NDArray[np.int64]
    after: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def changed(self) -> NDArray[np.int64]:
        """The images whose answer changes; those that were right and become wrong come first."""
        rows = np.flatnonzero(self.before != self.after)
        rank = np.where(self.before == self.labels, 0, np.where(self.after == self.labels, 2, 1))[rows]
        ordered: NDArray[np.int64] = rows[np.argsort(rank, kind="stable")]
        return ordered

    @property
    def accuracy(self) -> tuple[float, float]:
        """The accuracy before and after, 0 ... 1."""
        return float((self.before == self.labels).mean()), float((self.after == self.labels).mean())

    @property
    def gained(self) -> int:
        """The number of images that were wrong and become right."""
        return int(((self.before != self.labels) & (self.after == self.labels)).sum())

    @property
    def lost(self) -> int:
        """The number of images that were right and become wrong."""
        return int(((self.before == self.labels) & (self.after != self.labels)).sum())

    @property
    def p_value(self) -> float:
        """McNemar's exact test (two-sided): how likely as uneven gains and losses are if both have equal chances."""
        trials, less = self.gained + self.lost, min(self.gained, self.lost)
        return min(1.0, 2 * math.fsum(math.comb(trials, k) * 0.5**trials for k in range(less + 1)))

    def by_class(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield each class whose number of correct answers changes: class, its images, correct before and after."""
        for class_id in np.unique(self.labels).tolist():
            own = self.labels == class_id
            before, after = int((self.before[own] == class_id).sum()), int((self.after[own] == class_id).sum())
            if before != after:
                yield class_id, int(own.sum()), before, after


@dataclass(frozen=True)
class Scores:
    """The scores of N labelled images, with which any set of drops can be tried.

    Attributes:
        metadata: of the model that gave them.
        values: float32 [N, K], each channel's score (paper, Eq. 3); 0 for slots that the model dropped already.
        labels: int64 [N], class indices.
    """

    metadata: Metadata
    values: FloatArray
    labels: NDArray[np.int64]

    def logits(self, slots: Slots) -> DoubleArray:
        """Return the logits of the model with these slots: float64 [N, C]."""
        rows = max(1, _CHUNK // self.values.shape[1])
        return np.concatenate(
            [
                compute_logits(self.values[start : start + rows], slots, self.metadata.distance, self.metadata.epsilon)
                for start in range(0, len(self.values), rows)
            ]
        )

    def predict(self, slots: Slots) -> NDArray[np.int64]:
        """Return the predicted classes of the model with these slots: int64 [N]."""
        # float32, as the network's: of equal logits the lowest class
        classes: NDArray[np.int64] = self.logits(slots).astype(np.float32).argmax(axis=1)
        return classes

    def try_drop(self, slots: Sequence[SlotName]) -> Effect:
        """Return the effect of dropping slots, too, such as "Gull/2" or ("Gull", 2).

        Raises:
            UsageError: the model lacks a slot or has dropped it, one is given twice, or a class has no other slot left.
        """
        channels = parse_slots(slots, self.metadata, "try_drop")
        check_drops(channels, (), self.metadata)
        return self.compare(self.metadata.slots, self.metadata.slots.drop(channels))

    def compare(self, before: Slots, after: Slots) -> Effect:
        """Return the effect of one set of slots instead of another; the model itself has the slots of both."""
        return Effect(self.predict(before), self.predict(after), self.labels)

    def try_each(self) -> Iterator[tuple[int, Effect]]:
        """Yield, for every slot that is left and not its class's last, its channel and the effect of dropping it."""
        before = self.predict(self.metadata.slots)
        answers = self._answers_without_norm() if self.metadata.distance == "l2" else self._answers_from_logits()
        for channel, after in answers:
            yield channel, Effect(before, after, self.labels)

    def _droppable(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each class that has several slots left, with their channels."""
        slots = self.metadata.slots
        for class_id in np.flatnonzero(slots.counts > 1).tolist():
            yield class_id, slots.channels(class_id).tolist()

    def _answers_from_logits(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        for _, channels in self._droppable():
            for channel in channels:
                yield channel, self.predict(self.metadata.slots.drop([channel]))

    def _answers_without_norm(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the answers without each slot by their cosines; the norm, which all classes share, decides nothing."""
        slots = self.metadata.slots
        sums = self.values.reshape(len(self.values), -1, slots.per_class).sum(axis=2, dtype=np.float64)
        cosines = sums / np.sqrt(slots.counts)
        for class_id, channels in self._droppable():
            others = cosines.copy()
            others[:, class_id] = -np.inf
            best = others.argmax(axis=1)
            highest = others[np.arange(len(best)), best]
            for channel in channels:
                own = (sums[:, class_id] - self.values[:, channel]) / math.sqrt(slots.counts[class_id] - 1)
                wins = (own > highest) | ((own == highest) & (class_id < best))
                yield channel, np.where(wins, class_id, best)


def compute_logits(scores: FloatArray, slots: Slots, distance: str, epsilon: float) -> DoubleArray:
    """Return the logits, float64 [N, C], that scores [N, K] have with these slots (paper, Eq. 4, in closed form)."""
    masked = scores * slots.kept.flatten().astype(np.float32)
    z = embedding(masked, epsilon).reshape(len(scores), slots.num_classes, slots.per_class)
    return -_DISTANCES[distance](z, slots)


def _l2(z: DoubleArray, slots: Slots) -> DoubleArray:
    distances: DoubleArray = np.sqrt(np.maximum(2.0 - 2.0 * z.sum(axis=2) / np.sqrt(slots.counts), _TINY))
    return distances


def _l1(z: DoubleArray, slots: Slots) -> DoubleArray:
    inside: DoubleArray = np.abs(z - slots.anchors).sum(axis=2)
    return _sum_outside(np.abs(z).sum(axis=2)) + inside


def _l3(z: DoubleArray, slots: Slots) -> DoubleArray:
    cubes: DoubleArray = (np.abs(z - slots.anchors) ** 3).sum(axis=2) + _sum_outside((np.abs(z) ** 3).sum(axis=2))
    distances: DoubleArray = np.cbrt(np.maximum(cubes, _TINY))
    return distances


def _kl(z: DoubleArray, slots: Slots) -> DoubleArray:
    entropy: DoubleArray = (z * np.log(z + KL_EPSILON)).sum(axis=(1, 2))[:, None]
    inside: DoubleArray = z.sum(axis=2)
    return entropy - inside * slots.head_constant("kl") - _sum_outside(inside) * math.log(KL_EPSILON)


def _linf(z: DoubleArray, slots: Slots) -> DoubleArray:
    inside: DoubleArray = np.abs(z - slots.anchors).max(axis=2)
    return np.maximum(_largest_outside(np.abs(z).max(axis=2)), inside)


def _tropical(z: DoubleArray, slots: Slots) -> DoubleArray:
    inside = z - slots.anchors
    largest: DoubleArray = np.maximum(_largest_outside(z.max(axis=2)), inside.max(axis=2))
    smallest: DoubleArray = np.minimum(-_largest_outside(-z.min(axis=2)), inside.min(axis=2))
    return largest - smallest


def _sum_outside(per_class: DoubleArray) -> DoubleArray:
    """Return for each class the sum of [N, C] over the other classes; never negative for entries that are not."""
    sums: DoubleArray = np.maximum(per_class.sum(axis=1, keepdims=True) - per_class, 0.0)
    return sums


def _largest_outside(per_class: DoubleArray) -> DoubleArray:
    """Return for each class the largest of [N, C] among the other classes."""
    best = np.sort(per_class, axis=1)[:, -2:]
    return np.where(per_class == best[:, 1:], best[:, :1], best[:, 1:])


_DISTANCES: dict[str, Callable[[DoubleArray, Slots], DoubleArray]] = {
    "l1": _l1, "l2": _l2, "l3": _l3, "kl": _kl, "linf": _linf, "tropical": _tropical,
}  # fmt: skip
