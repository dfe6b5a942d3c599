"""Records as Label Studio tasks with predictions, for its JSON import."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from opal_deploy.records.names import readable_name

if TYPE_CHECKING:
    from opal_deploy.records.record import Record, Slot


def to_label_studio(records: Iterable[Record], prefix: str = "") -> list[dict[str, Any]]:
    """Return one task an image, for a project with the labelling interface of `label_config`.

    The predicted class is a choice, each slot a rectangle in percent of the whole oriented image, labelled
    `slot 0`, `slot 1`, ... The prediction's `score` is the margin, so that a project may be sorted by it, the least
    certain first. An image with an error is a task without a prediction: a person can still label it.

    Args:
        records: from `Model.explain`, or the lines of a results.jsonl.
        prefix: text before each image's path, such as `/data/local-files/?d=` for its local storage.
    """
    return [_build_task(record, prefix) for record in records]


def label_config(records: Iterable[Record]) -> str:
    """Return the labelling interface for the tasks of `to_label_studio`: XML with the classes and slots that occur."""
    labels: dict[str, None] = {}
    slots = 0
    for record in records:
        labels.update(dict.fromkeys(answer["label"] for answer in record.get("top", [])))
        slots = max(slots, len(record.get("evidence", [])))
    choices = "".join(f'\n    <Choice value="{escape(label)}"/>' for label in labels)
    rectangles = "".join(f'\n    <Label value="slot {slot}"/>' for slot in range(slots))
    return (
        '<View>\n  <Image name="image" value="$image"/>\n'
        f'  <Choices name="class" toName="image" choice="single">{choices}\n  </Choices>\n'
        f'  <RectangleLabels name="slots" toName="image">{rectangles}\n  </RectangleLabels>\n</View>\n'
    )


def _build_task(record: Record, prefix: str) -> dict[str, Any]:
    name = readable_name(record["image"])
    task: dict[str, Any] = {"data": {"image": prefix + name}, "meta": {"status": record["status"]}}
    if "prediction" not in record:
        return task
    size = {"original_width": record["width"], "original_height": record["height"], "image_rotation": 0}
    choice = {
        "id": "class",
        "type": "choices",
        "from_name": "class",
        "to_name": "image",
        "value": {"choices": [record["prediction"]["label"]]},
    }
    rectangles = [
        {
            "id": f"slot-{slot['slot']}",
            "type": "rectanglelabels",
            "from_name": "slots",
            "to_name": "image",
            **size,
            "value": _build_rectangle(record, slot),
            "score": slot["score"],
        }
        for slot in record.get("evidence", [])
    ]
    prediction: dict[str, Any] = {
        "model_version": f"sha256 {record.get('model_sha256') or 'unknown'}",
        "result": [choice, *rectangles],
    }
    if record["margin"] is not None:
        prediction["score"] = record["margin"]
    return {**task, "predictions": [prediction]}


def _build_rectangle(record: Record, slot: Slot) -> dict[str, Any]:
    x0, y0, x1, y1 = slot["box"]
    percent_x, percent_y = 100 / record["width"], 100 / record["height"]
    return {
        "x": x0 * percent_x,
        "y": y0 * percent_y,
        "width": (x1 - x0) * percent_x,
        "height": (y1 - y0) * percent_y,
        "rotation": 0,
        "rectanglelabels": [f"slot {slot['slot']}"],
    }
