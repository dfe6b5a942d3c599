"""Slots that look at the wrong thing, and why they are suspected.

Each reason compares where a slot's score comes from, over the images of its class, with what a slot of an object would
do. Images are weighted by score, since a slot that finds nothing in an image still reads some cell. Slots that find
nothing in any image of their class are not judged: their cells are chance, and they decide no answer.

    object       significantly less of its score comes from the object than the object has of the image
    parts        significantly less of its score comes from the annotated parts than they have of the image; of images
                 cropped to the object
    corner       most of its score comes from the image's corners: stamps, logos, time codes
    border       nearly all of its score comes from the outermost rows and columns: frames, captions, scale bars
    wrong        without it significantly more answers are right
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.drops import name_slot
from opal_deploy.editing.scores import Effect, ScoredData

# images of a class that a share of them needs
_MIN_IMAGES = 5
_CORNER_SHARE, _BORDER_SHARE = 0.5, 0.75
# side of a corner as a share of the grid's
_CORNER_SIDE = 1 / 8
_SIGNIFICANCE = 0.05
# standard errors below the expectation that only a twentieth of random shares reach
_STANDARD_ERRORS = 1.645
# a slot finds nothing where its score is less than twice the 1/K of an even attention
_SILENT = 2.0


@dataclass(frozen=True)
class Reason:
    """Why a slot is listed: the kind of the module's table, and a sentence."""

    kind: str
    text: str


@dataclass(frozen=True)
class Suggestion:
    """A slot that looks at the wrong thing, a candidate for `--drop`.

    `effect` is that of dropping this slot alone; None for its class's last slot, which cannot be dropped.
    """

    channel: int
    name: str  # CLASS/SLOT
    reasons: tuple[Reason, ...]
    effect: Effect | None


def suggest_slots(data: ScoredData) -> list[Suggestion]:
    """Return the slots that look at the wrong thing, those with most reasons first."""
    metadata, class_map = data.metadata, data.metadata.class_map
    effects = dict(data.scores.try_each())
    suggestions = []
    for class_id in range(metadata.num_classes):
        # whether answered correctly or not: a class that relies on a shortcut fails on images without it
        rows = np.flatnonzero(data.scores.labels == class_id)
        on_object = _compare_with_object(data, rows, class_id) if len(rows) >= _MIN_IMAGES else {}
        for channel in class_map.channels(class_id).tolist():
            reasons: list[Reason] = []
            if len(rows) >= _MIN_IMAGES and _finds_anything(data, rows, channel):
                reasons += [*_find_places(data, rows, channel), *on_object.get(channel, ())]
            effect = effects.get(channel)
            if effect is not None and effect.gained > effect.lost and effect.p_value < _SIGNIFICANCE:
                text = f"without it {effect.gained} more answers are right and {effect.lost} wrong"
                reasons.append(Reason("wrong", f"{text} (p = {effect.p_value:.2g})"))
            if reasons:
                suggestions.append(Suggestion(channel, name_slot(channel, metadata), tuple(reasons), effect))
    return sorted(suggestions, key=lambda suggestion: (-len(suggestion.reasons), suggestion.channel))


def choose_drops(data: ScoredData, suggestions: Sequence[Suggestion]) -> tuple[list[int], list[int]]:
    """Return the channels of the suspected slots that can be dropped, and of the slots that are better dropped.

    A class keeps an unsuspected slot that finds something in its images: without any it must be trained again. Slots
    are better dropped if more answers are right without them; these are chosen one by one, the most useful first.
    """
    class_map, suspected = data.metadata.class_map, [suggestion.channel for suggestion in suggestions]
    sound = set()
    for class_id in range(data.metadata.num_classes):
        rows = np.flatnonzero(data.scores.labels == class_id)
        others = set(class_map.channels(class_id).tolist()).difference(suspected)
        if any(not len(rows) or _finds_anything(data, rows, channel) for channel in others):
            sound.add(class_id)
    droppable = [slot for slot in suspected if all(class_id in sound for class_id, _ in class_map.owners(slot))]
    chosen: list[int] = []
    while True:
        effects = data.scores.try_each(class_map, droppable)
        gains = {channel: effect.gained - effect.lost for channel, effect in effects}
        best = max(gains, key=gains.__getitem__, default=None)
        if best is None or gains[best] <= 0:
            return droppable, chosen
        chosen.append(best)
        class_map = class_map.drop([best])


def _finds_anything(data: ScoredData, rows: NDArray[np.int64], channel: int) -> bool:
    return bool(data.scores.values[rows, channel].max(initial=0) >= _SILENT / data.metadata.num_prototypes)


def _find_places(data: ScoredData, rows: NDArray[np.int64], channel: int) -> Iterator[Reason]:
    height, width = data.metadata.grid
    y, x = np.indices((height, width))
    from_edge_y, from_edge_x = np.minimum(y, height - 1 - y), np.minimum(x, width - 1 - x)
    corners = (from_edge_y < math.ceil(height * _CORNER_SIDE)) & (from_edge_x < math.ceil(width * _CORNER_SIDE))
    border = (from_edge_y == 0) | (from_edge_x == 0)
    cells, weights = data.cells[rows, channel], data.scores.values[rows, channel].astype(np.float64)
    for kind, place, region, limit in (
        ("corner", "the corners", corners, _CORNER_SHARE),
        ("border", "the border", border, _BORDER_SHARE),
    ):
        share = float(np.average(region.ravel()[cells], weights=weights))
        if share >= limit:
            yield Reason(kind, f"{share:.0%} of its score comes from {place} ({region.mean():.0%} of the cells)")
            return


def _compare_with_object(data: ScoredData, rows: NDArray[np.int64], class_id: int) -> dict[int, list[Reason]]:
    """Return, by channel, the slots that read the object, or its parts, significantly less than random cells."""
    if not data.annotations.known:
        return {}
    grid, channels = data.metadata.cells, data.metadata.class_map.channels(class_id)
    images = {row: data.annotations.images[row] for row in rows.tolist()}
    inside: dict[int, NDArray[np.bool_]] = {}
    has_objects = any(image.has_object for image in images.values())
    kind, place = ("object", "the object") if has_objects else ("parts", "the annotated parts")
    for row, image in images.items():
        geometry = data.geometries[row]
        if has_objects and image.has_object:
            inside[row] = image.in_object(grid.centres(geometry.crop))
        elif not has_objects and image.parts:
            inside[row] = image.on_parts(grid.centres(geometry.crop), geometry).any(axis=1)
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
