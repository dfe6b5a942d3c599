"""The class map: which prototypes speak for which class, with what weight, and each class's bias.

A prototype is a channel of the scores [N, P]. A class's slots are its channels, ascending, numbered from 0. Where
classes share prototypes, a slot's number is its channel, and one without weight is no slot. The class's total is the
weighted sum of its slots' values, plus its bias, and every slot contributes its part of that sum.

OPAL's map is one case (`ClassMap.blocks`): class c has the channels c*m ... c*m+m-1, no bias, and weights of length 1,
its anchor (paper, Eq. 1). On an embedding its totals are cosines. Other heads share prototypes among classes, with
weights of either sign (`ClassMap.from_matrix`). No other module computes channels from classes, or classes from
channels; `visualization/pages/class_map.js` has the same arithmetic for browsers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

DoubleArray = NDArray[np.float64]
LongArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClassMap:
    """The slots of C classes with P prototypes. Tables are [C, S], S the largest number of slots of a class.

    Attributes:
        num_prototypes: P.
        offsets: int64 [C + 1]; the slots of class c are the entries offsets[c] ... offsets[c + 1] - 1 of the next two.
        prototypes: int64, each slot's channel, ascending within a class.
        strengths: float64, each slot's weight before anything is dropped or scaled.
        biases: float64 [C].
        unit_length: whether each class's weights are scaled to length 1, so that dropping one raises the others.
        dropped: channels of dropped slots, ascending; they keep their numbers and have weight 0.
    """

    num_prototypes: int
    offsets: LongArray
    prototypes: LongArray
    strengths: DoubleArray
    biases: DoubleArray
    unit_length: bool = False
    dropped: tuple[int, ...] = ()

    @staticmethod
    def blocks(num_classes: int, slots: int, dropped: Iterable[int] = ()) -> ClassMap:
        """Return OPAL's map of C classes with m slots each."""
        count = num_classes * slots
        return ClassMap(
            count, np.arange(num_classes + 1) * slots, np.arange(count), np.ones(count), np.zeros(num_classes),
            unit_length=True, dropped=tuple(dropped),
        )  # fmt: skip

    @staticmethod
    def from_matrix(weights: DoubleArray, biases: DoubleArray) -> ClassMap:
        """Return the map of weights [C, P], whose zeros are no slots, and biases [C]."""
        count, size = weights.shape
        return ClassMap(
            size,
            np.arange(count + 1) * size,
            np.tile(np.arange(size), count),
            weights.ravel().astype(np.float64),
            biases,
        )

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return len(self.biases)

    @cached_property
    def sizes(self) -> LongArray:
        """The number of slots of each class, dropped ones included: int64 [C]."""
        return np.diff(self.offsets)

    @cached_property
    def max_slots(self) -> int:
        """The largest number of slots of a class, S, dropped ones included; at least 1."""
        return max(1, int(self.sizes.max(initial=0)))

    @cached_property
    def listed(self) -> NDArray[np.bool_]:
        """Whether a class has a slot of this number, dropped or not: bool [C, S]. False entries pad the tables."""
        listed: NDArray[np.bool_] = np.arange(self.max_slots) < self.sizes[:, None]
        return listed

    @cached_property
    def entries(self) -> LongArray:
        """The number of each slot among the slots of all classes: int64 [C, S]; padded with the class's last slot."""
        last = np.maximum(self.offsets[1:] - 1, 0)[:, None]
        entries: LongArray = np.minimum(self.offsets[:-1, None] + np.arange(self.max_slots), last)
        return entries

    @cached_property
    def channel_table(self) -> LongArray:
        """The channel of each slot: int64 [C, S]; padded with the class's last channel."""
        return self.prototypes[self.entries]

    @cached_property
    def kept_prototypes(self) -> NDArray[np.bool_]:
        """Whether a prototype was not dropped: bool [P]."""
        kept = np.ones(self.num_prototypes, np.bool_)
        kept[list(self.dropped)] = False
        return kept

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """Whether a slot exists, has a weight and was not dropped: bool [C, S]."""
        kept: NDArray[np.bool_] = self._has_weight & self.kept_prototypes[self.channel_table]
        return kept

    @cached_property
    def supporting(self) -> NDArray[np.bool_]:
        """Whether a slot speaks for its class, with a positive weight: bool [C, S]."""
        supporting: NDArray[np.bool_] = self.kept & (self.strengths[self.entries] > 0)
        return supporting

    @cached_property
    def _has_weight(self) -> NDArray[np.bool_]:
        has_weight: NDArray[np.bool_] = self.listed & (self.strengths[self.entries] != 0)
        return has_weight

    @cached_property
    def counts(self) -> LongArray:
        """The number of slots that each class has left, m_c: int64 [C]."""
        counts: LongArray = self.kept.sum(axis=1)
        return counts

    @cached_property
    def silenced(self) -> NDArray[np.bool_]:
        """Whether all slots of a class were dropped: bool [C]."""
        silenced: NDArray[np.bool_] = (self.counts == 0) & self._has_weight.any(axis=1)
        return silenced

    @cached_property
    def weights(self) -> DoubleArray:
        """The weight of each slot: float64 [C, S]; 0 for dropped slots and padding."""
        weights: DoubleArray = np.where(self.kept, self.strengths[self.entries], 0.0)
        return weights / np.sqrt((weights**2).sum(axis=1))[:, None] if self.unit_length else weights

    @cached_property
    def matrix(self) -> DoubleArray:
        """The weights as a matrix W, float64 [C, P]."""
        matrix = np.zeros((self.num_classes, self.num_prototypes))
        matrix[np.nonzero(self.listed)[0], self.prototypes] = self.weights[self.listed]
        return matrix

    @cached_property
    def _is_blocks(self) -> bool:
        """Whether the channels of all classes follow each other in blocks of S: these can be viewed as [N, C, S]."""
        return self.num_prototypes == self.listed.size and np.array_equal(
            self.channel_table.ravel(), np.arange(self.num_prototypes)
        )

    def slots(self, class_id: int) -> list[int]:
        """Return the slots that a class has left, ascending."""
        return [int(slot) for slot in np.flatnonzero(self.kept[class_id])]

    def channels(self, class_id: int) -> LongArray:
        """Return the channels of the slots that a class has left: int64 [m_c]."""
        channels: LongArray = self.channel_table[class_id, self.kept[class_id]]
        return channels

    def slot_of(self, class_id: int, channel: int) -> int:
        """Return the number of a channel among a class's slots."""
        start, stop = self.offsets[class_id : class_id + 2]
        return int(np.searchsorted(self.prototypes[start:stop], channel))

    def locate(self, entry: int) -> tuple[int, int]:
        """Return class and slot by the slot's number among the slots of all classes, see `entries`."""
        class_id = int(np.searchsorted(self.offsets, entry, side="right")) - 1
        return class_id, int(entry - self.offsets[class_id])

    def owners(self, channel: int) -> list[tuple[int, int]]:
        """Return (class, slot) of every class that a channel speaks for."""
        speaks = (self.prototypes == channel) & (self.strengths != 0)
        return [self.locate(int(entry)) for entry in np.flatnonzero(speaks)]

    def with_dropped(self, channels: Iterable[int]) -> ClassMap:
        """Return the map in which these channels and no others are dropped."""
        return replace(self, dropped=tuple(sorted({*channels})))

    def drop(self, channels: Iterable[int]) -> ClassMap:
        """Return the map with these channels dropped as well."""
        return self.with_dropped({*self.dropped, *channels})

    def take(self, values: NDArray[Any], class_ids: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Return the values of some classes' slots: [N, P, ...] and int [N] or [N, k] to [N, S, ...] or [N, k, S, ...].

        Padding (see `listed`) repeats the class's last slot.
        """
        rows = np.arange(len(values)).reshape(-1, *[1] * class_ids.ndim)
        taken: NDArray[Any] = values[rows, self.channel_table.take(class_ids, axis=0)]
        return taken

    def contributions(self, taken: NDArray[Any], class_ids: NDArray[np.integer[Any]] | int) -> DoubleArray:
        """Return what each slot adds to its class's total, float64 [..., S], from `take`'s values and int [...]."""
        parts: DoubleArray = taken * self.weights.take(class_ids, axis=0)
        return parts

    def totals(self, taken: NDArray[Any], class_ids: NDArray[np.integer[Any]] | int) -> DoubleArray:
        """Return the totals of some classes, float64 [...], from `take`'s values [..., S] and int [...]."""
        # `take` and `einsum`: three times as fast as indices, a product and a sum
        sums: DoubleArray = np.einsum("...s,...s->...", taken, self.weights.take(class_ids, axis=0))
        sums += self.biases[class_ids]
        return sums

    def all_totals(self, values: NDArray[Any]) -> DoubleArray:
        """Return the totals of all classes: values [N, P] to float64 [N, C]."""
        if self._is_blocks:
            return self.totals(values.reshape(len(values), *self.weights.shape), np.arange(self.num_classes))
        totals: DoubleArray = values @ self.matrix.T + self.biases
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Return the map for JSON, which `class_map.js` reads."""
        return {field.name: np.asarray(getattr(self, field.name)).tolist() for field in fields(self)}


def find_margins(totals: DoubleArray) -> DoubleArray:
    """Return the best class's total minus the runner-up's, float64 [N], from totals [N, k], the best first.

    NaN for a model of one class.
    """
    if totals.shape[1] < 2:
        return np.full(len(totals), np.nan)
    differences: DoubleArray = totals[:, 0] - totals[:, 1]
    return differences
