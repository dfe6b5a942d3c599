"""The collector of an atlas: best patches and statistics of every slot, gathered from records in one pass.

Memory does not grow with the number of records. Patches are ranked by contribution to the cosine (by score if the
distance has no such sum), then by image name, so that they do not depend on the records' order.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.records.record import Answered, Failed, Record, Slot
from opal_deploy.visualization.atlas.entries import AtlasPatch, SlotEntry, SlotStatistics, name_patch
from opal_deploy.visualization.overlay import crop_box, encode_jpeg

# longest side of a patch in pixels, and JPEG quality
_PATCH_SIDE, _PATCH_QUALITY = 160, 88


@dataclass(order=True)
class Candidate:
    """A patch among a slot's best so far; candidates sort best first. `key` is minus the value that ranks them."""

    key: float
    image: str
    patch: AtlasPatch = field(compare=False)
    jpeg: bytes = field(compare=False)


class AtlasCollector:
    """The best patches of every slot so far, and the sums behind the statistics.

    Attributes:
        top: largest number of patches per slot.
        images, failed: number of images so far, and of those that could not be used.
        labels: for each predicted class, the number of images by their labels, if these are known.
    """

    def __init__(self, metadata: Metadata, top: int) -> None:
        """Start with no images."""
        self.metadata, self.top = metadata, top
        self.images = self.failed = 0
        self.labels: defaultdict[int, Counter[str]] = defaultdict(Counter)
        shape, (rows, cols) = metadata.class_map.kept.shape, metadata.grid
        self._best: defaultdict[tuple[int, int], list[Candidate]] = defaultdict(list)
        self._cells = np.zeros((*shape, rows * cols), np.int32)
        self._own_cell, self._strongest = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self._scores, self._contributions = np.zeros(shape), np.zeros(shape)

    def add(
        self, record: Record, *, label: str | None = None, sha256: str = "", image: Image.Image | None = None
    ) -> None:
        """Count a record for its predicted class, and keep its patches if they are among a slot's best.

        Args:
            label: the image's label; labels that the model does not know are ignored, as names may differ between data
                set and model. Images of another label than the prediction are counted, but give no patches.
            image: the whole oriented image, RGB, or its `to_display`; without it there are no patches.
        """
        self.images += 1
        if isinstance(record, Failed):
            self.failed += 1
            return
        class_id = record.prediction.class_id
        label = label if label in self.metadata.class_names else None
        if label is not None:
            self.labels[class_id][label] += 1
        if image is not None and label in (None, record.prediction.label):
            self._keep_patches(record, label, sha256, image)
        cells = [slot.cell[0] * self.metadata.grid[1] + slot.cell[1] for slot in record.evidence]
        strongest = max(record.evidence, key=self._rank)
        self._strongest[class_id, strongest.slot] += 1
        for slot, cell in zip(record.evidence, cells, strict=True):
            at = class_id, slot.slot
            self._cells[(*at, cell)] += 1
            self._own_cell[at] += cells.count(cell) == 1
            self._scores[at] += slot.score
            self._contributions[at] += slot.contribution or 0.0

    def _keep_patches(self, record: Answered, label: str | None, sha256: str, image: Image.Image) -> None:
        effective, name = self.metadata.effective_field, record.image or ""
        for slot in record.evidence:
            key, best = -self._rank(slot), self._best[record.prediction.class_id, slot.slot]
            # one image under two names counts once
            same = next((other for other in best if sha256 and other.patch.sha256 == sha256), None)
            worst = same or (best[-1] if len(best) == self.top else None)
            if worst is not None and (key, name) >= (worst.key, worst.image):
                continue
            around = None if effective is None else effective.surround(slot.cell, slot.box)
            cut = crop_box(image, around or slot.box, (record.width, record.height))
            cut.thumbnail((_PATCH_SIDE, _PATCH_SIDE), Image.Resampling.LANCZOS)
            jpeg = encode_jpeg(cut, _PATCH_QUALITY)
            patch = AtlasPatch(
                name, sha256, slot.cell, slot.box, slot.score, slot.contribution, name_patch(jpeg), around, label
            )
            if worst is not None:
                best.remove(worst)
            bisect.insort(best, Candidate(key, name, patch, jpeg))

    def _rank(self, slot: Slot) -> float:
        contribution = slot.contribution
        return slot.score if contribution is None or self.metadata.distance != "l2" else contribution

    def best(self, class_id: int, slot: int) -> list[Candidate]:
        """Return a slot's patches, best first."""
        return self._best[class_id, slot]

    def entry(self, class_id: int, slot: int) -> SlotEntry:
        """Return a slot's statistics and patches as the atlas holds them."""
        patches = tuple(candidate.patch for candidate in self.best(class_id, slot))
        return SlotEntry(class_id, slot, self.statistics(class_id, slot), patches)

    def statistics(self, class_id: int, slot: int) -> SlotStatistics:
        """Return the statistics of a slot."""
        at = class_id, slot
        count = int(self._cells[class_id, self.metadata.class_map.slots(class_id)[0]].sum())
        if not count:
            return SlotStatistics(0)
        cells = self._cells[at]
        top = int(cells.argmax())
        has_contributions = self.metadata.distance not in ("linf", "tropical")
        return SlotStatistics(
            count,
            own_cell=int(self._own_cell[at]) / count,
            strongest=int(self._strongest[at]) / count,
            mean_score=float(self._scores[at]) / count,
            mean_contribution=float(self._contributions[at]) / count if has_contributions else None,
            top_cell=divmod(top, self.metadata.grid[1]),
            top_cell_share=int(cells[top]) / count,
        )

    def count_cells(self) -> tuple[int, ...]:
        """Return how often each of the H * W cells was chosen, row by row."""
        return tuple(int(count) for count in self._cells.sum(axis=(0, 1), dtype=np.int64))
