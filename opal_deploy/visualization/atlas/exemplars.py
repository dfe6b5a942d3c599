"""Exemplars: patches of other images that an atlas shows beside an image of the same predicted class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from opal_deploy.visualization.atlas.entries import Atlas, Box
from opal_deploy.visualization.atlas.storage import load_patch
from opal_deploy.visualization.legend import format_number


@dataclass(frozen=True)
class Exemplar:
    """A patch of another image.

    Attributes:
        image: the patch's pixels, RGB.
        box: (x0, y0, x1, y1) of the cell, in pixels of its whole image.
        field: the same of what the patch shows around the cell; None where it shows the cell alone.
        caption: a few words to stand under the patch.
        alt: the patch in words.
    """

    image: Image.Image
    box: Box
    field: Box | None
    caption: str
    alt: str


@dataclass(frozen=True)
class Exemplars:
    """The exemplars of one class.

    Attributes:
        by_slot: exemplars of each slot, best first.
        origin: one sentence that says where they come from.
    """

    by_slot: Mapping[int, Sequence[Exemplar]]
    origin: str


def find_exemplars(
    atlas: Atlas, class_id: int, slots: Iterable[int], *, exclude: Collection[str] = (), rows: int = 4
) -> Exemplars:
    """Return the best patches of a class's slots.

    Args:
        atlas: the model's atlas.
        class_id: the predicted class.
        slots: the slots to find patches for.
        exclude: names or file digests (sha256) of images to leave out: the image that the exemplars stand beside.
        rows: the largest number of patches of a slot.

    Raises:
        ArtifactError: a patch's file is missing or damaged.
    """
    by_slot = {
        slot: [
            Exemplar(
                load_patch(atlas, patch),
                patch.box,
                patch.field,
                f"{format_number(patch.score if patch.contribution is None else patch.contribution)} "
                f"{patch.image.rpartition('/')[2]}",
                f"slot {slot} in {patch.image}, cell {patch.cell[0]}, {patch.cell[1]}",
            )
            for patch in atlas.patches(class_id, slot, exclude=exclude)[:rows]
        ]
        for slot in slots
    }
    images = atlas.entries[class_id, 0].statistics.images
    predicted = "1 image was" if images == 1 else f"{images:,} images were"
    return Exemplars(
        by_slot, f"Below it: where each slot was strongest in the atlas's images, of which {predicted} predicted so."
    )
