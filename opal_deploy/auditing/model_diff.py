"""Changes between two sets of records of the same images, to be read before a model is replaced.

Images are paired by their names, those of one name by their order among the inputs, classes by their labels, slots by
their numbers. Where both feature maps have the same grid, a slot moved if its cell is another; else if the centre of
its new box is outside the old one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from opal_deploy.auditing.results_reader import RecordIndex
from opal_deploy.records.record import Record, Slot

# from the worst to the least
Kind = Literal["error", "class", "cell", "contribution", "margin", "same"]
KINDS: tuple[Kind, ...] = ("error", "class", "cell", "contribution", "margin", "same")
# relative; sides of boxes of the same grid differ by rounding only
_SAME_SIDE = 1e-6


@dataclass(frozen=True)
class ImageChange:
    """The change of one image's record.

    Attributes:
        image, image_index: of the record, the index only where it has one.
        kind: the worst that happened: `error` (an answer became an error, an error an answer, or another error);
            `class`; `cell` of a slot; `contribution` of a slot, by more than the tolerance; `margin`, by more than the
            tolerance, or one is abstained and the other not.
        before, after: label or error code.
        moved: slots of the class whose place is another; None where the classes differ or a model shows no cells.
        slots: number of slots compared.
        contribution: the largest change of a slot's contribution; None where `moved` is.
        margin: after minus before; None where a record has none.
        file_changed: whether the image file is another.
    """

    image: str
    image_index: int | None
    kind: Kind
    before: str
    after: str
    moved: tuple[int, ...] | None
    slots: int
    contribution: float | None
    margin: float | None
    file_changed: bool

    def severity(self, margin_before: float) -> tuple[float, ...]:
        """Return a key that sorts the worst last: by kind, a changed class by the margin of the old answer."""
        return (
            len(KINDS) - KINDS.index(self.kind),
            margin_before if self.kind == "class" else 0.0,
            len(self.moved or ()),
            self.contribution or 0.0,
            abs(self.margin or 0.0),
        )

    def __str__(self) -> str:
        """Return one line for a person, without the image."""
        if self.kind in ("error", "class"):
            text = f"{self.before} -> {self.after}"
        elif self.kind == "same":
            text = f"{self.after}: the same"
        else:
            moved = f", {len(self.moved)} of {self.slots} cells moved" if self.moved else ""
            contribution = f", a contribution by {self.contribution:.2g}" if self.contribution else ""
            text = f"{self.after}{moved}{contribution}"
        margin = "" if self.margin is None else f", margin {self.margin:+.4f}"
        return f"{text}{margin}{' (the image is another)' if self.file_changed else ''}"


@dataclass
class DiffReport:
    """The changes of all images.

    Attributes:
        kinds: number of images by their change's kind.
        only_before, only_after: number of images in one set alone.
        unpaired: records without a name.
        file_changed: images whose file is another, so that their changes tell nothing about the models.
        slots, moved: number of slots compared, and of those that moved.
        largest_contribution: the largest change of a contribution.
        worst: the worst changes with both records, the worst first; as many as were requested.
    """

    kinds: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    only_before: int = 0
    only_after: int = 0
    unpaired: int = 0
    file_changed: int = 0
    slots: int = 0
    moved: int = 0
    largest_contribution: float = 0.0
    worst: list[tuple[ImageChange, Record, Record]] = field(default_factory=list)

    @property
    def paired(self) -> int:
        """Number of images that both sets have."""
        return sum(self.kinds.values())

    @property
    def changed(self) -> int:
        """Number of images with any change."""
        return self.paired - self.kinds["same"]

    def has(self, kind: str) -> bool:
        """Return whether any image has a change of `kind` (`any`: of any kind) or worse, or is missing in a set."""
        if self.only_before or self.only_after:
            return True
        last = KINDS[:-1].index("margin" if kind == "any" else kind)
        return any(self.kinds[name] for name in KINDS[: last + 1])

    def add(self, change: ImageChange) -> None:
        """Count one image's change."""
        self.kinds[change.kind] += 1
        self.file_changed += change.file_changed
        self.slots += change.slots
        self.moved += len(change.moved or ())
        self.largest_contribution = max(self.largest_contribution, change.contribution or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "paired": self.paired,
            "changed": self.changed,
            "kinds": self.kinds,
            "only_before": self.only_before,
            "only_after": self.only_after,
            "unpaired": self.unpaired,
            "file_changed": self.file_changed,
            "slots": self.slots,
            "slots_moved": self.moved,
            "largest_contribution_change": self.largest_contribution,
            "worst": [asdict(change) for change, _, _ in self.worst],
        }


def compare_results(before: RecordIndex, after: RecordIndex, tolerance: float, keep: int) -> DiffReport:
    """Pair records by image and compare them; in memory are the names, and the `keep` worst pairs.

    Args:
        before, after: the two sets.
        tolerance: contributions and margins that differ by no more count as equal.
        keep: number of worst pairs to keep.
    """
    report = DiffReport(unpaired=before.unnamed + after.unnamed)
    heap: list[tuple[tuple[float, ...], int, ImageChange, Record, Record]] = []
    for name in before:
        olds, news = before[name], after[name]
        report.only_before += max(0, len(olds) - len(news))
        report.only_after += max(0, len(news) - len(olds))
        for old, new in zip(olds, news, strict=False):
            change = compare_records(old, new, tolerance)
            report.add(change)
            if change.kind != "same" and keep:
                # of equals the first stay
                entry = (change.severity(old.get("margin") or 0.0), -report.paired, change, old, new)
                (heapq.heappush if len(heap) < keep else heapq.heappushpop)(heap, entry)
    report.only_after += sum(after.count(name) for name in after if before.count(name) == 0)
    report.worst = [(change, old, new) for _, _, change, old, new in sorted(heap, key=lambda e: e[:2], reverse=True)]
    return report


def compare_records(old: Record, new: Record, tolerance: float) -> ImageChange:
    """Return the change between two records of one image."""
    before, after = _label_or_code(old), _label_or_code(new)
    margin = _margin_change(old, new)
    moved: tuple[int, ...] | None = None
    largest: float | None = None
    slots = 0
    if "prediction" not in old or "prediction" not in new:
        kind: Kind = "same" if before == after and old["status"] == new["status"] else "error"
    elif before != after:
        kind = "class"
    else:
        old_slots, new_slots = old.get("evidence", []), new.get("evidence", [])
        pairs = list(zip(old_slots, new_slots, strict=False))
        slots = len(pairs)
        moved = tuple(one["slot"] for one, other in pairs if _is_moved(one, other)) if pairs else None
        largest = max(_contribution_changes(pairs), default=None)
        if moved or len(old_slots) != len(new_slots):
            kind = "cell"
        elif largest is not None and largest > tolerance:
            kind = "contribution"
        elif abs(margin or 0.0) > tolerance or old["status"] != new["status"]:
            kind = "margin"
        else:
            kind = "same"
    digests = old.get("image_sha256"), new.get("image_sha256")
    return ImageChange(
        new["image"] or "", new.get("image_index"), kind, before, after, moved, slots, largest, margin,
        file_changed=None not in digests and digests[0] != digests[1],
    )  # fmt: skip


def _label_or_code(record: Record) -> str:
    return record["error"]["code"] if "error" in record else record["prediction"]["label"]


def _margin_change(old: Record, new: Record) -> float | None:
    before, after = old.get("margin"), new.get("margin")
    return None if before is None or after is None else after - before


def _contribution_changes(pairs: list[tuple[Slot, Slot]]) -> Iterator[float]:
    for old, new in pairs:
        if old["contribution"] is not None and new["contribution"] is not None:
            yield abs(new["contribution"] - old["contribution"])


def _is_moved(old: Slot, new: Slot) -> bool:
    (x0, y0, x1, y1), (u0, v0, u1, v1) = old["box"], new["box"]
    width, height = x1 - x0, y1 - y0
    if abs((u1 - u0) - width) <= _SAME_SIDE * width and abs((v1 - v0) - height) <= _SAME_SIDE * height:
        return old["cell"] != new["cell"]
    return not (x0 <= (u0 + u1) / 2 <= x1 and y0 <= (v0 + v1) / 2 <= y1)
