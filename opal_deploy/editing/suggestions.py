"""Slots that look at the wrong thing, and why they are suspected.

Each reason compares where a slot's score comes from, over the images of its class, with what a slot of an object would
do. Images are weighted by score, since a slot that finds nothing in an image still reads some cell. Slots that find
nothing in any image of their class are not judged: their cells are chance, and they decide no answer.

    background   it fires on images without an object as strongly as on half of its class's images
    object       significantly less of its score comes from the object than the object has of the image
    parts        significantly less of its score comes from the annotated parts than they have of the image; of images
                 cropped to the object
    source       it fires on the images of one camera, program, size or folder, and less on the others of its class
    corner       most of its score comes from the image's corners: stamps, logos, time codes
    border       nearly all of its score comes from the outermost rows and columns: frames, captions, scale bars
    wrong        without it significantly more answers are right

A slot that nearly always shares its cell with a stronger slot of its class is `redundant`: listed, but not suspected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.drops import name_slot
from opal_deploy.datasets.samples import Sample
from opal_deploy.editing.data import ScoredData
from opal_deploy.editing.scores import Effect

REDUNDANT = "redundant"
# images of a class that a share of them needs
_MIN_IMAGES = 5
# share of background images that reach the median score of the class's own images; near 0 for slots on objects
_BACKGROUND_SHARE = 0.1
_CORNER_SHARE, _BORDER_SHARE, _SHARED_SHARE = 0.5, 0.75, 0.95
# side of a corner as a share of the grid's
_CORNER_SIDE = 1 / 8
_SIGNIFICANCE = 0.05
# area under the ROC curve with which a slot tells images of a source from others
_TELLS_SOURCE = 0.9
# standard errors below the expectation that only a twentieth of random shares reach
_STANDARD_ERRORS = 1.645
# properties of a file, and characters of a value
_TAGS = {"camera maker": ExifTags.Base.Make, "camera": ExifTags.Base.Model, "software": ExifTags.Base.Software}
_LONGEST = 60
# a slot finds nothing where its score is less than twice the 1/K of an even attention
_SILENT = 2.0


@dataclass(frozen=True)
class Reason:
    """Why a slot is listed: the kind of the module's table, and a sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class Suggestion:
    """A slot that is worth looking at.

    Attributes:
        class_id, channel: of the slot.
        name: CLASS/SLOT.
        images: images of its class, on which the shares in the reasons are measured.
        reasons: at least one.
        effect: of dropping this slot alone; None for its class's last slot, which cannot be dropped.
    """

    class_id: int
    channel: int
    name: str
    images: int
    reasons: tuple[Reason, ...]
    effect: Effect | None

    @property
    def suspected(self) -> bool:
        """Whether the slot looks at the wrong thing, so that it is a candidate for `--drop`."""
        return any(reason.kind != REDUNDANT for reason in self.reasons)


def suggest_slots(data: ScoredData) -> list[Suggestion]:
    """Return the slots that look at the wrong thing, those with most reasons first, then the redundant ones."""
    metadata, class_map = data.metadata, data.metadata.class_map
    effects = dict(data.scores.try_each())
    from_sources = _compare_sources(data)
    found = []
    for class_id in range(metadata.num_classes):
        # whether answered correctly or not: a class that relies on a shortcut fails on images without it
        rows = np.flatnonzero(data.scores.labels == class_id)
        on_object = _compare_with_object(data, rows, class_id) if len(rows) >= _MIN_IMAGES else {}
        for channel in class_map.channels(class_id).tolist():
            reasons = []
            if len(rows) >= _MIN_IMAGES and _finds_anything(data, rows, channel):
                reasons += [*_find_places(data, rows, channel), *on_object.get(channel, ())]
                reasons += from_sources.get(channel, ())
                reasons += [*_find_background(data, rows, channel), *_find_redundancy(data, rows, class_id, channel)]
            effect = effects.get(channel)
            if effect is not None and effect.gained > effect.lost and effect.p_value < _SIGNIFICANCE:
                text = f"without it {effect.gained} more answers are right and {effect.lost} wrong"
                reasons.append(Reason("wrong", f"{text} (p = {effect.p_value:.2g})"))
            if reasons:
                name = name_slot(channel, metadata)
                found.append(Suggestion(class_id, channel, name, len(rows), tuple(reasons), effect))
    return sorted(found, key=lambda each: (not each.suspected, -len(each.reasons), each.channel))


def choose_drops(data: ScoredData, suggestions: Sequence[Suggestion]) -> tuple[list[int], list[int]]:
    """Return the channels of the suspected slots that can be dropped, and of the slots that are better dropped.

    A class keeps a slot that finds something in its images: without any it must be trained again. Slots are better
    dropped if more answers are right without them; these are chosen one by one, the most useful first.
    """
    suspected = [each.channel for each in suggestions if each.suspected]
    useful = {
        channel
        for class_id in range(data.metadata.num_classes)
        for channel in data.metadata.class_map.channels(class_id).tolist()
        if not len(rows := np.flatnonzero(data.scores.labels == class_id)) or _finds_anything(data, rows, channel)
    }

    def keeps_useful(class_map: ClassMap, channel: int) -> bool:
        left = class_map.drop([channel])
        return all(useful.intersection(left.channels(class_id).tolist()) for class_id, _ in left.owners(channel))

    class_map, dropped = data.metadata.class_map, []
    while True:
        effects = data.scores.try_each(class_map, {each for each in suspected if keeps_useful(class_map, each)})
        gains = {channel: effect.gained - effect.lost for channel, effect in effects}
        best = max((each for each in suspected if each in gains), key=lambda each: gains[each], default=None)
        if best is None or gains[best] <= 0:
            break
        dropped.append(best)
        class_map = class_map.drop([best])
    sound = useful.difference(suspected)
    owners = {each: data.metadata.class_map.owners(each)[0][0] for each in suspected}
    channels = data.metadata.class_map.channels
    return [each for each in suspected if sound.intersection(channels(owners[each]).tolist())], dropped


def _finds_anything(data: ScoredData, rows: NDArray[np.int64], channel: int) -> bool:
    return bool(data.scores.values[rows, channel].max(initial=0) >= _SILENT / data.metadata.num_prototypes)


def _find_places(data: ScoredData, rows: NDArray[np.int64], channel: int) -> Iterator[Reason]:
    height, width = data.metadata.grid
    y, x = np.divmod(data.cells[rows, channel], width)
    from_edge_y, from_edge_x = np.minimum(y, height - 1 - y), np.minimum(x, width - 1 - x)
    side_y, side_x = math.ceil(height * _CORNER_SIDE), math.ceil(width * _CORNER_SIDE)
    weights = data.scores.values[rows, channel].astype(np.float64)
    corner = float(np.average((from_edge_y < side_y) & (from_edge_x < side_x), weights=weights))
    if corner >= _CORNER_SHARE:
        by_chance = 4 * side_y * side_x / (height * width)
        yield Reason("corner", f"{corner:.0%} of its score comes from the corners ({by_chance:.0%} of the cells)")
        return
    border = float(np.average((from_edge_y == 0) | (from_edge_x == 0), weights=weights))
    if border >= _BORDER_SHARE:
        by_chance = 1 - max(height - 2, 0) * max(width - 2, 0) / (height * width)
        yield Reason("border", f"{border:.0%} of its score comes from the border ({by_chance:.0%} of the cells)")


def _compare_with_object(data: ScoredData, rows: NDArray[np.int64], class_id: int) -> dict[int, list[Reason]]:
    """Return, by channel, the slots that read the object, or its parts, significantly less than random cells."""
    if not data.annotations.known:
        return {}
    grid, channels = data.metadata.grid, data.metadata.class_map.channels(class_id)
    images = {row: data.annotations.images[row] for row in rows.tolist()}
    inside: dict[int, NDArray[np.bool_]] = {}
    has_objects = any(image.has_object for image in images.values())
    kind, place = ("object", "the object") if has_objects else ("parts", "the annotated parts")
    for row, image in images.items():
        geometry = data.geometries[row]
        if has_objects and image.has_object:
            inside[row] = image.in_object(geometry.cell_centres(grid))
        elif not has_objects and image.parts:
            inside[row] = image.on_parts(geometry.cell_centres(grid), geometry).any(axis=1)
    if len(inside) < _MIN_IMAGES:
        return {}
    known, cells = [*inside], np.stack([*inside.values()])  # [n, H * W]
    hit = np.take_along_axis(cells, data.cells[known][:, channels], axis=1)  # [n, m_c]
    weights = data.scores.values[known][:, channels].astype(np.float64)
    shares = np.average(hit, axis=0, weights=weights)
    by_chance = float(cells.mean())
    # of a weighted mean of shares: Kish's effective number of images
    images = weights.sum(axis=0) ** 2 / (weights**2).sum(axis=0)
    limits = by_chance - _STANDARD_ERRORS * np.sqrt(by_chance * (1 - by_chance) / images)
    return {
        channel: [Reason(kind, f"{share:.0%} of its score comes from {place} ({by_chance:.0%} of the cells)")]
        for channel, share, limit in zip(channels.tolist(), shares.tolist(), limits.tolist(), strict=True)
        if share < limit
    }


def _compare_sources(data: ScoredData) -> dict[int, list[Reason]]:
    """Return, by channel, the slots that distinguish one source's images from the rest of their class."""
    from scipy.stats import mannwhitneyu

    sources = [read_source(sample) for sample in data.samples]
    candidates = []
    for class_id in range(data.metadata.num_classes):
        rows = np.flatnonzero(data.scores.labels == class_id)
        groups = _group_by_source([sources[row] for row in rows.tolist()])
        channels = data.metadata.class_map.channels(class_id).tolist()
        candidates += [(channel, rows, name, group) for name, group in groups.items() for channel in channels]
    reasons: dict[int, list[Reason]] = {}
    for channel, rows, name, group in candidates:
        scores = data.scores.values[rows, channel]
        inside, outside = scores[group], scores[~group]
        test = mannwhitneyu(inside, outside, alternative="greater", method="asymptotic", use_continuity=False)
        area = test.statistic / (len(inside) * len(outside))
        # Bonferroni: as many tests as candidates
        if area >= _TELLS_SOURCE and test.pvalue * len(candidates) < _SIGNIFICANCE:
            text = f"its mean score is {inside.mean():.2f} on the {len(inside)} images with {name}"
            text += f" and {outside.mean():.2f} on the {len(outside)} others of its class"
            reasons.setdefault(channel, []).append(Reason("source", text))
    return reasons


def read_source(sample: Sample) -> dict[str, str]:
    """Return the properties of an image's file that are known, such as {"camera": "NIKON D70"}."""
    source = {"folder": sample.path.parent.name}
    # the letters before a number: IMG_0123, DSC00456
    if prefix := re.match(r"[^\W\d_]{2,}", sample.path.name):
        source["file name"] = f"{prefix[0]}…"
    # damaged EXIF raises what its parser stumbles over; the pixels are fine
    with suppress(Exception), Image.open(sample.path) as image:
        source["size"] = f"{image.width}x{image.height}"
        exif = image.getexif()
        values = {name: exif.get(tag) for name, tag in _TAGS.items()}
        source |= {name: text for name, value in values.items() if (text := str(value or "").strip("\0 "))}
    return {name: value[:_LONGEST] for name, value in source.items()}


def _group_by_source(sources: Sequence[dict[str, str]]) -> dict[str, NDArray[np.bool_]]:
    """Return groups of n images that share a property, bool [n] by description; they and the rest have enough."""
    groups: dict[str, NDArray[np.bool_]] = {}
    for name in dict.fromkeys(name for source in sources for name in source):
        values = np.array([source.get(name, "") for source in sources])
        for value in np.unique(values[values != ""]).tolist():
            group = values == value
            # of properties that always come together the first is enough
            is_new = not any((group == known).all() for known in groups.values())
            if is_new and _MIN_IMAGES <= group.sum() <= len(group) - _MIN_IMAGES:
                groups[f"{name} {value}"] = group
    return groups


def _find_background(data: ScoredData, rows: NDArray[np.int64], channel: int) -> Iterator[Reason]:
    if data.background is None:
        return
    median = float(np.median(data.scores.values[rows, channel]))
    share = float((data.background[:, channel] >= median).mean())
    if share >= _BACKGROUND_SHARE:
        yield Reason("background", f"{share:.0%} of the background images reach its median score of {median:.2f}")


def _find_redundancy(data: ScoredData, rows: NDArray[np.int64], class_id: int, channel: int) -> Iterator[Reason]:
    scores = data.scores.values[rows].mean(axis=0)
    for other in data.metadata.class_map.channels(class_id).tolist():
        shared = float((data.cells[rows, other] == data.cells[rows, channel]).mean())
        # of equal ones the later slot is the redundant one
        if other != channel and shared >= _SHARED_SHARE and (-scores[other], other) < (-scores[channel], channel):
            name = f"slot {data.metadata.class_map.slot_of(class_id, other)}"
            yield Reason(
                REDUNDANT, f"it shares its cell with the stronger {name} on {shared:.0%} of its class's images"
            )
            return
