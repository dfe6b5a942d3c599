"""The collector of an atlas: best patches and statistics of every slot, gathered from records in one pass.

Memory does not grow with the number of records. The result does not depend on their order: patches are ranked by
contribution to the cosine (by score if the distance has no such sum), then by image name; statistics are sums of
integers.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.records.record import Answered, Failed, Record, Slot
from opal_deploy.visualization.atlas.entries import Box, SlotStatistics
from opal_deploy.visualization.overlay import crop_box, encode_jpeg

# longest side of a patch in pixels, and JPEG quality
_PATCH_SIDE, _PATCH_QUALITY = 160, 88
# steps per 1 of the fixed-point numbers in which scores and contributions are summed
_FIXED_POINT = 1 << 32
_LISTED_FAILURES = 3


@dataclass(order=True)
class PatchCandidate:
    """A patch among a slot's best so far; candidates sort best first.

    Attributes:
        key: minus the value that patches are ranked by.
        around: (x0, y0, x1, y1) of the patch around the slot's cell; None: the patch is the cell.
        jpeg: the encoded patch; None if the image was not available.
    """

    key: float
    image: str
    sha256: str
    slot: Slot = field(compare=False)
    around: Box | None = field(compare=False, default=None)
    jpeg: bytes | None = field(compare=False, default=None)
    label: str | None = field(compare=False, default=None)

    def cut(self, image: Image.Image, size: tuple[int, int]) -> None:
        """Cut the patch out of an image, RGB, whole or reduced; `size` is the whole image's (width, height)."""
        patch = crop_box(image, self.around or self.slot.box, size)
        patch.thumbnail((_PATCH_SIDE, _PATCH_SIDE), Image.Resampling.LANCZOS)
        self.jpeg = encode_jpeg(patch, _PATCH_QUALITY)


@dataclass
class ImageCounts:
    """The number of images used for an atlas, and of those left out."""

    images: int = 0
    failed: int = 0
    wrong: int = 0
    unlabelled: int = 0
    first_failures: list[str] = field(default_factory=list)

    @property
    def used(self) -> int:
        """The number of images used."""
        return self.images - self.failed - self.wrong - self.unlabelled

    def count_failure(self, reason: str) -> None:
        """Count an image that could not be used."""
        self.failed += 1
        if len(self.first_failures) < _LISTED_FAILURES:
            self.first_failures.append(reason)


class AtlasCollector:
    """The best patches of every slot so far, and the sums behind the statistics.

    Attributes:
        top: largest number of patches per slot, without images that are known to show another class.
    """

    def __init__(self, metadata: Metadata, top: int, *, only_correct: bool = False) -> None:
        """Start with no images.

        Args:
            only_correct: leave out images whose prediction is not their label.
        """
        self.metadata, self.top, self.counts = metadata, top, ImageCounts()
        self._only_correct = only_correct
        self._class_names = frozenset(metadata.class_names)
        shape, (rows, cols) = metadata.class_map.kept.shape, metadata.grid
        # by class, slot, and whether the images are known to show another class
        self._best: dict[tuple[int, int, bool], list[PatchCandidate]] = {}
        self._labels: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._cells = np.zeros((*shape, rows * cols), np.int32)
        self._own_cell = np.zeros(shape, np.int32)
        self._strongest = np.zeros(shape, np.int32)
        self._scores = np.zeros(shape, np.int64)
        self._contributions = np.zeros(shape, np.int64)

    def add(
        self,
        record: Record,
        *,
        label: str | None = None,
        sha256: str = "",
        image: Image.Image | None = None,
    ) -> None:
        """Count a record for its predicted class, and keep its patches if they are among a slot's best.

        Args:
            label: the image's label; labels that the model does not know are ignored, as names may differ between data
                set and model.
            image: the whole oriented image, RGB, or its `to_display`; without it there are no patches.
        """
        self.counts.images += 1
        if isinstance(record, Failed):
            self.counts.count_failure(f"{record.image}: {record.error.message}")
        elif self._only_correct and label is None:
            self.counts.unlabelled += 1
        elif self._only_correct and label != record.prediction.label:
            self.counts.wrong += 1
        else:
            class_id = record.prediction.class_id
            label = label if label in self._class_names else None
            if label is not None:
                self._labels[class_id][label] += 1
            self._keep_patches(record, label, sha256, image)
            self._count_evidence(class_id, record.evidence)

    def _keep_patches(self, record: Answered, label: str | None, sha256: str, image: Image.Image | None) -> None:
        class_id, effective = record.prediction.class_id, self.metadata.effective_field
        is_other = label not in (None, self.metadata.class_names[class_id])
        for slot in record.evidence:
            around = None if effective is None else effective.surround(slot.cell, slot.box)
            candidate = PatchCandidate(-self._rank(slot), record.image or "", sha256, slot, around, label=label)
            best = self._best.setdefault((class_id, slot.slot, is_other), [])
            # one image under two names counts once
            same = next((other for other in best if other.sha256 == sha256), None)
            if same is not None and candidate < same:
                best.remove(same)
            elif same is not None or (len(best) == self.top and candidate >= best[-1]):
                continue
            if image is not None:
                candidate.cut(image, (record.width, record.height))
            bisect.insort(best, candidate)
            del best[self.top :]

    def _count_evidence(self, class_id: int, evidence: Sequence[Slot]) -> None:
        cells = [slot.cell[0] * self.metadata.grid[1] + slot.cell[1] for slot in evidence]
        self._strongest[class_id, int(np.argmax([self._rank(slot) for slot in evidence]))] += 1
        for slot, cell in zip(evidence, cells, strict=True):
            at = class_id, slot.slot
            self._cells[(*at, cell)] += 1
            self._own_cell[at] += cells.count(cell) == 1
            self._scores[at] += round(slot.score * _FIXED_POINT)
            self._contributions[at] += round((slot.contribution or 0.0) * _FIXED_POINT)

    def _rank(self, slot: Slot) -> float:
        contribution = slot.contribution
        return slot.score if contribution is None or self.metadata.distance != "l2" else contribution

    def best(self, class_id: int, slot: int) -> list[PatchCandidate]:
        """Return a slot's patches, best first.

        These are at most `top` from images that are not known to show another class, and at most `top` stronger ones
        from images that are.
        """
        own, others = (self._best.get((class_id, slot, is_other), []) for is_other in (False, True))
        if len(own) == self.top:
            others = [candidate for candidate in others if candidate < own[-1]]
        return [candidate for candidate in sorted([*own, *others]) if candidate.jpeg is not None]

    def count_images(self, class_id: int) -> int:
        """Return the number of images predicted as a class."""
        return int(self._cells[class_id, self.metadata.class_map.slots(class_id)[0]].sum())

    def count_labels(self) -> dict[int, dict[str, int]]:
        """Return for each predicted class the number of images by their labels, if these are known."""
        return {class_id: dict(sorted(counts.items())) for class_id, counts in sorted(self._labels.items())}

    def statistics(self, class_id: int, slot: int) -> SlotStatistics:
        """Return the statistics of a slot."""
        at = class_id, slot
        count = self.count_images(class_id)
        if not count:
            return SlotStatistics(0)
        cells = self._cells[at]
        top = int(cells.argmax())
        has_contributions = self.metadata.distance not in ("linf", "tropical")
        return SlotStatistics(
            count,
            own_cell=int(self._own_cell[at]) / count,
            strongest=int(self._strongest[at]) / count,
            mean_score=int(self._scores[at]) / _FIXED_POINT / count,
            mean_contribution=int(self._contributions[at]) / _FIXED_POINT / count if has_contributions else None,
            top_cell=divmod(top, self.metadata.grid[1]),
            top_cell_share=int(cells[top]) / count,
            entropy=_entropy(cells),
            spread=_spread(cells, self.metadata.grid),
        )

    def count_cells(self) -> tuple[int, ...]:
        """Return how often each of the H * W cells was chosen, row by row."""
        return tuple(int(count) for count in self._cells.sum(axis=(0, 1), dtype=np.int64))

    def describe_model(self) -> Mapping[str, Any]:
        """Return the properties of the model that an atlas holds: checkpoint, backbone, precision, grid, ..."""
        names = ("backbone", "precision", "prototypes_per_class", "distance")
        own = {name: getattr(self.metadata, name) for name in names}
        return {
            "checkpoint_sha256": self.metadata.source.get("sha256"),
            **own,
            "dropped": list(self.metadata.dropped),
            "grid": list(self.metadata.grid),
        }


def _entropy(cells: NDArray[np.int32]) -> float:
    shares = cells[cells > 0] / cells.sum()
    return max(0.0, float(-(shares * np.log2(shares)).sum()))


def _spread(cells: NDArray[np.int32], grid: tuple[int, int]) -> float:
    rows, cols = grid
    # a prototype that no record lists was seen nowhere
    shares = cells.reshape(rows, cols) / max(int(cells.sum()), 1)
    y, x = np.mgrid[:rows, :cols].astype(np.float64)
    y, x = (y + 0.5) / rows, (x + 0.5) / cols
    variance = (shares * ((x - (shares * x).sum()) ** 2 + (y - (shares * y).sum()) ** 2)).sum()
    return math.sqrt(max(0.0, float(variance)) / 2)
