"""Records as COCO annotations, which Label Studio imports too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

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
