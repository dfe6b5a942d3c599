"""What an atlas holds: patches and figures of every class's slots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AtlasPatch:
    """A place in a picture where a slot was strong.

    Attributes:
        image: the picture's name in the set that the atlas was built of. sha256: of the picture's file.
        cell, box, score, contribution: as in a record's evidence.
        file: the patch's JPEG, relative to the atlas's folder.
    """

    image: str
    sha256: str
    cell: tuple[int, int]
    box: tuple[float, float, float, float]
    score: float
    contribution: float | None
    file: str


@dataclass(frozen=True)
class SlotStatistics:
    """How a slot behaves over the pictures that its class was predicted for; None where there are none.

    Attributes:
        images: how many pictures these are.
        own_cell: share of them in which no other slot of the class chose its cell.
        strongest: share in which it is the class's strongest slot (by contribution to the cosine, else by score).
        mean_score, mean_contribution: over them; None too where the distance has no contributions.
        top_cell: the cell that it chose most often, top_cell_share: in which share of the pictures.
        entropy: of its cells over the grid, in bits; 0 for one cell always, log2(H * W) for all alike.
        spread: standard deviation of its place, as a share of the view's diagonal; 0 for one place always.
    """

    images: int
    own_cell: float | None
    strongest: float | None
    mean_score: float | None
    mean_contribution: float | None
    top_cell: tuple[int, int] | None
    top_cell_share: float | None
    entropy: float | None
    spread: float | None


@dataclass(frozen=True)
class SlotEntry:
    """One slot of one class, its patches best first."""

    class_id: int
    slot: int
    figures: SlotStatistics
    patches: tuple[AtlasPatch, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "slot": self.slot,
            **asdict(self.figures),
            "patches": [asdict(patch) for patch in self.patches],
        }


@dataclass(frozen=True)
class Finding:
    """One line of a model owner's to-do list.

    Attributes:
        kind: `never_predicted`, `shares_its_cell`, `adds_little` or `one_place`.
        slot: None where it concerns the whole class.
        value: the figure that is out of bounds; message: says so.
    """

    kind: str
    class_id: int
    slot: int | None
    value: float
    message: str
