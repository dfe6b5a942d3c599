"""The page of `drift`: the strongest shifts, each with bars before and after, and photographs that show it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from opal_deploy.api.explanation import load_record_image
from opal_deploy.artifact.files import atomic_write
from opal_deploy.auditing.answers import Answers, Layout
from opal_deploy.auditing.drift import DriftReport
from opal_deploy.auditing.results import locate
from opal_deploy.errors import ImageError
from opal_deploy.records.drift import DriftCounts
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import Answered
from opal_deploy.records.shifts import Shift
from opal_deploy.visualization.overlay import draw_overlay, embed_jpeg, photograph_size
from opal_deploy.visualization.pages import Picture, content_digest, load_templates, mark_safe, read_style

# shifts shown, pictures of each before and after, and bars of classes
_SHOWN, _PICTURES, _CLASSES = 10, 4, 10
# longest side of a picture, in pixels
_SIDE = 240


@dataclass(frozen=True)
class Bar:
    """A class, place or range of values, and its share of the answers before and after."""

    name: str
    before: float
    after: float


@dataclass
class _Examples:
    """A random sample of the records that show a shift: those with the smallest of random keys."""

    shift: Shift
    cases: bool
    kept: list[tuple[float, Answered]] = field(default_factory=list)

    def offer(self, found: Sequence[tuple[float, Answered]]) -> None:
        """Keep the records with the smallest keys."""
        self.kept = heapq.nsmallest(_PICTURES, [*self.kept, *found], key=lambda entry: entry[0])

    def pictures(self, root: Path) -> list[Picture]:
        """Return the pictures of the records whose image can be found."""
        drawn = (_draw(record, self.shift, root) for _, record in self.kept)
        return [picture for picture in drawn if picture is not None]


def write_page(
    page: Path,
    report: DriftReport,
    counts: DriftCounts,
    runs: tuple[Answers, Answers | None],
    layout: Layout,
    root: Path,
    *,
    overwrite: bool,
) -> None:
    """Write the page; it needs no other file and no network.

    Args:
        counts: of the answers.
        runs: the results, and the earlier ones that they were compared with, if they were.
        root: folder that the names of local images are relative to; pictures that are not there are left out.
        overwrite: whether a file of that name is replaced.

    Raises:
        UsageError: the file cannot be written, or the results cannot be read again.
    """
    shifts = report.shifts[:_SHOWN]
    answers, earlier = runs
    # slots that left a place are shown elsewhere
    moved_away = [shift.kind == "place" and not shift.rose for shift in shifts]
    after = _choose(answers, shifts, layout, [not away for away in moved_away])
    usual = [shift.kind == "label" or away for shift, away in zip(shifts, moved_away, strict=True)]
    before = None if earlier is None else _choose(earlier, shifts, layout, usual)
    style = read_style(__package__, "drift.css")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{content_digest(style)}'; base-uri 'none'; form-action 'none'"
    )
    text = (
        load_templates(__package__)
        .get_template("drift.html.jinja")
        .render(
            policy=policy, style=mark_safe(style), report=report, results=answers.shown,
            sections=[
                {
                    "shift": shift, "text": shift.describe(report.class_names),
                    "bars": _bars(shift, counts, report.class_names),
                    "after": after[number].pictures(root),
                    "before": [] if before is None else before[number].pictures(root),
                }
                for number, shift in enumerate(shifts)
            ],
        )
    )  # fmt: skip
    with atomic_write(page, replace=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _bars(shift: Shift, counts: DriftCounts, class_names: Sequence[str]) -> list[Bar]:
    bars = [Bar(*bar) for bar in counts.histogram(shift)]
    if shift.kind != "label":
        return bars
    named = [Bar(class_names[int(bar.name)], bar.before, bar.after) for bar in bars]
    return sorted(named, key=lambda bar: -abs(bar.after - bar.before))[:_CLASSES]


def _choose(answers: Answers, shifts: Sequence[Shift], layout: Layout, cases: Sequence[bool]) -> list[_Examples]:
    """Return examples of each shift: of its class, those that are cases of it, or those that are not."""
    chosen = [_Examples(shift, case) for shift, case in zip(shifts, cases, strict=True)]
    random = np.random.default_rng(0)
    for records, observations in answers.observe(layout):
        keys = random.random(len(records))
        for examples in chosen:
            shift = examples.shift
            of_class = shift.slot is None or observations.class_ids == shift.class_id
            rows = np.flatnonzero(of_class & (shift.find_cases(observations) == examples.cases))
            examples.offer([(float(keys[row]), records[row]) for row in rows.tolist()])
    return chosen


def _draw(record: Answered, shift: Shift, root: Path) -> Picture | None:
    """Return the picture of a record, of a slot's shift with its box only; None if the image is gone."""
    try:
        image = load_record_image(record, locate(unescape_name(record.image or ""), root))
    except ImageError:
        return None
    slots = tuple(slot for slot in record.evidence if shift.slot is None or slot.slot == shift.slot)
    overlay = draw_overlay(image, replace(record, evidence=slots))
    # without its legend
    photograph = overlay.crop((0, 0, *photograph_size(*image.size)))
    photograph.thumbnail((_SIDE, _SIDE))
    return Picture(embed_jpeg(photograph), record.image or "")
