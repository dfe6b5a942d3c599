"""The contents of an atlas: patches, statistics and findings of each slot of each class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from opal_deploy.errors import UsageError

Box = tuple[float, float, float, float]

# findings about a class need this many images at least: fewer say nothing about a habit
MIN_IMAGES = 5
# a slot alone in its cell in a smaller share of images shows nothing that another slot does not
MIN_OWN_CELL_SHARE = 0.1
# a slot whose mean contribution is a smaller share of an equal part adds little
MIN_EQUAL_PART = 0.2
# a slot that chooses one cell in a larger share of images follows a place, not a part of the object
MAX_ONE_CELL_SHARE = 0.5


@dataclass(frozen=True)
class AtlasPatch:
    """A place in an image where a slot was strong.

    Attributes:
        image: the image's name in the data set that the atlas was built from.
        sha256: the digest of the image's file, in hex.
        cell: (row, col) of the feature map.
        box: (x0, y0, x1, y1) in pixels of the whole oriented image.
        score: the slot's score, in [0, 1].
        contribution: the slot's contribution; None where the distance has none.
        file: the patch's JPEG, relative to the atlas's folder.
        field: (x0, y0, x1, y1) of what the patch shows, the cell's effective receptive field; None: the cell alone.
        truth: the class that the image shows; None where it is not known, as in atlases of earlier versions.
    """

    image: str
    sha256: str
    cell: tuple[int, int]
    box: Box
    score: float
    contribution: float | None
    file: str
    field: Box | None = None
    truth: str | None = None


@dataclass(frozen=True)
class SlotStatistics:
    """The statistics of a slot over the images predicted as its class; all but `images` are None without images.

    Attributes:
        images: the number of these images.
        own_cell: share of images in which no other slot of the class chose the same cell.
        strongest: share of images in which the slot is its class's strongest (by contribution to the cosine, else by
            score).
        mean_score: mean score.
        mean_contribution: mean contribution; None also where the distance has no contributions.
        top_cell: (row, col) of the cell chosen most often.
        top_cell_share: share of images in which `top_cell` was chosen.
        entropy: entropy of the chosen cells in bits, from 0 (always one cell) to log2(H * W).
        spread: standard deviation of the chosen place, as a share of the view's diagonal; 0 for one place always.
    """

    images: int
    own_cell: float | None = None
    strongest: float | None = None
    mean_score: float | None = None
    mean_contribution: float | None = None
    top_cell: tuple[int, int] | None = None
    top_cell_share: float | None = None
    entropy: float | None = None
    spread: float | None = None


@dataclass(frozen=True)
class SlotEntry:
    """One slot of one class, its patches best first."""

    class_id: int
    slot: int
    statistics: SlotStatistics
    patches: tuple[AtlasPatch, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as written in atlas.json."""
        return {
            "slot": self.slot,
            **asdict(self.statistics),
            "patches": [asdict(patch) for patch in self.patches],
        }


@dataclass(frozen=True)
class FindingKind:
    """The meaning of one kind of findings.

    Attributes:
        title: the things found, in the plural.
        advice: what to do about them, or, where nothing is to be done, what they mean.
        actionable: whether there is something to do.
    """

    title: str
    advice: str
    actionable: bool = True


FINDING_KINDS: Final[Mapping[str, FindingKind]] = {
    "never_predicted": FindingKind(
        "classes predicted for no image",
        "Check that their labels are right and that training had images of them, and train again with more of them.",
    ),
    "one_place": FindingKind(
        "slots that look at one place whatever the image",
        "Look at their patches: where these show a border, a caption or background, crop it off or mask it in the "
        "training images and train again. Whether answers depend on it: opal-deploy evaluate DATA --model MODEL "
        "--faithfulness",
    ),
    "shares_its_cell": FindingKind(
        "slots that rarely have a cell to themselves",
        "Train with finer cells (opal-deploy train DATA --stride 16, or 8), or fewer slots a class (--prototypes N).",
    ),
    "adds_little": FindingKind(
        "slots that add little",
        "The other slots of these classes decide: read their boxes. Where most classes have such a slot, a model with "
        "fewer slots (opal-deploy train DATA --prototypes N) says as much with fewer boxes.",
        actionable=False,
    ),
    "not_shown": FindingKind(
        "classes that no image shows and none was predicted as",
        "These images say nothing about them; an atlas of images of them would.",
        actionable=False,
    ),
}
"""The kinds of findings, those to act on first."""


@dataclass(frozen=True)
class Finding:
    """Something about a slot or a class that the model's owner should know.

    Attributes:
        kind: a key of FINDING_KINDS.
        class_id: the class.
        slot: the slot; None for a finding about the whole class.
        value: the statistic that is out of bounds.
        message: the finding in one sentence.
    """

    kind: str
    class_id: int
    slot: int | None
    value: float
    message: str


@dataclass(frozen=True)
class Atlas:
    """An atlas in a folder.

    Attributes:
        root: the folder.
        model: the model that the atlas was built with: file, sha256, checkpoint_sha256, backbone, precision,
            prototypes_per_class, grid, distance.
        class_names: the model's classes.
        data: the data set that the atlas was built from: description, images, answered, failed, ...
        top: the largest number of patches of a slot, of images that are not known to show another class.
        entries: entries by (class, slot), for every slot of the model.
        findings: what the model's owner should know, class by class.
        cells: how often each cell of the grid was chosen, row by row; length H * W.
        truths: by predicted class, the number of images by the class that they show, where that is known; empty in
            atlases of earlier versions.
    """

    root: Path
    model: Mapping[str, Any]
    class_names: tuple[str, ...]
    data: Mapping[str, Any]
    top: int
    entries: Mapping[tuple[int, int], SlotEntry]
    findings: tuple[Finding, ...]
    cells: tuple[int, ...] = field(default=())
    truths: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def check_model(self, model: Mapping[str, Any], name: str) -> None:
        """Accept the model that the atlas was built with and other exports of the same checkpoint.

        Args:
            model: the model's `sha256`, and `checkpoint_sha256` where it is known.
            name: how messages call the model.

        Raises:
            UsageError: it is another model.
        """
        if model["sha256"] == self.model["sha256"]:
            return
        checkpoint = model.get("checkpoint_sha256")
        if checkpoint is not None and checkpoint == self.model.get("checkpoint_sha256"):
            return
        raise UsageError(
            f"{self.root}: this atlas was built with {self.model['file']} (sha256 {self.model['sha256'][:12]}…), and "
            f"{name} is another model (sha256 {model['sha256'][:12]}…); build its own with `opal-deploy atlas`"
        )

    def patches(self, class_id: int, slot: int, *, exclude: Collection[str] = ()) -> list[AtlasPatch]:
        """Return the patches of a slot, best first, without those of excluded images.

        Args:
            class_id: the class.
            slot: the slot.
            exclude: names or file digests (sha256) of images to leave out.

        Raises:
            KeyError: the model has no such slot.
        """
        patches = self.entries[class_id, slot].patches
        return [patch for patch in patches if patch.image not in exclude and patch.sha256 not in exclude]

    def truths_of(self, class_id: int) -> Mapping[str, int]:
        """Return the number of images predicted as a class by the class that they show, where that is known."""
        return self.truths.get(class_id, {})

    def predictions_of(self, class_id: int) -> Mapping[str, int]:
        """Return the number of images that show a class by the class that they were predicted as."""
        label = self.class_names[class_id]
        counts = ((name, self.truths_of(other).get(label, 0)) for other, name in enumerate(self.class_names))
        return {name: count for name, count in counts if count}

    def count_wrong(self) -> int:
        """Return the number of images that are known to show another class than they were predicted as."""
        return sum(
            count
            for class_id, counts in self.truths.items()
            for truth, count in counts.items()
            if truth != self.class_names[class_id]
        )

    def count_patches(self) -> int:
        """Return the number of patches of all slots."""
        return sum(len(entry.patches) for entry in self.entries.values())


def format_counts(counts: Mapping[str, int], limit: int = 3) -> str:
    """Return classes with their numbers of images, most frequent first: the first few, and how many more there are."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    listed = ranked if len(ranked) == limit + 1 else ranked[:limit]
    more = [f"{len(ranked) - limit:,} more classes"] if len(ranked) > len(listed) else []
    return ", ".join([*(f"{label} {count:,}" for label, count in listed), *more])


def list_findings(
    class_id: int, label: str, slots: Sequence[SlotStatistics], images_of: int | None = None
) -> list[Finding]:
    """Return the findings about the slots of one class, in the order of the slots.

    Args:
        class_id: the class.
        label: its name.
        slots: the statistics of its slots.
        images_of: the number of images that show it; None where no image's class is known.
    """
    if not slots[0].images:
        if images_of == 0:
            return [Finding("not_shown", class_id, None, 0.0, f"{label}: no image shows it, and none was predicted so")]
        shown = "" if images_of is None else f", though {images_of} {'shows' if images_of == 1 else 'show'} it"
        return [Finding("never_predicted", class_id, None, 0.0, f"{label}: predicted for no image{shown}")]
    if slots[0].images < MIN_IMAGES:
        return []
    findings = []
    parts = [statistics.mean_contribution for statistics in slots]
    known = [part for part in parts if part is not None]
    equal_part = sum(known) / len(known) if len(known) == len(slots) else None
    for slot, statistics in enumerate(slots):
        who, own_cell, part = f"{label}, slot {slot}", statistics.own_cell, parts[slot]
        if len(slots) > 1 and own_cell is not None and own_cell < MIN_OWN_CELL_SHARE:
            message = f"{who}: has a cell to itself in only {own_cell:.0%} of {statistics.images} images"
            findings.append(Finding("shares_its_cell", class_id, slot, own_cell, message))
        if equal_part is not None and part is not None and equal_part > 0 and part < MIN_EQUAL_PART * equal_part:
            message = f"{who}: adds {part:.3f} on average, where an equal part would be {equal_part:.3f}"
            findings.append(Finding("adds_little", class_id, slot, part, message))
        share = statistics.top_cell_share
        if share is not None and statistics.top_cell is not None and share > MAX_ONE_CELL_SHARE:
            row, col = statistics.top_cell
            message = (
                f"{who}: looks at cell {row}, {col} in {share:.0%} of {statistics.images} images, whatever they show"
            )
            findings.append(Finding("one_place", class_id, slot, share, message))
    return findings
