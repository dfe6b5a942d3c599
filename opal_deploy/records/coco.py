"""Records as COCO-style annotations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from opal_deploy.records.names import readable_name

if TYPE_CHECKING:
    from opal_deploy.records.record import Record, Slot

Categories = Literal["class", "slot"]


def to_coco(records: Iterable[Record], categories: Categories = "class") -> dict[str, Any]:
    """Return a COCO document (`images`, `annotations`, `categories`), one annotation a slot of each answered image.

    `bbox` is [x, y, width, height] in pixels of the whole oriented image, `score` the slot's score; `attributes` hold
    slot, channel, cell, contribution and the predicted label. Identifiers begin with 1, as in COCO's own files. Images
    with an error have no size and are left out; `info` has their number.

    Args:
        records: from `Model.explain`, or the lines of a results.jsonl.
        categories: `class`: a category is the predicted class, its identifier class_id + 1. `slot`: a category is the
            slot, its identifier channel + 1 and its supercategory the class. Only those that occur are listed.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    used: dict[int, dict[str, Any]] = {}
    unanswered = 0
    for record in records:
        if "prediction" not in record:
            unanswered += 1
            continue
        image_id = len(images) + 1
        images.append(
            {
                "id": image_id,
                "file_name": readable_name(record["image"]),
                "width": record["width"],
                "height": record["height"],
            }
        )
        for slot in record.get("evidence", []):
            category = _build_category(record, slot, categories)
            used.setdefault(category["id"], category)
            annotations.append(_build_annotation(len(annotations) + 1, image_id, category["id"], record, slot))
    return {
        "info": {
            "description": "The evidence for each predicted class, by opal-deploy",
            "images_without_an_answer": unanswered,
        },
        "images": images,
        "annotations": annotations,
        "categories": [used[number] for number in sorted(used)],
    }


def _build_category(record: Record, slot: Slot, categories: Categories) -> dict[str, Any]:
    answer = record["prediction"]
    if categories == "class":
        return {"id": answer["class_id"] + 1, "name": answer["label"], "supercategory": ""}
    name = slot.get("name") or f"{answer['label']} slot {slot['slot']}"
    return {"id": slot["channel"] + 1, "name": name, "supercategory": answer["label"]}


def _build_annotation(number: int, image_id: int, category_id: int, record: Record, slot: Slot) -> dict[str, Any]:
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
