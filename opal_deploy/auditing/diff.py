"""The work of `opal-deploy diff`: what changed between two models, or two results of the same images.

Images are paired by name (those with the same name in input order), classes by label, slots by number. If both feature
maps have the same grid, a slot moved if its cell differs; otherwise if its new box is centred outside the old one.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from msgspec.structs import replace

from opal_deploy.api.infer import run_inference
from opal_deploy.artifact.files import check_output
from opal_deploy.auditing.options import DiffOptions
from opal_deploy.auditing.results import find_results, group_records, is_results, load_photograph
from opal_deploy.errors import UsageError
from opal_deploy.logs import WarningLine
from opal_deploy.options import StrPath, keywords
from opal_deploy.records.names import find_common_folder
from opal_deploy.records.record import Answered, Failed, Record, Slot
from opal_deploy.visualization.overlay import embed_jpeg
from opal_deploy.visualization.pages import mark_safe, render_page, save_page
from opal_deploy.visualization.report.cards import render_card

# from the largest change to none
Kind = Literal["error", "class", "cell", "contribution", "margin", "same"]
KINDS: tuple[Kind, ...] = ("error", "class", "cell", "contribution", "margin", "same")
# by image name
Records = dict[str | None, list[Record]]
# relative difference of box sides on the same grid: only rounding
_SAME_SIDE = 1e-6
# longest side of a photograph on the page, in pixels
_CARD_SIDE = 560


@dataclass(frozen=True)
class ImageChange:
    """The change of one image's record."""

    image: str
    image_index: int | None
    # the largest change: `error` (from or to an error, or another error), `class`, `cell` of a slot (or slots that only
    # one record has, such as dropped ones), `contribution` of a slot or `margin` by more than the tolerance (or another
    # status)
    kind: Kind
    before: str  # label or error code
    after: str
    status: str | None  # such as `ok -> unknown`; None if it is the same
    moved: tuple[int, ...] | None  # slots that moved; None if the classes differ or a model shows no cells
    slots: int  # number of slots compared
    unmatched: int  # number of slots that only one of the records has
    contribution: float | None  # largest change of a slot's contribution; None if `moved` is
    margin: float | None  # margin after minus before; None if a record has none
    image_changed: bool  # whether the image file differs

    def severity(self, margin_before: float) -> tuple[float, ...]:
        """Return a sort key, largest change first: by kind, changed classes by the margin of the old answer."""
        sizes = (len(self.moved or ()), self.contribution or 0.0, abs(self.margin or 0.0))
        return (KINDS.index(self.kind), -margin_before if self.kind == "class" else 0.0, *(-size for size in sizes))

    def __str__(self) -> str:
        """Return the change in one line, without the image's name."""
        parts = [self.after if self.before == self.after else f"{self.before} -> {self.after}"]
        parts += [self.status] if self.status else []
        parts += [f"{len(self.moved)} of {self.slots} cells moved"] if self.moved else []
        parts += [f"slots in only one model: {self.unmatched}"] if self.unmatched else []
        parts += [f"largest contribution change {self.contribution:.2g}"] if self.contribution else []
        parts += [] if self.margin is None else [f"margin {self.margin:+.4f}"]
        return ", ".join(parts) + (" (the image file differs)" if self.image_changed else "")


@dataclass
class DiffReport:
    """The changes of all images.

    Attributes:
        kinds: number of images by kind of change.
        only_before, only_after: number of images in only one set.
        unpaired: number of records without a name.
        image_changed: number of images whose file differs, so that their changes say nothing about the models.
        slots, slots_moved: number of slots compared, and number of slots that moved.
        slots_unmatched: number of slots that only one of two records has.
        largest_contribution_change: of all slots.
        worst: the requested number of largest changes with both records, largest first.
    """

    kinds: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    only_before: int = 0
    only_after: int = 0
    unpaired: int = 0
    image_changed: int = 0
    slots: int = 0
    slots_moved: int = 0
    slots_unmatched: int = 0
    largest_contribution_change: float = 0.0
    worst: list[tuple[ImageChange, Record, Record]] = field(default_factory=list)

    @property
    def paired(self) -> int:
        """Number of images in both sets."""
        return sum(self.kinds.values())

    @property
    def changed(self) -> int:
        """Number of images with any change."""
        return self.paired - self.kinds["same"]

    def has(self, kind: str) -> bool:
        """Return whether any image has a change of `kind` (or `any`) or a larger one, or is missing in a set."""
        last = KINDS.index("margin" if kind == "any" else cast(Kind, kind))
        return self.only_before + self.only_after > 0 or any(self.kinds[name] for name in KINDS[: last + 1])

    def add(self, change: ImageChange) -> None:
        """Count one image's change."""
        self.kinds[change.kind] += 1
        self.image_changed += change.image_changed
        self.slots += change.slots
        self.slots_moved += len(change.moved or ())
        self.slots_unmatched += change.unmatched
        self.largest_contribution_change = max(self.largest_contribution_change, change.contribution or 0.0)

    def describe_slots(self) -> str:
        """Return how many slots moved, and how many only one of two records has."""
        unmatched = f", {self.slots_unmatched:,} in only one model" if self.slots_unmatched else ""
        return f"{self.slots_moved:,} of {self.slots:,} slots moved{unmatched}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        worst = [asdict(change) for change, _, _ in self.worst]
        return {"paired": self.paired, "changed": self.changed, **vars(self), "worst": worst}


@keywords(DiffOptions)
def diff(before: StrPath, after: StrPath, options: DiffOptions) -> DiffReport:
    """Compare two models on images, or two results of the same images, and write the page if `out` is given.

    Args:
        before: a model; or results.jsonl, or its folder.
        after: the same, to compare with it.

    Raises:
        UsageError: a file cannot be read, or no image is in both results.
    """
    if options.out is not None:
        inputs = (before, after, *options.images)
        check_output("--out", Path(options.out), [".html"], inputs=inputs, overwrite=options.overwrite)
    old, new = (_read(Path(side), options) for side in (before, after))
    report = compare_results(old, new, options.tolerance, options.worst)
    if not report.paired:
        raise UsageError(f"{before}, {after}: no image is in both; expected results of the same images")
    if options.out is not None:
        names = (str(before), str(after))
        write_diff(Path(options.out), report, names, Path(options.root), overwrite=options.overwrite)
    return report


def _read(side: Path, options: DiffOptions) -> Records:
    """Return the records of results, or those that a model gives for the images."""
    if is_results(side):
        return group_records(find_results(side))
    if not options.images or "-" in options.images:
        raise UsageError(f"{side}: comparing models needs images; list them after A and B, or give a list as @FILE")
    with tempfile.TemporaryDirectory(prefix="opal-deploy-diff-") as folder:
        run_inference(
            options.images, side, out=folder, device=options.device, threads=options.threads,
            progress=options.progress, log=lambda line: options.log(line) if isinstance(line, WarningLine) else None,
        )  # fmt: skip
        return group_records(find_results(folder))


def compare_results(before: Records, after: Records, tolerance: float, keep: int) -> DiffReport:
    """Pair records by image and compare them, and keep the `keep` largest changes.

    Contributions and margins that differ by at most `tolerance` count as equal.
    """
    report = DiffReport(unpaired=len(before.get(None, ())) + len(after.get(None, ())))
    for name in dict.fromkeys(name for name in (*before, *after) if name is not None):
        olds, news = before.get(name, []), after.get(name, [])
        report.only_before += max(0, len(olds) - len(news))
        report.only_after += max(0, len(news) - len(olds))
        for old, new in zip(olds, news, strict=False):
            change = compare_records(old, new, tolerance)
            report.add(change)
            if change.kind != "same":
                report.worst.append((change, old, new))
    report.worst.sort(key=lambda entry: entry[0].severity(getattr(entry[1], "margin", None) or 0.0))
    del report.worst[keep:]
    return report


def compare_records(old: Record, new: Record, tolerance: float) -> ImageChange:
    """Return the change between two records of an image."""
    before, after = (
        record.error.code if isinstance(record, Failed) else record.prediction.label for record in (old, new)
    )
    margins: list[Any] = [getattr(record, "margin", None) for record in (old, new)]
    margin = None if None in margins else margins[1] - margins[0]
    status = None if old.status == new.status else f"{old.status} -> {new.status}"
    moved: tuple[int, ...] | None = None
    largest: float | None = None
    slots = unmatched = 0
    kind: Kind = "same"
    if isinstance(old, Failed) or isinstance(new, Failed):
        kind = "same" if before == after and status is None else "error"
    elif before != after:
        kind = "class"
    else:
        by_number = {slot.slot: slot for slot in new.evidence}
        # slots that only one of the models has, such as dropped ones, are no pairs
        pairs = [(slot, by_number[slot.slot]) for slot in old.evidence if slot.slot in by_number]
        slots, unmatched = len(pairs), len(old.evidence) + len(new.evidence) - 2 * len(pairs)
        moved = tuple(one.slot for one, other in pairs if _is_moved(one, other)) if pairs else None
        parts = [(one.contribution, other.contribution) for one, other in pairs]
        largest = max((abs(b - a) for a, b in parts if a is not None and b is not None), default=None)
        if moved or unmatched:
            kind = "cell"
        elif (largest or 0.0) > tolerance:
            kind = "contribution"
        elif abs(margin or 0.0) > tolerance or status is not None:
            kind = "margin"
    digests = old.image_sha256, new.image_sha256
    return ImageChange(
        new.image or "", new.image_index, kind, before, after, status, moved, slots, unmatched, largest,
        margin, image_changed=None not in digests and digests[0] != digests[1],
    )  # fmt: skip


def _is_moved(old: Slot, new: Slot) -> bool:
    (x0, y0, x1, y1), (u0, v0, u1, v1) = old.box, new.box
    width, height = x1 - x0, y1 - y0
    if abs((u1 - u0) - width) <= _SAME_SIDE * width and abs((v1 - v0) - height) <= _SAME_SIDE * height:
        return old.cell != new.cell
    return not (x0 <= (u0 + u1) / 2 <= x1 and y0 <= (v0 + v1) / 2 <= y1)


def write_diff(page: Path, report: DiffReport, names: tuple[str, str], root: Path, *, overwrite: bool) -> None:
    """Write the report as a page that needs no other file and no network; UsageError if it cannot be written.

    Args:
        names: paths of the two models or results, which are shown relative to their common folder.
        root: folder of the images; those that are not there are left out.
    """
    before, after = (name.removeprefix(find_common_folder(names)) for name in names)
    folder, sections = find_common_folder(change.image for change, _, _ in report.worst), []
    for number, (change, *records) in enumerate(report.worst):
        cards = [_render_card(record, 2 * number + side, folder, root) for side, record in enumerate(records)]
        sections.append((change.image.removeprefix(folder), change, cards))
    text = render_page(__package__, "diff", report=report, before=before, after=after, sections=sections)
    save_page(page, text, overwrite=overwrite)


def _render_card(record: Record, number: int, folder: str, root: Path) -> object:
    """Return the report's card of a record, with its photograph if there is one."""
    name = record.image and record.image.removeprefix(folder)
    photograph = load_photograph(record, root, _CARD_SIDE) if isinstance(record, Answered) else None
    source = None if photograph is None else embed_jpeg(photograph)
    return mark_safe(render_card(replace(record, image=name), number, source))
