"""Exemplars: patches of other images that an atlas shows beside an image of the same predicted class."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from opal_deploy.visualization.atlas.entries import Atlas, AtlasPatch, Box, format_counts
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
        warning: a few words for an image of another class than the exemplars'; empty for all others.
    """

    image: Image.Image
    box: Box
    field: Box | None
    caption: str
    alt: str
    warning: str = ""


@dataclass(frozen=True)
class Exemplars:
    """The exemplars of one class.

    Attributes:
        by_slot: exemplars of each slot, best first.
        origin: a sentence or two that say where they come from.
        of_class: whether all their images are known to show the class, not only to be predicted as it.
    """

    by_slot: Mapping[int, Sequence[Exemplar]]
    origin: str
    of_class: bool = False


def find_exemplars(
    atlas: Atlas, class_id: int, slots: Iterable[int], *, exclude: Collection[str] = (), rows: int = 4
) -> Exemplars:
    """Return the best patches of a class's slots: of images of the class, or not known to be of another.

    A slot that has none of them gets those of images of other classes, each with its warning.

    Args:
        atlas: the model's atlas.
        class_id: the predicted class.
        slots: the slots to find patches for.
        exclude: names or file digests (sha256) of images to leave out: the image that the exemplars stand beside.
        rows: the largest number of patches of a slot.

    Raises:
        ArtifactError: a patch's file is missing or damaged.
    """
    label = atlas.class_names[class_id]
    shown: dict[int, list[AtlasPatch]] = {}
    for slot in slots:
        patches = atlas.patches(class_id, slot, exclude=exclude)
        shown[slot] = ([patch for patch in patches if patch.truth in (None, label)] or patches)[:rows]
    by_slot = {slot: [_make_exemplar(atlas, slot, patch, label) for patch in shown[slot]] for slot in shown}
    truths = {patch.truth for patches in shown.values() for patch in patches}
    return Exemplars(by_slot, _describe_origin(atlas, class_id, truths), of_class=truths == {label})


def _make_exemplar(atlas: Atlas, slot: int, patch: AtlasPatch, label: str) -> Exemplar:
    value = patch.score if patch.contribution is None else patch.contribution
    warning = "" if patch.truth in (None, label) else f"shows {patch.truth}"
    return Exemplar(
        load_patch(atlas, patch),
        patch.box,
        patch.field,
        f"{format_number(value)} {patch.image.rpartition('/')[2]}",
        f"slot {slot} in {patch.image}, cell {patch.cell[0]}, {patch.cell[1]}" + (warning and f", which {warning}"),
        warning,
    )


def _describe_origin(atlas: Atlas, class_id: int, shown: Collection[str | None]) -> str:
    """Return where the exemplars come from, and how many images of their prediction show another class."""
    images, label = atlas.entries[class_id, 0].statistics.images, atlas.class_names[class_id]
    predicted = "1 image was" if images == 1 else f"{images:,} images were"
    origin = f"Below it: where each slot was strongest in the atlas's images, of which {predicted} predicted so"
    if None in shown:
        return f"{origin}; the atlas does not know what they show."
    others = {truth: count for truth, count in atlas.truths_of(class_id).items() if truth != label}
    if not others:
        return f"{origin}."
    wrong = sum(others.values())
    show, fate = ("shows", "is") if wrong == 1 else ("show", "are")
    fate += " marked" if any(truth in shown for truth in others) else " left out"
    return f"{origin}; {wrong:,} of them {show} another class ({format_counts(others)}) and {fate}."
