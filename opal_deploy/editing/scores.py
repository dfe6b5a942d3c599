"""The effect of dropping slots, computed from scores without the network.

A dropped slot's score becomes 0 and its class's anchor is shared among the slots that are left (`ClassMap`); the
softmax and all other scores stay what they were. So logits for any set of drops follow from the scores [N, K] of one
pass over the images.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.drops import SlotName, check_drops, parse_slots
from opal_deploy.artifact.heads import compute_logits
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import DoubleArray, FloatArray, IntArray
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.inputs import Annotations, read_inputs
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.logs import as_progress
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.runtime.select import open_sessions


@dataclass(frozen=True)
class Effect:
    """The effect of a set of drops on N labelled images: predicted classes before and after, and labels, int64 [N]."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]
    labels: NDArray[np.int64]

    @property
    def changed(self) -> NDArray[np.int64]:
        """The images whose answer changes; right answers that become wrong come first."""
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
        """The two-sided p-value of McNemar's exact test for these gains and losses."""
        trials, less = self.gained + self.lost, min(self.gained, self.lost)
        return min(1.0, 2 * math.fsum(math.comb(trials, k) * 0.5**trials for k in range(less + 1)))


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

    def logits(self, class_map: ClassMap) -> DoubleArray:
        """Return the logits of the model with this map: float64 [N, C]."""
        return compute_logits(self.values, class_map, self.metadata)

    def predict(self, class_map: ClassMap) -> NDArray[np.int64]:
        """Return the predicted classes of the model with this map: int64 [N]."""
        # float32, as the network's: of equal logits the lowest class
        classes: NDArray[np.int64] = self.logits(class_map).astype(np.float32).argmax(axis=1)
        return classes

    def try_drop(self, slots: Sequence[SlotName]) -> Effect:
        """Return the effect of dropping more slots, such as "Gull/2" or ("Gull", 2).

        Raises:
            UsageError: the model lacks a slot or has dropped it, one is given twice, or a class has no other slot left.
        """
        channels = parse_slots(slots, self.metadata, "try_drop")
        check_drops(channels, self.metadata)
        return self.drop(channels)

    def drop(self, channels: Sequence[int]) -> Effect:
        """Return the effect of dropping more slots, given by their channels."""
        class_map = self.metadata.class_map
        return Effect(self.predict(class_map), self.predict(class_map.drop(channels)), self.labels)

    def try_each(
        self, class_map: ClassMap | None = None, among: Collection[int] | None = None
    ) -> Iterator[tuple[int, Effect]]:
        """Yield, for every slot that is left and not its class's last, its channel and the effect of dropping it.

        Args:
            class_map: the slots that are left; None: the model's.
            among: channels that are tried; None: all.
        """
        class_map = self.metadata.class_map if class_map is None else class_map
        before = self.predict(class_map)
        tried = {
            class_id: [slot for slot in class_map.channels(class_id).tolist() if among is None or slot in among]
            for class_id in np.flatnonzero(class_map.counts > 1).tolist()
        }
        if self.metadata.is_opal:
            # the norm, which all classes share, decides nothing
            cosines = class_map.all_totals(self.values)
            for class_id, channels in tried.items():
                for channel, after in self._answers_without(class_map, cosines, class_id, channels):
                    yield channel, Effect(before, after, self.labels)
            return
        for channel in sorted({channel for channels in tried.values() for channel in channels}):
            left = class_map.drop([channel])
            # a shared prototype may be another class's last
            if not left.silenced.any():
                yield channel, Effect(before, self.predict(left), self.labels)

    def _answers_without(
        self, class_map: ClassMap, cosines: DoubleArray, class_id: int, channels: Sequence[int]
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield the answers without each of a class's slots by their cosines, [N, C]."""
        if not channels:
            return
        others = cosines.copy()
        others[:, class_id] = -np.inf
        best = others.argmax(axis=1)
        highest = others[np.arange(len(best)), best]
        taken = class_map.take(self.values, np.full(len(best), class_id))
        for channel in channels:
            own = class_map.drop([channel]).totals(taken, class_id)
            wins = (own > highest) | ((own == highest) & (class_id < best))
            yield channel, np.where(wins, class_id, best)


@dataclass(frozen=True)
class ScoredData:
    """N labelled images with the model's scores and cells.

    Attributes:
        scores: their scores and labels.
        cells: int32 [N, K], flat row-major cell of each channel's maximum.
        samples, geometries: N images, and how each became the model's input.
        annotations: objects and parts; may be empty.
        root: the data set's folder.
        split: its images that were measured.
    """

    scores: Scores
    cells: IntArray
    samples: list[Sample]
    geometries: list[Geometry]
    annotations: Annotations
    root: Path
    split: str = "val"

    @property
    def metadata(self) -> Metadata:
        """The model's metadata."""
        return self.scores.metadata


def score_data(path: Path, metadata: Metadata, data: Path, options: EvaluateOptions) -> ScoredData:
    """Run the model on the data set's images; raise UsageError for a data set or an image that cannot be used."""
    inputs = read_inputs(data, path, metadata, options)
    session = open_sessions(path, device=options.device, threads=options.threads)[0]
    progress = as_progress(options.progress)
    measured = evaluate_session(
        session, inputs.samples, boxes=options.boxes, batch=options.batch, progress=progress, model=str(path)
    )
    outputs = measured.outputs
    assert outputs.scores is not None  # evidence is exact
    assert outputs.argmax is not None
    return ScoredData(
        Scores(session.metadata, outputs.scores, measured.labels), outputs.argmax, inputs.samples, measured.geometries,
        inputs.annotations, inputs.data.root, options.split,
    )  # fmt: skip
