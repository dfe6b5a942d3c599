"""The contents of an atlas: patches and statistics of each slot, and the exemplars chosen from them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from PIL import Image

from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.visualization.style import count_of, format_number

Box = tuple[float, float, float, float]
PATCHES = "patches"
# file of a patch; one from outside must not lead out of the folder
PATCH_NAME = r"^patches/[0-9a-f]{2}/[0-9a-f]{32}\.jpg\Z"


@dataclass(frozen=True)
class AtlasPatch:
    """A patch of an image where a slot was strong.

    Attributes:
        image: the image's name in the data set that the atlas was built from.
        sha256: hex digest of the image's file.
        cell: (row, col) of the feature map.
        box: (x0, y0, x1, y1) of the cell, in pixels of the whole oriented image.
        file: the patch's JPEG, relative to the atlas's folder.
        field: (x0, y0, x1, y1) of the patch, the cell's effective receptive field; None: the patch is the cell.
    """

    image: str
    sha256: str
    cell: tuple[int, int]
    box: Box
    score: float
    contribution: float | None
    file: Annotated[str, Meta(pattern=PATCH_NAME)]
    field: Box | None = None
    label: str | None = None

    @property
    def value(self) -> float:
        """The contribution, or the score if there is none."""
        return self.score if self.contribution is None else self.contribution


@dataclass(frozen=True)
class SlotStatistics:
    """The statistics of a slot over the images predicted as its class; all but `images` are None without images.

    Attributes:
        own_cell: share of images in which no other slot of the class chose the same cell.
        strongest: share of images in which the slot is the class's strongest.
        mean_contribution: mean contribution; None if the distance has no contributions.
        top_cell_share: share of images in which `top_cell` was chosen.
    """

    images: int
    own_cell: float | None = None
    strongest: float | None = None
    mean_score: float | None = None
    mean_contribution: float | None = None
    top_cell: tuple[int, int] | None = None
    top_cell_share: float | None = None


@dataclass(frozen=True)
class SlotEntry:
    """One slot of one class, its patches best first."""

    class_id: int
    slot: int
    statistics: SlotStatistics
    patches: tuple[AtlasPatch, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as written to atlas.json."""
        patches = [asdict(patch) for patch in self.patches]
        return {"slot": self.slot, **asdict(self.statistics), "patches": patches}


@dataclass(frozen=True)
class Atlas:
    """An atlas in a folder.

    Attributes:
        model: the model that the atlas was built with: file, sha256, checkpoint_sha256, backbone, precision,
            prototypes_per_class, grid, distance.
        data: the data set that the atlas was built from: description, images, answered, failed, ...
        entries: entries by (class, slot), for every slot of the model that was not dropped.
        cells: how often each cell of the grid was chosen, row by row; length H * W.
        labels: for each predicted class, the number of images by their labels, if these are known.
    """

    root: Path
    model: Mapping[str, Any]
    class_names: tuple[str, ...]
    data: Mapping[str, Any]
    top: int
    entries: Mapping[tuple[int, int], SlotEntry]
    cells: tuple[int, ...]
    labels: Mapping[int, Mapping[str, int]]

    def check_model(self, model: Mapping[str, Any], name: str) -> None:
        """Accept the model that the atlas was built with, and other exports of the same checkpoint.

        Args:
            model: the model's `sha256`, and `checkpoint_sha256` if it is known.

        Raises:
            UsageError: the model is another one.
        """
        if model["sha256"] == self.model["sha256"]:
            return
        checkpoint = model.get("checkpoint_sha256")
        if checkpoint is not None and checkpoint == self.model.get("checkpoint_sha256"):
            return
        raise UsageError(
            f"{self.root}: this atlas belongs to {self.model['file']} (sha256 {self.model['sha256'][:12]}…), not to "
            f"{name} (sha256 {model['sha256'][:12]}…); build one for it with `opal-deploy atlas`"
        )

    def patches(self, class_id: int, slot: int, *, exclude: Collection[str] = ()) -> list[AtlasPatch]:
        """Return the patches of a slot, best first.

        Args:
            exclude: names or file digests (sha256) of images to leave out.

        Raises:
            KeyError: the model has no such slot.
        """
        patches = self.entries[class_id, slot].patches
        return [patch for patch in patches if patch.image not in exclude and patch.sha256 not in exclude]

    def load_patch(self, patch: AtlasPatch) -> Image.Image:
        """Return the pixels of a patch, RGB; raise ArtifactError if the patch's file is missing or damaged."""
        path = self.root / patch.file
        try:
            encoded = path.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror or error}); build the atlas again") from None
        if name_patch(encoded) != patch.file:
            raise ArtifactError(f"{path}: damaged, its digest does not match its name; build the atlas again")
        return Image.open(io.BytesIO(encoded)).convert("RGB")

    @cached_property
    def slots(self) -> Mapping[int, list[int]]:
        """The slots of each class, ascending."""
        slots: dict[int, list[int]] = {}
        for class_id, slot in sorted(self.entries):
            slots.setdefault(class_id, []).append(slot)
        return slots

    def images_of(self, class_id: int) -> int:
        """Return the number of images predicted as a class."""
        return self.entries[class_id, self.slots[class_id][0]].statistics.images

    def labels_of(self, class_id: int) -> Mapping[str, int]:
        """Return the number of images predicted as a class, by label."""
        return self.labels.get(class_id, {})

    def count_wrong(self) -> int:
        """Return the number of images whose prediction is not their label."""
        counts = ((self.class_names[class_id], counts) for class_id, counts in self.labels.items())
        return sum(count for name, by_label in counts for label, count in by_label.items() if label != name)

    def count_patches(self) -> int:
        """Return the number of patches of all slots."""
        return sum(len(entry.patches) for entry in self.entries.values())


def name_patch(encoded: bytes) -> str:
    """Return the file name of an encoded patch, relative to the atlas's folder."""
    digest = hashlib.sha256(encoded).hexdigest()[:32]
    return f"{PATCHES}/{digest[:2]}/{digest}.jpg"


@dataclass(frozen=True)
class Exemplar:
    """A patch of another image, shown next to an image of the same predicted class.

    Attributes:
        box: (x0, y0, x1, y1) of the cell, in pixels of the whole image.
        field: (x0, y0, x1, y1) of the patch; None: the patch is the cell.
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
        of_class: whether all their images are known to have this label.
    """

    by_slot: Mapping[int, Sequence[Exemplar]]
    origin: str
    of_class: bool = False


def find_exemplars(
    atlas: Atlas, class_id: int, slots: Iterable[int], *, exclude: Collection[str] = (), rows: int = 4
) -> Exemplars:
    """Return the best patches of a class's slots, from images that are not known to show another class.

    Args:
        exclude: names or file digests (sha256) of images to leave out, such as the image itself.
        rows: largest number of patches per slot.

    Raises:
        ArtifactError: a patch's file is missing or damaged.
    """
    label = atlas.class_names[class_id]
    by_slot: dict[int, list[Exemplar]] = {}
    labels: set[str | None] = set()
    for slot in slots:
        patches = [patch for patch in atlas.patches(class_id, slot, exclude=exclude) if patch.label in (None, label)]
        labels.update(patch.label for patch in patches[:rows])
        by_slot[slot] = [_make_exemplar(atlas, slot, patch) for patch in patches[:rows]]
    images = count_of(atlas.images_of(class_id), "image")
    origin = f"Below: each slot's strongest patches among the atlas's {images} with this prediction"
    unknown = "; their labels are not known" if None in labels else ""
    return Exemplars(by_slot, f"{origin}{unknown}.", of_class=labels == {label})


def _make_exemplar(atlas: Atlas, slot: int, patch: AtlasPatch) -> Exemplar:
    caption = f"{format_number(patch.value)} {patch.image.rpartition('/')[2]}"
    alt = f"slot {slot} in {patch.image}, cell {patch.cell[0]}, {patch.cell[1]}"
    return Exemplar(atlas.load_patch(patch), patch.box, patch.field, caption, alt)
