"""Records as COCO-style annotations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from opal_deploy.records.names import file_name
from opal_deploy.records.record import Record, Slot

Categories = Literal["class", "slot"]


def to_coco(records: Iterable[Record], categories: Categories = "class") -> dict[str, Any]:
    """A COCO document (`images`, `annotations`, `categories`), one annotation a slot of each answered image.

    `bbox` is [x, y, width, height] in pixels of the whole oriented picture; `score` the slot's score; `attributes` hold
    slot, channel, cell, contribution and the predicted label. Identifiers begin with 1, as in COCO's own files. An
    image with an error has no size, and is left out; `info` says how many were.

    Args:
        records: of `Model.explain`, or the lines of a results.jsonl.
        categories: `class`: the predicted class, its identifier is class_id + 1. `slot`: the slot, channel + 1, whose
            supercategory is the class. Only those that occur are listed.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    found: dict[int, dict[str, Any]] = {}
    left_out = 0
    for record in records:
        if "prediction" not in record:
            left_out += 1
            continue
        image_id = len(images) + 1
        images.append(
            {
                "id": image_id,
                "file_name": file_name(record["image"]),
                "width": record["width"],
                "height": record["height"],
            }
        )
        for slot in record.get("evidence", []):
            category = _category(record, slot, categories)
            found.setdefault(category["id"], category)
            annotations.append(_annotation(len(annotations) + 1, image_id, category["id"], record, slot))
    return {
        "info": {
            "description": "The evidence for each predicted class, by opal-deploy",
            "images_without_an_answer": left_out,
        },
        "images": images,
        "annotations": annotations,
        "categories": [found[number] for number in sorted(found)],
    }


def _category(record: Record, slot: Slot, categories: Categories) -> dict[str, Any]:
    answer = record["prediction"]
    if categories == "class":
        return {"id": answer["class_id"] + 1, "name": answer["label"], "supercategory": ""}
    name = slot.get("name") or f"{answer['label']} slot {slot['slot']}"
    return {"id": slot["channel"] + 1, "name": name, "supercategory": answer["label"]}


def _annotation(number: int, image_id: int, category_id: int, record: Record, slot: Slot) -> dict[str, Any]:
    x0, y0, x1, y1 = slot["box"]
    return {
        "id": number,
        "image_id": image_id,
        "category_id": category_id,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
        "iscrowd": 0,
        "score": slot["score"],
        "attributes": {
            "label": record["prediction"]["label"],
            "slot": slot["slot"],
            "channel": slot["channel"],
            "cell": slot["cell"],
            "contribution": slot["contribution"],
        },
    }
