"""What changed between two sets of records of the same images: what one reads before a model is replaced.

Images are paired by their names, classes by their labels, slots by their numbers. Where both feature maps have the same
grid, a slot moved if its cell is another; else if the centre of its new box is outside the old one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from opal_deploy.auditing.results_reader import RecordIndex
from opal_deploy.records.record import Record, Slot

# from the worst to the least
Kind = Literal["error", "class", "cell", "contribution", "margin", "same"]
KINDS: tuple[Kind, ...] = ("error", "class", "cell", "contribution", "margin", "same")
# a side of two boxes of one grid differs by rounding only
_SAME_SIDE = 1e-6


@dataclass(frozen=True)
class Change:
    """What became of one image.

    Attributes:
        kind: the worst that happened: `error` (an answer became an error, an error an answer, or another error);
            `class`; `cell`: a slot's; `contribution`: a slot's, by more than the tolerance; `margin`: by more than the
            tolerance, or one is abstained and the other not.
        before, after: label or error code.
        moved: slots of the class whose place is another; None where the classes differ or a model shows no cells.
        slots: that were compared.
        contribution: the largest change of one; None as above.
        margin: after minus before; None where one has none.
        file_changed: the image itself is another.
    """

    image: str
    kind: Kind
    before: str
    after: str
    moved: tuple[int, ...] | None
    slots: int
    contribution: float | None
    margin: float | None
    file_changed: bool

    def severity(self, margin_before: float) -> tuple[float, ...]:
        """Sorts the worst last: by kind; a changed class by how sure the first model was of its own."""
        return (
            len(KINDS) - KINDS.index(self.kind),
            margin_before if self.kind == "class" else 0.0,
            len(self.moved or ()),
            self.contribution or 0.0,
            abs(self.margin or 0.0),
        )

    def __str__(self) -> str:
        """One line for a person, without the image."""
        if self.kind in ("error", "class"):
            what = f"{self.before} -> {self.after}"
        elif self.kind == "same":
            what = f"{self.after}: the same"
        else:
            moved = f", {len(self.moved)} of {self.slots} cells moved" if self.moved else ""
            part = f", a contribution by {self.contribution:.2g}" if self.contribution else ""
            what = f"{self.after}{moved}{part}"
        margin = "" if self.margin is None else f", margin {self.margin:+.4f}"
        return f"{what}{margin}{' (the image is another)' if self.file_changed else ''}"


@dataclass
class Changes:
    """What became of all images.

    Attributes:
        kinds: images by the worst that happened to them.
        only_before, only_after: images that one side has alone. unpaired: records without a name, or with one that
            occurred before.
        file_changed: images whose file is another, so that their changes say nothing of the models.
        slots, moved: compared and moved.
        largest_contribution: change.
        worst: the changed images, the worst first, with both records; as many as were wanted.
    """

    kinds: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    only_before: int = 0
    only_after: int = 0
    unpaired: int = 0
    file_changed: int = 0
    slots: int = 0
    moved: int = 0
    largest_contribution: float = 0.0
    worst: list[tuple[Change, Record, Record]] = field(default_factory=list)

    @property
    def paired(self) -> int:
        """Images that both sides have."""
        return sum(self.kinds.values())

    @property
    def changed(self) -> int:
        """Of these, with any change."""
        return self.paired - self.kinds["same"]

    def has(self, kind: str) -> bool:
        """Whether any image changed so much, or worse; `any`: at all. Images of one side alone count as errors."""
        worst = KINDS[-2] if kind == "any" else kind
        missing = self.only_before + self.only_after
        return bool(missing) or any(count for name, count in self.kinds.items() if _at_least(name, worst))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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


def compare_records(before: Iterable[Record], after: RecordIndex, tolerance: float, keep: int) -> Changes:
    """Pair records and say what changed; in memory are the names, and the `keep` worst pairs.

    Args:
        before: the records of one side.
        after: those of the other.
        tolerance: contributions and margins that differ by no more count as equal.
        keep: pairs to keep.
    """
    changes = Changes(unpaired=after.repeated + after.unnamed)
    seen: set[str] = set()
    heap: list[tuple[tuple[float, ...], int, Change, Record, Record]] = []
    for number, old in enumerate(before):
        name = old["image"]
        if name is None or name in seen:
            changes.unpaired += 1
            continue
        seen.add(name)
        if name not in after.offsets:
            changes.only_before += 1
            continue
        new = after[name]
        change = change_of(old, new, tolerance)
        _count(changes, change)
        if change.kind != "same" and keep:
            # of equals the first stay
            entry = (change.severity(old.get("margin") or 0.0), -number, change, old, new)
            (heapq.heappush if len(heap) < keep else heapq.heappushpop)(heap, entry)
    changes.only_after = sum(name not in seen for name in after.offsets)
    changes.worst = [(change, old, new) for _, _, change, old, new in sorted(heap, key=lambda e: e[:2], reverse=True)]
    return changes


def change_of(old: Record, new: Record, tolerance: float) -> Change:
    """What became of one image."""
    before, after = _said(old), _said(new)
    moved: tuple[int, ...] | None = None
    largest: float | None = None
    slots = 0
    if "prediction" not in old or "prediction" not in new:
        kind: Kind = "same" if before == after and old["status"] == new["status"] else "error"
    elif before != after:
        kind = "class"
    else:
        pairs = list(zip(old.get("evidence", []), new.get("evidence", []), strict=False))
        slots = len(pairs)
        uneven = len(old.get("evidence", [])) != len(new.get("evidence", []))
        moved = tuple(one["slot"] for one, other in pairs if _moved(one, other)) if pairs else None
        parts = list(_contribution_changes(pairs))
        largest = max(parts, default=None)
        if moved or uneven:
            kind = "cell"
        elif largest is not None and largest > tolerance:
            kind = "contribution"
        elif abs(_margin(old, new) or 0.0) > tolerance or old["status"] != new["status"]:
            kind = "margin"
        else:
            kind = "same"
    digests = old.get("file_sha256"), new.get("file_sha256")
    return Change(
        new["image"] or "", kind, before, after, moved, slots, largest, _margin(old, new),
        file_changed=None not in digests and digests[0] != digests[1],
    )  # fmt: skip


def _count(changes: Changes, change: Change) -> None:
    changes.kinds[change.kind] += 1
    changes.file_changed += change.file_changed
    changes.slots += change.slots
    changes.moved += len(change.moved or ())
    changes.largest_contribution = max(changes.largest_contribution, change.contribution or 0.0)


def _at_least(kind: str, wanted: str) -> bool:
    return KINDS.index(kind) <= KINDS.index(wanted)


def _said(record: Record) -> str:
    return record["error"]["code"] if "error" in record else record["prediction"]["label"]


def _margin(old: Record, new: Record) -> float | None:
    before, after = old.get("margin"), new.get("margin")
    return None if before is None or after is None else after - before


def _contribution_changes(pairs: list[tuple[Slot, Slot]]) -> Iterator[float]:
    for one, other in pairs:
        if one["contribution"] is not None and other["contribution"] is not None:
            yield abs(other["contribution"] - one["contribution"])


def _moved(one: Slot, other: Slot) -> bool:
    (x0, y0, x1, y1), (u0, v0, u1, v1) = one["box"], other["box"]
    same_grid = abs((u1 - u0) - (x1 - x0)) <= _SAME_SIDE * (x1 - x0) and abs((v1 - v0) - (y1 - y0)) <= _SAME_SIDE * (
        y1 - y0
    )
    if same_grid:
        return one["cell"] != other["cell"]
    return not (x0 <= (u0 + u1) / 2 <= x1 and y0 <= (v0 + v1) / 2 <= y1)
