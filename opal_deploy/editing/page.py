"""The page of an edit: slots to tick, what ticking them does to the accuracy, and the images whose answer changes."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.drops import name_slot
from opal_deploy.editing.scores import Effect, ScoredData
from opal_deploy.editing.suggestions import Suggestion
from opal_deploy.preprocess.decode import decode
from opal_deploy.visualization.boxes import SlotBox, draw_boxes
from opal_deploy.visualization.overlay import embed_jpeg
from opal_deploy.visualization.pages import (
    Picture,
    json_script,
    read_asset,
    read_class_map_script,
    render_page,
    save_page,
)

_STRONGEST, _CHANGED = 4, 60
_SIDE = 160
# scores in the page: 4,000 images of a model with 1,000 slots are 21 MB, 4 bytes each in base64
_MAX_SCORES = 4_000_000


def write_page(
    page: Path,
    data: ScoredData,
    drop: Sequence[int],
    effect: Effect | None,
    suggestions: Sequence[Suggestion],
    command: Sequence[str],
    *,
    overwrite: bool,
) -> None:
    """Write the page; it needs no other file and no network.

    Args:
        drop: channels that are ticked at first.
        command: the words of `opal-deploy edit MODEL ...`, which the page shows with the ticked slots.

    Raises:
        UsageError: the file cannot be written.
    """
    metadata, scores = data.metadata, data.scores.values
    live = metadata.is_opal and scores.size <= _MAX_SCORES
    document = {
        "command": shlex.join(command[:3]),
        "rest": shlex.join(command[3:]),
        "epsilon": metadata.epsilon,
        "class_map": metadata.class_map.to_dict(),
        "names": [name_slot(channel, metadata) for channel in range(metadata.num_prototypes)],
        "labels": data.scores.labels.tolist(),
        "scores": base64.b64encode(scores.astype("<f4").tobytes()).decode() if live else "",
    }
    text = render_page(
        __package__, "edit", script=read_class_map_script() + read_asset(__package__, "edit.js"), model=command[2],
        live=live, images_count=len(scores), split=data.split, data=data.root.name, effect=effect,
        rows=list(_build_rows(data, drop, suggestions)), suggestions=bool(suggestions),
        changed=list(_list_changed(data, effect)), document=json_script("data", document),
    )  # fmt: skip
    save_page(page, text, overwrite=overwrite)


def _build_rows(data: ScoredData, drop: Sequence[int], suggestions: Sequence[Suggestion]) -> Iterator[dict[str, Any]]:
    """Yield the listed slots in their order, with pictures, then all others that can be dropped.

    `gain` is the change of the accuracy without the slot, in percentage points; None for its class's last slot.
    """
    listed = {suggestion.channel: suggestion for suggestion in suggestions}
    effects = dict(data.scores.try_each())
    for channel in [*listed, *(channel for channel in effects if channel not in listed)]:
        suggestion, effect = listed.get(channel), effects.get(channel)
        yield {
            "channel": channel, "name": name_slot(channel, data.metadata), "ticked": channel in drop,
            "reasons": [] if suggestion is None else [reason.text for reason in suggestion.reasons],
            "gain": None if effect is None else 100 * (effect.accuracy[1] - effect.accuracy[0]),
            "pictures": [] if suggestion is None else list(_draw_strongest(data, channel)),
        }  # fmt: skip


def _draw_strongest(data: ScoredData, channel: int) -> Iterator[Picture]:
    """Yield the images of the slot's class with its highest scores."""
    class_id, _ = data.metadata.class_map.owners(channel)[0]
    own = np.flatnonzero(data.scores.labels == class_id)
    best = own[np.argsort(-data.scores.values[own, channel], kind="stable")][:_STRONGEST]
    for row in best.tolist():
        yield _draw(data, row, class_id, [channel])


def _list_changed(data: ScoredData, effect: Effect | None) -> Iterator[dict[str, Any]]:
    """Yield the first images whose answer changes."""
    names = data.metadata.class_names
    if effect is None:
        return
    for row in effect.changed[:_CHANGED].tolist():
        label, before, after = (int(values[row]) for values in (effect.labels, effect.before, effect.after))
        path = data.samples[row].path
        yield {
            "name": str(path.relative_to(data.root) if path.is_relative_to(data.root) else path),
            "label": names[label], "before": names[before], "after": names[after],
            "verdict": {before: "right, then wrong", after: "wrong, then right"}.get(label, "wrong, still"),
            "picture": _draw(data, row, before, data.metadata.class_map.channels(before).tolist()),
        }  # fmt: skip


def _draw(data: ScoredData, row: int, class_id: int, channels: Sequence[int]) -> Picture:
    """Return the model's view of an image, with the cells of some slots of a class outlined."""
    geometry, grid = data.geometries[row], data.metadata.cells
    image = decode(data.samples[row].path).convert("RGB").crop(geometry.crop)
    scale = _SIDE / max(image.size)
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    boxes = []
    for channel in channels:
        place = np.divmod(data.cells[row, [channel]][None], grid.cols)
        box = grid.boxes([(0, 0, *image.size)], *place)[0, 0].tolist()
        boxes.append(SlotBox(data.metadata.class_map.slot_of(class_id, channel), box))
    draw_boxes(image, boxes, (1.0, 1.0))
    cells = ", ".join(name_slot(channel, data.metadata) for channel in channels)
    return Picture(embed_jpeg(image), f"{data.samples[row].path.name} with the cell of {cells} before the edit")
