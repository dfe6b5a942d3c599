"""Records in, the best patches and the figures of every slot out: one pass, in memory that does not grow with it.

What is kept depends on the set of records, not on their order: patches are ranked by their contribution to the cosine
(by their score where the distance has no such sum), then by the picture's name.

The to-do list that an atlas writes for a model's owner: slots that do not do what a slot is for.

Each rule looks at one slot over the pictures that its class was predicted for, and only where there are enough of them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.records.record import Record, Slot
from opal_deploy.visualization.atlas.entries import Finding, SlotStatistics
from opal_deploy.visualization.overlay import encode_jpeg
from opal_deploy.visualization.sheet.images import crop_box

# a patch is shown small; what is larger is made smaller
_LONGEST, _QUALITY = 160, 88


@dataclass(order=True)
class PatchCandidate:
    """A patch that is among a slot's best so far; sorts the best first.

    Attributes:
        key: minus what it is ranked by. image: the picture's name. sha256: of its file.
        slot: its evidence.
        jpeg: the patch; None until it is cut.
        source: where the picture is, while `jpeg` is None.
    """

    key: float
    image: str
    sha256: str
    slot: Slot = field(compare=False)
    jpeg: bytes | None = field(compare=False, default=None)
    source: Any = field(compare=False, default=None)

    def cut(self, picture: Image.Image) -> None:
        """Keep the patch of `picture`, RGB, the whole oriented picture."""
        found = crop_box(picture, self.slot["box"])
        found.thumbnail((_LONGEST, _LONGEST), Image.Resampling.LANCZOS)
        self.jpeg, self.source = encode_jpeg(found, _QUALITY), None


class AtlasCollector:
    """The best patches of every slot so far, and sums for its figures."""

    def __init__(self, metadata: Metadata, top: int) -> None:
        """`top`: patches a slot. The model's evidence must be `exact`."""
        self.metadata, self.top = metadata, top
        classes, m = metadata.num_classes, metadata.prototypes_per_class
        rows, cols = metadata.grid
        self._best: dict[tuple[int, int], list[PatchCandidate]] = {}
        self._cells = np.zeros((classes, m, rows * cols), np.int32)
        self._own = np.zeros((classes, m), np.int32)
        self._strongest = np.zeros((classes, m), np.int32)
        # sums of integers, so that their order does not matter to the last bit
        self._scores = np.zeros((classes, m), np.int64)
        self._contributions = np.zeros((classes, m), np.int64)

    def add(self, record: Record, digest: Callable[[], str], picture: Image.Image | None, source: object) -> None:
        """Take an answered picture into account, for the class that it was predicted as.

        Args:
            record: with `evidence`.
            digest: the sha256 of the picture's file; asked only if a patch is kept.
            picture: whole, RGB, where it is at hand; else patches are cut later, see `uncut`.
            source: where the picture is.

        Whatever `digest` raises is raised, and nothing was taken into account.
        """
        class_id, evidence = record["prediction"]["class_id"], record["evidence"]
        name = record["image"] or ""
        ranked = [_rank(slot, self.metadata.distance) for slot in evidence]
        entering = [
            PatchCandidate(-value, name, "", slot, None, source)
            for slot, value in zip(evidence, ranked, strict=True)
            if self._is_wanted(class_id, slot["slot"], -value, name)
        ]
        # before anything is counted: a file that cannot be read any more counts for nothing
        sha256 = digest() if entering else ""
        for candidate in entering:
            candidate.sha256 = sha256
            self._enter(self._best.setdefault((class_id, candidate.slot["slot"]), []), candidate, picture)
        chosen = [slot["cell"][0] * self.metadata.grid[1] + slot["cell"][1] for slot in evidence]
        self._strongest[class_id, int(np.argmax(ranked))] += 1
        for slot, cell in zip(evidence, chosen, strict=True):
            at = class_id, slot["slot"]
            self._cells[(*at, cell)] += 1
            self._own[at] += chosen.count(cell) == 1
            self._scores[at] += _fixed(slot["score"])
            self._contributions[at] += _fixed(slot["contribution"] or 0.0)

    def _is_wanted(self, class_id: int, slot: int, key: float, name: str) -> bool:
        best = self._best.get((class_id, slot), [])
        return len(best) < self.top or (key, name) < (best[-1].key, best[-1].image)

    def _enter(self, best: list[PatchCandidate], candidate: PatchCandidate, picture: Image.Image | None) -> None:
        # one picture under two names is one example
        twin = next((index for index, each in enumerate(best) if each.sha256 == candidate.sha256), None)
        if twin is not None:
            if best[twin] <= candidate:
                return
            del best[twin]
        if picture is not None:
            candidate.cut(picture)
        bisect.insort(best, candidate)
        del best[self.top :]

    def uncut(self) -> Iterator[PatchCandidate]:
        """Those kept whose patch is still to be cut."""
        for best in self._best.values():
            yield from (candidate for candidate in best if candidate.jpeg is None)

    def best(self, class_id: int, slot: int) -> list[PatchCandidate]:
        """A slot's patches, best first; those that could not be cut are left out."""
        return [candidate for candidate in self._best.get((class_id, slot), []) if candidate.jpeg is not None]

    def images(self, class_id: int) -> int:
        """Pictures that the class was predicted for."""
        return int(self._cells[class_id, 0].sum())

    def figures(self, class_id: int, slot: int) -> SlotStatistics:
        """How the slot behaved."""
        at = class_id, slot
        count = self.images(class_id)
        if not count:
            return SlotStatistics(0, None, None, None, None, None, None, None, None)
        cells = self._cells[at]
        top = int(cells.argmax())
        row, col = divmod(top, self.metadata.grid[1])
        known = self.metadata.distance not in ("linf", "tropical")
        return SlotStatistics(
            count,
            int(self._own[at]) / count,
            int(self._strongest[at]) / count,
            int(self._scores[at]) / _UNIT / count,
            int(self._contributions[at]) / _UNIT / count if known else None,
            (row, col),
            int(cells[top]) / count,
            _entropy(cells),
            _spread(cells, self.metadata.grid),
        )

    def cells(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """How often each cell was chosen by any slot: int64 [H * W]."""
        return self._cells.sum(axis=(0, 1), dtype=np.int64)  # type: ignore[no-any-return]


_UNIT = 1 << 32


def _fixed(value: float) -> int:
    return round(value * _UNIT)


def _rank(slot: Slot, distance: str) -> float:
    contribution = slot["contribution"]
    return slot["score"] if contribution is None or distance != "l2" else contribution


def _entropy(cells: np.ndarray[Any, np.dtype[np.int32]]) -> float:
    shares = cells[cells > 0] / cells.sum()
    return max(0.0, float(-(shares * np.log2(shares)).sum()))


def _spread(cells: np.ndarray[Any, np.dtype[np.int32]], grid: tuple[int, int]) -> float:
    rows, cols = grid
    shares = cells.reshape(rows, cols) / cells.sum()
    y, x = np.mgrid[:rows, :cols].astype(np.float64)
    y, x = (y + 0.5) / rows, (x + 0.5) / cols
    variance = (shares * ((x - (shares * x).sum()) ** 2 + (y - (shares * y).sum()) ** 2)).sum()
    return math.sqrt(max(0.0, float(variance)) / 2)


# fewer pictures say nothing about a habit
FEWEST_IMAGES = 5
# a slot that has its cell to itself in fewer pictures than this shows nothing that another does not
OWN_CELL = 0.1
# a slot whose mean contribution is less than this share of an equal part adds little
EQUAL_PART = 0.2
# a slot that chooses the same cell in more pictures than this looks at a place, not at a part of the object
ONE_PLACE = 0.5


def list_findings(class_id: int, label: str, slots: Sequence[SlotStatistics]) -> list[Finding]:
    """What is wrong with a class's slots, in their order."""
    if not slots[0].images:
        return [
            Finding("never_predicted", class_id, None, 0.0, f"{label}: predicted for no picture, so it has no patches")
        ]
    if slots[0].images < FEWEST_IMAGES:
        return []
    found = []
    parts = [figures.mean_contribution for figures in slots]
    known = [part for part in parts if part is not None]
    equal = sum(known) / len(known) if len(known) == len(slots) else None
    for slot, figures in enumerate(slots):
        who = f"{label}, slot {slot}"
        if len(slots) > 1 and figures.own_cell is not None and figures.own_cell < OWN_CELL:
            text = f"{who}: has a cell to itself in only {figures.own_cell:.0%} of {figures.images} pictures"
            found.append(Finding("shares_its_cell", class_id, slot, figures.own_cell, text))
        part = parts[slot]
        if equal is not None and part is not None and equal > 0 and part < EQUAL_PART * equal:
            text = f"{who}: adds {part:.3f} on average, where an equal part would be {equal:.3f}"
            found.append(Finding("adds_little", class_id, slot, part, text))
        share = figures.top_cell_share
        if share is not None and figures.top_cell is not None and share > ONE_PLACE:
            row, col = figures.top_cell
            text = f"{who}: looks at cell {row}, {col} in {share:.0%} of {figures.images} pictures, whatever they show"
            found.append(Finding("one_place", class_id, slot, share, text))
    return found
