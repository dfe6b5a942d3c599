"""The receptive fields of a model's cells, as checkpoints and metadata keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opal_deploy.errors import ArtifactError

# share of the gradient's energy in the effective field
ENERGY_SHARE = 0.9


@dataclass(frozen=True)
class ReceptiveField:
    """The receptive fields of a model's cells, in pixels of its input.

    Attributes:
        stride: pixels from one cell to the next: the side of a cell's box.
        size: side of the square of pixels that a cell can depend on, parts outside the image included; None where
            attention between cells leaves no bound.
        offset: coordinate of the centre of cell 0's theoretical field, the same along both axes, where pixel i reaches
            from i to i + 1; None where `size` is. Centre of cell 0's box: stride / 2.
        global_context: whether cells depend on the whole image also through a global pooling inside the network
            (squeeze-and-excitation), which `size` leaves out.
        effective_offset: coordinate of the centre of cell 0's effective field, the centroid of the energy of scores'
            gradients (`evaluation.receptive_field`); None where that was not measured.
        effective: side of the square around that centre that holds 90 % of the energy; None where it was not measured.
        images: images that the effective field was measured on.
    """

    stride: int
    size: int | None = None
    offset: float | None = None
    global_context: bool = False
    effective: int | None = None
    effective_offset: float | None = None
    images: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values; `from_dict` reads them."""
        return asdict(self)

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ReceptiveField | None:
        """Return the receptive fields that `to_dict` wrote; None for an empty dictionary.

        Raises:
            ArtifactError: the dictionary is not one of `to_dict`.
        """
        if not raw:
            return None
        known = {name: raw[name] for name in ReceptiveField.__dataclass_fields__ if name in raw}
        numbers = all(isinstance(value, int | float | None) for value in known.values())
        if not numbers or not isinstance(known.get("stride"), int) or known["stride"] < 1:
            raise ArtifactError(f"receptive_field {dict(raw)!r}: expected numbers of pixels, and a stride")
        return ReceptiveField(**known)

    def describe(self, input_size: tuple[int, int]) -> list[str]:
        """Return lines that say what a cell of a model with inputs of (H0, W0) sees, the last a warning if need be."""
        of = f"of {max(input_size)} pixels"
        theoretical = f"the whole image {of}"
        if self.size is not None:
            pooled = ", besides the whole image through a pooling inside the network" if self.global_context else ""
            theoretical = f"{self.size} {of}{pooled}"
        effective = "not measured"
        if self.effective is not None:
            effective = (
                f"{self.effective} {of} hold {ENERGY_SHARE:.0%} of the gradient's energy ({self.images} images), "
                f"centred at {self.effective_offset or 0:.1f} of the box's {self.stride}"
            )
        lines = [f"a cell's box has {self.stride} {of}; it can see {theoretical}", f"effective: {effective}"]
        if self.sees_whole(input_size):
            lines.append(
                "warning: a cell sees the whole image, so its box is where a score was read and not all that it "
                "depends on; cells of a finer `train --stride` see less"
            )
        return lines

    def in_cells(self, grid: tuple[int, int]) -> EffectiveField | None:
        """Return the effective field in units of the cells of a grid (H, W); None where it was not measured."""
        if self.effective is None or self.effective_offset is None:
            return None
        return EffectiveField(self.effective / self.stride, self.effective_offset / self.stride, grid)

    def sees_whole(self, input_size: tuple[int, int]) -> bool:
        """Return whether the field of a middle cell, effective where that is known, covers an input of (H0, W0)."""
        side = self.size if self.effective is None else self.effective
        return side is None or side >= min(input_size)


@dataclass(frozen=True)
class EffectiveField:
    """The effective receptive field in units of cells, to be drawn around their boxes.

    Attributes:
        side: its side.
        center: its centre, from the upper left corner of the cell's box; the box's own centre is 0.5.
        grid: (H, W) of the feature map.
    """

    side: float
    center: float
    grid: tuple[int, int]

    def surround(self, cell: Sequence[int], box: Sequence[float]) -> tuple[float, float, float, float]:
        """Return the field (x0, y0, x1, y1) of a cell (row, col), with its box, within the model's view."""
        x0, x1 = self._extend(cell[1], self.grid[1], box[0], box[2])
        y0, y1 = self._extend(cell[0], self.grid[0], box[1], box[3])
        return x0, y0, x1, y1

    def _extend(self, index: int, count: int, start: float, stop: float) -> tuple[float, float]:
        first = max(min(self.center - self.side / 2, 0.0), -index)
        last = min(max(self.center + self.side / 2, 1.0), count - index)
        return start + first * (stop - start), start + last * (stop - start)
