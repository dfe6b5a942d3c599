"""Patches of training images that show what each slot found, as checkpoints and metadata keep them.

They are parts of photographs: whoever has the file can see them. `export --no-patches` leaves them out.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from opal_deploy.artifact.documents import Count, Number, check_document

# of each slot, in a checkpoint
PER_SLOT = 4
# of each class in an exported file, and of all
_CLASS_BYTES, _FILE_BYTES = 20_000, 8_000_000
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]


@dataclass(frozen=True)
class Patch:
    """A part of an image in which a slot was strong.

    Attributes:
        image: the file's name, without folders.
        value: the slot's contribution to the cosine, or its score if the distance has no such sum.
        cell: (x0, y0, x1, y1) of the slot's box, as shares of the patch's width and height.
        jpeg: the pixels, in base64.
    """

    image: str
    value: Number
    cell: tuple[_Share, _Share, _Share, _Share]
    jpeg: Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/]*=*\Z")]

    @property
    def url(self) -> str:
        """The patch as a URL that contains it."""
        return f"data:image/jpeg;base64,{self.jpeg}"

    def decode(self) -> bytes:
        """Return the JPEG."""
        return base64.b64decode(self.jpeg)


@dataclass(frozen=True)
class SlotPatches:
    """The patches of one slot of a class, best first; perhaps none."""

    class_id: Count
    slot: Count
    patches: tuple[Patch, ...]


@dataclass(frozen=True)
class Patches:
    """The patches of a model's slots.

    Attributes:
        split: split of the data set.
        images: number of images that they were chosen from.
        slots: the slots.
    """

    split: str
    images: Count
    slots: tuple[SlotPatches, ...]

    def find(self, class_id: int, slot: int, image: str | None = None, limit: int = 2) -> tuple[Patch, ...]:
        """Return a slot's best patches, but for those of the file `image`, whose own patch would prove nothing."""
        name = (image or "").replace("\\", "/").rpartition("/")[2]
        listed = next((row.patches for row in self.slots if (row.class_id, row.slot) == (class_id, slot)), ())
        return tuple(patch for patch in listed if patch.image != name)[:limit]

    def by_slot(self, class_id: int) -> dict[int, list[Patch]]:
        """Return all patches of a class's slots, by slot."""
        return {row.slot: list(row.patches) for row in self.slots if row.class_id == class_id}

    def to_page(self, class_id: int) -> dict[int, list[tuple[str, Any, str]]]:
        """Return the patches of a class for a page's script, by slot: image, cell and JPEG."""
        return {
            slot: [(patch.image, patch.cell, patch.jpeg) for patch in patches]
            for slot, patches in self.by_slot(class_id).items()
        }

    def fit(self) -> Patches | None:
        """Return as many of the best patches per slot as an exported file takes: 20 kB per class; None for none."""
        by_class: dict[int, list[SlotPatches]] = {}
        for row in self.slots:
            by_class.setdefault(row.class_id, []).append(row)
        room = min(_CLASS_BYTES, _FILE_BYTES // max(len(by_class), 1))
        for count in range(PER_SLOT, 0, -1):
            sizes = (sum(len(p.jpeg) for row in rows for p in row.patches[:count]) for rows in by_class.values())
            if 3 * max(sizes, default=0) <= 4 * room:
                return replace(self, slots=tuple(replace(row, patches=row.patches[:count]) for row in self.slots))
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the patches for JSON, which `from_dict` reads."""
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Patches | None:
        """Return the patches that `to_dict` wrote, None for an empty dictionary; ArtifactError for any other."""
        return check_document(raw, Patches, "patches") if raw else None
