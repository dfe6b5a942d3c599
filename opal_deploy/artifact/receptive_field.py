"""What a cell of a model's feature map sees of the input, as checkpoints and metadata keep it."""

from __future__ import annotations

from collections.abc import Mapping
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
        effective: side of the square around the centre of a cell's box that holds 90 % of the energy of its score's
            gradient (`model.receptive_field.measure_effective_field`); None where that was not measured.
        effective_offset: mean coordinate of the centroid of that energy for cell 0; None where it was not measured.
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
                f"{self.effective} {of} around its box hold {ENERGY_SHARE:.0%} of the gradient's energy ({self.images} "
                "images)"
            )
        lines = [f"a cell's box has {self.stride} {of}; it can see {theoretical}", f"effective: {effective}"]
        if self.sees_whole(input_size):
            lines.append(
                "warning: a cell sees the whole image, so its box is where a score was read and not all that it "
                "depends on; cells of a finer `train --stride` see less"
            )
        return lines

    def sees_whole(self, input_size: tuple[int, int]) -> bool:
        """Return whether the field of a middle cell, effective where that is known, covers an input of (H0, W0)."""
        side = self.size if self.effective is None else self.effective
        return side is None or side >= min(input_size)
