"""The page of `drift`: the strongest shifts, each with bars before and after, and photographs that show it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from PIL import Image, ImageOps

from opal_deploy.api.explanation import load_record_image
from opal_deploy.artifact.baseline import Observations
from opal_deploy.artifact.files import atomic_write, without_folders
from opal_deploy.auditing.images import locate
from opal_deploy.auditing.observed import Layout, Observed
from opal_deploy.auditing.results import Results
from opal_deploy.errors import ImageError
from opal_deploy.records.drift import DriftCounts
from opal_deploy.records.names import unescape_name
from opal_deploy.records.record import Answered
from opal_deploy.records.shifts import Shift, interpret, kolmogorov_smirnov
from opal_deploy.visualization.overlay import draw_evidence, embed_jpeg, show_photograph
from opal_deploy.visualization.pages import Picture, render_page

if TYPE_CHECKING:
    from opal_deploy.auditing.drift import DriftOptions, DriftReport

# shifts shown, pictures of each before and after, and bars of classes
_SHOWN, _PICTURES, _CLASSES = 10, 4, 10
# longest side of a picture, in pixels
_SIDE = 240
# pictures of each run whose sharpness and brightness are compared, and the largest p-value of a difference
_MEASURED, _MAX_P = 40, 0.01


@dataclass
class _Examples:
    """A random sample of the records that show a shift, or of all records: those with the smallest random keys."""

    shift: Shift | None
    cases: bool = True
    number: int = _PICTURES
    kept: list[tuple[float, Answered]] = field(default_factory=list)

    def offer(self, found: Sequence[tuple[float, Answered]]) -> None:
        """Keep the records with the smallest keys."""
        self.kept = heapq.nsmallest(self.number, [*self.kept, *found], key=lambda entry: entry[0])

    def find(self, observations: Observations) -> NDArray[np.intp]:
        """Return the rows that show the shift, or the rows of its class that do not."""
        shift = self.shift
        if shift is None:
            return np.arange(len(observations))
        of_class = shift.slot is None or observations.class_ids == shift.class_id
        return np.flatnonzero(of_class & (shift.find_cases(observations) == self.cases))

    def load(self, root: Path) -> Iterator[tuple[Answered, Image.Image]]:
        """Yield the records whose image can be found, with it."""
        for _, record in self.kept:
            with contextlib.suppress(ImageError):
                yield record, load_record_image(record, locate(unescape_name(record.image or ""), root))

    def pictures(self, root: Path) -> list[Picture]:
        """Return pictures of the records whose image can be found; for a slot's shift, with that slot's box only."""
        slot = None if self.shift is None else self.shift.slot
        return [_draw(record, image, slot) for record, image in self.load(root)]


def write_page(
    page: Path,
    report: DriftReport,
    counts: DriftCounts,
    runs: tuple[Results, Results | None],
    layout: Layout,
    options: DriftOptions,
) -> None:
    """Write the page; it needs no other file and no network.

    Args:
        counts: of the answers.
        runs: the results, and the earlier results that they were compared with, if any.
        options: pictures that are not below their `root` are left out.

    Raises:
        UsageError: the file cannot be written, or the results cannot be read again.
    """
    shifts, root = report.shifts[:_SHOWN], Path(options.root)
    now, earlier = runs
    # slots that left a place are shown elsewhere
    moved_away = [shift.kind == "place" and not shift.rose for shift in shifts]
    after = _choose(now, shifts, layout, [not away for away in moved_away])
    usual = [shift.kind == "label" or away for shift, away in zip(shifts, moved_away, strict=True)]
    before = None if earlier is None else _choose(earlier, shifts, layout, usual)
    sections = [
        {
            "shift": shift, "text": shift.describe(report.class_names),
            "bars": _bars(shift, counts, report.class_names), "after": after[number].pictures(root),
            "before": [] if before is None else before[number].pictures(root),
        }
        for number, shift in enumerate(shifts)
    ]  # fmt: skip
    text = render_page(
        __package__, "drift", report=report, results=without_folders(now.shown), suggestions=interpret(report.shifts),
        looks=[] if before is None else _compare_looks(before[-1], after[-1], root), earlier=earlier, sections=sections,
    )  # fmt: skip
    with atomic_write(page, replace=options.overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")


def _bars(shift: Shift, counts: DriftCounts, class_names: Sequence[str]) -> list[tuple[str, float, float]]:
    """Return the bars of a shift: a class, place or range of values, and its share of the answers before and after."""
    bars = counts.histogram(shift)
    if shift.kind != "label":
        return bars
    named = [(class_names[int(class_id)], before, after) for class_id, before, after in bars]
    return sorted(named, key=lambda bar: -abs(bar[2] - bar[1]))[:_CLASSES]


def _choose(results: Results, shifts: Sequence[Shift], layout: Layout, cases: Sequence[bool]) -> list[_Examples]:
    """Return examples of each shift (cases of it, or others of its class) and of all records."""
    chosen = [*itertools.starmap(_Examples, zip(shifts, cases, strict=True)), _Examples(None, number=_MEASURED)]
    random = np.random.default_rng(0)
    for records, observations in Observed(results, layout):
        keys = random.random(len(records))
        for examples in chosen:
            examples.offer([(float(keys[row]), records[row]) for row in examples.find(observations).tolist()])
    return chosen


def _compare_looks(before: _Examples, after: _Examples, root: Path) -> list[str]:
    """Return whether sharpness and brightness of pictures differ from those before, in words."""
    from scipy.stats import ks_2samp

    looks = [
        np.array([_measure(image) for _, image in examples.load(root)]).reshape(-1, 2) for examples in (before, after)
    ]
    counts = len(looks[0]), len(looks[1])
    if min(counts) < _MEASURED // 2:
        return ["Sharpness and exposure were not compared: too few of the pictures were found; give --root."]
    texts, same = [], []
    names = (("sharpness", "blurrier", "sharper"), ("brightness", "darker", "brighter"))
    for (name, low, high), old, new in zip(names, looks[0].T, looks[1].T, strict=True):
        p = kolmogorov_smirnov(float(ks_2samp(old, new).statistic), *counts)
        if p > _MAX_P:
            same.append(name)
            continue
        middles = np.median(old), np.median(new)
        change = high if middles[1] > middles[0] else low
        numbers = f"median {name} {middles[1]:.2g}, before {middles[0]:.2g}"
        texts.append(f"Pictures are {change} than before: {numbers} ({counts[1]} and {counts[0]} pictures, p {p:.1g}).")
    if same:
        texts.append(f"No difference in {' or '.join(same)} was found ({counts[1]} and {counts[0]} pictures).")
    return texts


def _measure(image: Image.Image) -> tuple[float, float]:
    """Return a picture's sharpness, the standard deviation of its Laplacian, and its brightness; white is 1."""
    image = ImageOps.fit(image, (_SIDE, _SIDE), Image.Resampling.BOX)
    grey = np.asarray(image.convert("L"), np.float64) / 255
    laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * grey[1:-1, 1:-1]
    return float(laplacian.std()), float(grey.mean())


def _draw(record: Answered, image: Image.Image, slot: int | None) -> Picture:
    """Return a record's picture with the box of one slot, or of all."""
    slots = tuple(entry for entry in record.evidence if slot is None or entry.slot == slot)
    photograph = show_photograph(image, record)
    photograph.thumbnail((_SIDE, _SIDE))
    draw_evidence(photograph, replace(record, evidence=slots))
    return Picture(embed_jpeg(photograph), record.image or "")
