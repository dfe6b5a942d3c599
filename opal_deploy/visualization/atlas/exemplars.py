"""What an atlas adds to a sheet: for each slot of the predicted class, patches of other pictures."""

from __future__ import annotations

from collections.abc import Collection

from opal_deploy.visualization.atlas.storage import Atlas
from opal_deploy.visualization.legend import format_number
from opal_deploy.visualization.sheet.content import SheetContent
from opal_deploy.visualization.sheet.layout import Exemplar, Exemplars


def find_exemplars(atlas: Atlas, content: SheetContent, *, exclude: Collection[str] = (), rows: int = 4) -> Exemplars:
    """The best patches of the predicted class's slots.

    Args:
        atlas: of the same model.
        content: of the picture; its own name is excluded always.
        exclude: names or file digests of pictures that are not to be shown: the picture's own digest, above all.
        rows: patches a slot at most.

    Raises:
        ArtifactError: a patch's file is missing or damaged.
    """
    class_id = content.predicted.class_id
    left_out = {*exclude, *([content.image] if content.image else [])}
    by_slot = {}
    for slot in content.predicted.slots:
        found = atlas.rows(class_id, slot.slot, exclude=left_out)[:rows]
        by_slot[slot.slot] = [
            Exemplar(
                atlas.picture(patch),
                f"{format_number(patch.score if patch.contribution is None else patch.contribution)} "
                f"{patch.image.rpartition('/')[2]}",
                f"slot {slot.slot} in {patch.image}, cell {patch.cell[0]}, {patch.cell[1]}",
            )
            for patch in found
        ]
    images = atlas.entries[class_id, 0].figures.images
    answered = "1 picture was" if images == 1 else f"{images:,} pictures were"
    return Exemplars(
        by_slot, f"Below it: where each slot was strongest in the atlas's pictures, of which {answered} predicted so."
    )
