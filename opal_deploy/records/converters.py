"""Records as COCO annotations, and as tasks for Label Studio's JSON import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, Literal
from urllib.parse import quote

from opal_deploy.records.names import readable_name
from opal_deploy.records.record import Answered, Failed, Record, Slot, to_record

Categories = Literal["class", "slot"]


def to_coco(records: Iterable[Record | Mapping[str, Any]], categories: Categories = "class") -> dict[str, Any]:
    """Return a COCO document (`images`, `annotations`, `categories`) with one annotation per slot.

    `bbox` is [x, y, width, height] in pixels of the whole oriented image, `score` the slot's score; `attributes` hold
    slot, channel, cell, contribution and the predicted label. IDs start at 1, as in COCO's own files. Images with an
    error have no size and are left out; `info` has their number.

    Args:
        records: records, those of `Model.predict` included, or the lines of a results.jsonl.
        categories: `class`: categories are predicted classes, with class_id + 1 as ID. `slot`: categories are slots,
            with channel + 1 as ID and the class as supercategory. Only those that occur are listed.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    used: dict[int, dict[str, Any]] = {}
    failed = 0
    for record in map(to_record, records):
        if isinstance(record, Failed):
            failed += 1
            continue
        image_id = len(images) + 1
        size = {"width": record.width, "height": record.height}
        images.append({"id": image_id, "file_name": readable_name(record.image), **size, **_index(record)})
        for slot in record.evidence:
            category = _build_category(record, slot, categories)
            used.setdefault(category["id"], category)
            annotations.append(_build_annotation(len(annotations) + 1, image_id, category["id"], record, slot))
    return {
        "info": {"description": "Evidence for the predicted classes, by opal-deploy", "failed_images": failed},
        "images": images,
        "annotations": annotations,
        "categories": [used[number] for number in sorted(used)],
    }


def _index(record: Record) -> dict[str, int]:
    """Return the field that distinguishes images of the same name."""
    return {} if record.image_index is None else {"image_index": record.image_index}


def _build_category(record: Answered, slot: Slot, categories: Categories) -> dict[str, Any]:
    answer = record.prediction
    if categories == "class":
        return {"id": answer.class_id + 1, "name": answer.label, "supercategory": ""}
    name = slot.name or f"{answer.label} slot {slot.slot}"
    return {"id": slot.channel + 1, "name": name, "supercategory": answer.label}


def _build_annotation(number: int, image_id: int, category_id: int, record: Answered, slot: Slot) -> dict[str, Any]:
    x0, y0, x1, y1 = slot.box
    return {
        "id": number,
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
        "iscrowd": 0,
        "score": slot.score,
        "attributes": {
            "label": record.prediction.label,
            "slot": slot.slot,
            "channel": slot.channel,
            "cell": list(slot.cell),
            "contribution": slot.contribution,
        },
    }


def to_label_studio(records: Iterable[Record | Mapping[str, Any]], prefix: str = "") -> list[dict[str, Any]]:
    """Return one task per image, for a project with the labelling interface of `label_config`.

    The predicted class is a choice, each slot a rectangle in percent of the whole oriented image, labelled `slot 0`,
    `slot 1`, ... The prediction's `score` is the margin, so that tasks can be sorted by certainty. An image with an
    error is a task without a prediction.

    Args:
        records: records, those of `Model.predict` included, or the lines of a results.jsonl.
        prefix: text before each image's path, such as `/data/local-files/?d=` for Label Studio's local storage. If it
            has a `?`, the paths are escaped as in a URL's query.
    """
    return [_build_task(record, prefix) for record in map(to_record, records)]


def label_config(records: Iterable[Record | Mapping[str, Any]]) -> str:
    """Return the labelling interface (XML) for `to_label_studio`, with the classes and slots that occur."""
    labels: dict[str, None] = {}
    slots = 0
    for record in map(to_record, records):
        if isinstance(record, Answered):
            labels.update(dict.fromkeys(answer.label for answer in record.top))
            slots = max(slots, len(record.evidence))
    choices = "".join(f'\n    <Choice value="{escape(label)}"/>' for label in labels)
    rectangles = "".join(f'\n    <Label value="slot {slot}"/>' for slot in range(slots))
    return (
        '<View>\n  <Image name="image" value="$image"/>\n'
        f'  <Choices name="class" toName="image" choice="single">{choices}\n  </Choices>\n'
        f'  <RectangleLabels name="slots" toName="image">{rectangles}\n  </RectangleLabels>\n</View>\n'
    )


def _build_task(record: Record, prefix: str) -> dict[str, Any]:
    name = readable_name(record.image)
    if "?" in prefix:  # `+` would be a space, and `#` the end
        name = quote(name)
    task: dict[str, Any] = {"data": {"image": prefix + name}, "meta": {"status": record.status, **_index(record)}}
    if isinstance(record, Failed):
        return task
    value = {"choices": [record.prediction.label]}
    choice = {"id": "class", "type": "choices", "from_name": "class", "to_name": "image", "value": value}
    prediction: dict[str, Any] = {
        "model_version": f"sha256 {record.model_sha256 or 'unknown'}",
        "result": [choice, *(_build_rectangle(record, slot) for slot in record.evidence)],
    }
    if record.margin is not None:
        prediction["score"] = record.margin
    return {**task, "predictions": [prediction]}


def _build_rectangle(record: Answered, slot: Slot) -> dict[str, Any]:
    x0, y0, x1, y1 = slot.box
    percent_x, percent_y = 100 / record.width, 100 / record.height
    corner = {"x": x0 * percent_x, "y": y0 * percent_y}
    size = {"width": (x1 - x0) * percent_x, "height": (y1 - y0) * percent_y}
    return {
        "id": f"slot-{slot.slot}",
        "type": "rectanglelabels",
        "from_name": "slots",
        "to_name": "image",
        "original_width": record.width,
        "original_height": record.height,
        "image_rotation": 0,
        "value": {**corner, **size, "rotation": 0, "rectanglelabels": [f"slot {slot.slot}"]},
        "score": slot.score,
    }
