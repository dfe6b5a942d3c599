"""The pages of `diff` and `drift`: both records of the largest changes, and the strongest shifts with photographs.

Pages need no other file and no network. Images are looked up below a root; those that are not there are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from PIL import Image

from opal_deploy.api.explanation import load_record_image
from opal_deploy.artifact.files import atomic_write, without_folders
from opal_deploy.auditing.results import locate_image, read_records
from opal_deploy.errors import ImageError
from opal_deploy.records.names import find_common_folder
from opal_deploy.records.record import Answered, Record
from opal_deploy.visualization.overlay import draw_evidence, embed_jpeg, show_photograph
from opal_deploy.visualization.pages import Picture, mark_safe, render_page
from opal_deploy.visualization.report.cards import render_card

if TYPE_CHECKING:
    from opal_deploy.auditing.diff import DiffReport
    from opal_deploy.auditing.drift import DriftReport, ObservedRun
    from opal_deploy.records.drift import Bar, Comparison, Shift

# longest side of a photograph on the page, in pixels
_CARD_SIDE = 560
# shifts shown, pictures of each before and after, and bars of classes
_SHOWN, _PICTURES, _CLASSES = 10, 4, 10
# longest side of a picture, in pixels
_PICTURE_SIDE = 240


def write_diff(page: Path, report: DiffReport, names: tuple[str, str], root: Path, *, overwrite: bool) -> None:
    """Write the report as a page; UsageError if it cannot be written.

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
    with atomic_write(page, replace=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _render_card(record: Record, number: int, folder: str, root: Path) -> object:
    """Return the report's card of a record, with its photograph if there is one."""
    name = None if record.image is None else record.image.removeprefix(folder)
    source = None
    with contextlib.suppress(ImageError):
        image = load_record_image(record, locate_image(record, root))
        if isinstance(record, Answered):
            photograph = show_photograph(image, record)
            photograph.thumbnail((_CARD_SIDE, _CARD_SIDE), Image.Resampling.BILINEAR)
            source = embed_jpeg(photograph)
    return mark_safe(render_card(replace(record, image=name), number, source))


def write_drift(
    page: Path,
    report: DriftReport,
    comparison: Comparison,
    now: ObservedRun,
    earlier: ObservedRun | None,
    root: Path,
    *,
    overwrite: bool,
) -> None:
    """Write the page; it needs no other file and no network.

    Args:
        earlier: the run that was compared with, if any.
        root: folder of the images; those that are not there are left out.

    Raises:
        UsageError: the file cannot be written, or the results cannot be read again.
    """
    shifts = report.shifts[:_SHOWN]
    # slots that left a place are shown elsewhere
    moved_away = [shift.kind == "place" and not shift.rose for shift in shifts]
    after = _draw_examples(now, shifts, [not away for away in moved_away], root)
    before: list[list[Picture]] = [[] for _ in shifts]
    if earlier is not None:
        usual = [shift.kind == "label" or away for shift, away in zip(shifts, moved_away, strict=True)]
        before = _draw_examples(earlier, shifts, usual, root)
    sections = [
        {
            "shift": shift, "text": shift.describe(report.class_names),
            "bars": _list_bars(shift, comparison, report.class_names), "after": after[number],
            "before": before[number],
        }
        for number, shift in enumerate(shifts)
    ]  # fmt: skip
    text = render_page(
        __package__, "drift", report=report, results=without_folders(str(now.path)), earlier=earlier, sections=sections,
    )  # fmt: skip
    with atomic_write(page, replace=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _list_bars(shift: Shift, comparison: Comparison, class_names: Sequence[str]) -> list[Bar]:
    """Return the bars of a shift; of class shares, those that changed most, by name."""
    bars = comparison.list_bars(shift)
    if shift.kind != "label":
        return bars
    named = [(class_names[int(class_id)], before, after) for class_id, before, after in bars]
    return sorted(named, key=lambda bar: -abs(bar[2] - bar[1]))[:_CLASSES]


def _draw_examples(run: ObservedRun, shifts: Sequence[Shift], cases: Sequence[bool], root: Path) -> list[list[Picture]]:
    """Return pictures of random images that show each shift or, where `cases` is False, of others of its class."""
    random = np.random.default_rng(0)
    chosen = [_choose_rows(run, shift, show, random) for shift, show in zip(shifts, cases, strict=True)]
    wanted = {row for rows in chosen for row in rows}
    answered = (record for record in read_records(run.path) if isinstance(record, Answered))
    records = {row: record for row, record in enumerate(answered) if row in wanted}
    pictures: list[list[Picture]] = []
    for shift, rows in zip(shifts, chosen, strict=True):
        pictures.append([])
        for row in rows:
            with contextlib.suppress(ImageError):
                pictures[-1].append(_draw(records[row], root, shift.slot))
    return pictures


def _choose_rows(run: ObservedRun, shift: Shift, show: bool, random: np.random.Generator) -> list[int]:
    observations = run.observations
    of_class = shift.slot is None or observations.class_ids == shift.class_id
    rows: NDArray[np.intp] = np.flatnonzero(of_class & (shift.find_cases(observations) == show))
    chosen: list[int] = random.permutation(rows)[:_PICTURES].tolist()
    return chosen


def _draw(record: Answered, root: Path, slot: int | None) -> Picture:
    """Return a record's picture with the box of one slot, or of all; raise ImageError if it is not there."""
    image = load_record_image(record, locate_image(record, root))
    slots = tuple(entry for entry in record.evidence if slot is None or entry.slot == slot)
    photograph = show_photograph(image, record)
    photograph.thumbnail((_PICTURE_SIDE, _PICTURE_SIDE))
    draw_evidence(photograph, replace(record, evidence=slots))
    return Picture(embed_jpeg(photograph), record.image or "")
