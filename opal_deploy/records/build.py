"""Records built from a model's outputs, a batch at a time.

Needs numpy only. Everything is arithmetic on the outputs of the forward pass; nothing is smoothed or recomputed from
pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from opal_deploy.artifact.class_map import find_margins
from opal_deploy.artifact.heads import find_strongest
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import PER_IMAGE, Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.records.evidence import SlotEvidence, TopClasses, find_boxes, find_evidence, find_top_classes
from opal_deploy.records.names import SlotNames
from opal_deploy.records.record import RECORD_SCHEMA, Answer, Answered, Failed, Label, Problem, Slot
from opal_deploy.records.regions import find_regions

# the outputs of one number per image that are fields of a record
RECORDED_OUTPUTS = tuple(name for name in PER_IMAGE if name in Answered.__struct_fields__)


class ImageInfo(NamedTuple):
    """The part of a record that does not come from the model.

    Attributes:
        name: None for an image without a name.
        geometry: the image's size and crop.
        fields: other fields of the record by name, such as `label` and `image_sha256`.
    """

    name: str | None
    geometry: Geometry
    fields: Mapping[str, Any] = MappingProxyType({})


def build_records(
    images: Sequence[ImageInfo],
    outputs: Outputs,
    metadata: Metadata,
    *,
    top: int = 5,
    decision: Decision = NO_DECISION,
    slot_names: SlotNames | None = None,
) -> list[Answered]:
    """Return the records of N images, in the order of the outputs, whose logits are all finite.

    Args:
        top: number of classes to list, or all that the model lists.
        decision: gives each record its status; resolved, see `Decision.resolve`.
    """
    best = find_top_classes(outputs, metadata, max(top, 2))
    all_slots: Iterable[tuple[Slot, ...]] = itertools.repeat(())
    if metadata.evidence == "exact":
        geometries = [image.geometry for image in images]
        evidence = find_evidence(outputs, best.class_ids[:, 0], geometries, metadata, best.norms)
        all_slots = _build_slots(evidence, metadata, slot_names or {})
    elif metadata.evidence == "regions":
        all_slots = (
            _build_regions(int(class_id), image.geometry, outputs.rows(row, row + 1), metadata)
            for row, (class_id, image) in enumerate(zip(best.class_ids[:, 0], images, strict=False))
        )
    columns = {name: array.tolist() for name, array in outputs.per_image().items()}
    totals = None if metadata.is_opal or best.totals is None else best.totals[:, 0]
    is_multi_label = metadata.is_multi_label
    # a runner-up may be right as well
    margins = None if best.totals is None or is_multi_label else find_margins(best.totals)
    records = []
    for number, (image, answers, slots) in enumerate(
        zip(images, _build_answers(best, metadata), all_slots, strict=False)
    ):
        margin = None if margins is None or np.isnan(margins[number]) else float(margins[number])
        values = {"margin": margin, **{name: column[number] for name, column in columns.items()}}
        status, reason = decision.judge(values, answers[0].class_id, slots, metadata)
        record = Answered(
            schema=RECORD_SCHEMA, image=image.name, status=status, width=image.geometry.width,
            height=image.geometry.height, prediction=answers[0], margin=margin, reason=reason or None,
            top=answers[:top], evidence=slots, **image.fields,
            labels=_list_labels(outputs.rows(number, number + 1), image.geometry, metadata) if is_multi_label else None,
            **({} if totals is None else _describe_rest(float(totals[number]), answers[0].class_id, slots, metadata)),
            **{name: values[name] for name in RECORDED_OUTPUTS if name in values},
        )  # fmt: skip
        records.append(record)
    return records


def _list_labels(outputs: Outputs, geometry: Geometry, metadata: Metadata) -> tuple[Label, ...]:
    """Return the classes whose logits are above 0, the strongest first, of the only image."""
    logits, labels = outputs.logits[0].astype(np.float64), []
    for place, class_id in enumerate(np.argsort(-logits, kind="stable")[: int((logits > 0).sum())].tolist()):
        logit, parts = float(logits[class_id]), dict[str, Any]()
        if place < metadata.num_shared:
            slots = _build_regions(class_id, geometry, outputs, metadata)
            parts = {"evidence": slots, **_describe_rest(logit, class_id, slots, metadata)}
        probability = 1 / (1 + math.exp(-logit))
        labels.append(Label(class_id, metadata.class_names[class_id], logit, probability, **parts))
    return tuple(labels)


def class_evidence(
    class_id: int, geometry: Geometry, outputs: Outputs, metadata: Metadata, names: SlotNames | None = None
) -> tuple[Slot, ...]:
    """Return the slots of any class, predicted or not, for one image, N = 1.

    Raises:
        ValueError: the model's evidence is not `exact`, or it does not list this class.
    """
    if metadata.evidence == "regions":
        return _build_regions(class_id, geometry, outputs, metadata)
    return next(_build_slots(find_evidence(outputs, np.array([class_id]), [geometry], metadata), metadata, names or {}))


def _describe_rest(total: float, class_id: int, slots: Sequence[Slot], metadata: Metadata) -> dict[str, Any]:
    """Return the unlisted parts of a linear head's logit: the sum of other contributions, and the bias."""
    bias = float(metadata.class_map.biases[class_id])
    return {"rest": math.fsum([total, -bias, *(-(slot.contribution or 0.0) for slot in slots)]), "bias": bias}


def _build_answers(best: TopClasses, metadata: Metadata) -> Iterator[tuple[Answer, ...]]:
    labels = metadata.class_names
    unknown = itertools.repeat(itertools.repeat(None))
    all_cosines, all_probabilities = (
        unknown if values is None else values.tolist()
        for values in (best.totals if metadata.is_opal else None, best.probabilities)
    )
    columns = best.class_ids.tolist(), best.logits.tolist(), all_cosines, all_probabilities
    for answers in zip(*columns, strict=False):
        yield tuple([
            Answer(
                class_id=number, label=labels[number], logit=logit, cosine=cosine, calibrated_probability=probability
            )
            for number, logit, cosine, probability in zip(*answers, strict=False)
        ])  # fmt: skip


def _build_regions(class_id: int, geometry: Geometry, outputs: Outputs, metadata: Metadata) -> tuple[Slot, ...]:
    """Return the regions that speak for one of the classes whose shares one image's outputs hold."""
    assert outputs.shares is not None
    assert outputs.share_classes is not None
    place = outputs.share_classes[0].tolist().index(class_id)
    regions = find_regions(outputs.shares[0, place])
    corners = np.array([(region.first, region.last) for region in regions])  # [n, 2, 2]
    boxes = find_boxes(metadata, [geometry], *np.moveaxis(corners.reshape(1, -1, 2), 2, 0))
    edges = boxes[0].reshape(-1, 2, 4)  # of the first and the last cell of each region
    return tuple(
        Slot(
            slot=number, channel=class_id * metadata.prototypes_per_class + number, cell=region.cell,
            score=region.share, contribution=region.total, box=(*first[:2].tolist(), *last[2:].tolist()),
        )
        for number, (region, (first, last)) in enumerate(zip(regions, edges, strict=True))
    )  # fmt: skip


def _build_slots(evidence: SlotEvidence, metadata: Metadata, names: SlotNames) -> Iterator[tuple[Slot, ...]]:
    no_parts = itertools.repeat(itertools.repeat(None))
    listed = metadata.class_map.kept[evidence.class_ids]
    numbers = np.broadcast_to(np.arange(listed.shape[1]), listed.shape)
    columns: list[Any] = [metadata.class_map.channel_table[evidence.class_ids], evidence.cells, evidence.scores,
                          evidence.boxes, evidence.contributions]  # fmt: skip
    if metadata.shares_prototypes:
        numbers, listed = find_strongest(evidence.contributions, listed)
        rows = np.arange(len(numbers))[:, None]
        columns = [column[rows, numbers] for column in columns]
    *arrays, parts = columns
    all_parts = no_parts if parts is None else parts.tolist()
    arrays = [evidence.class_ids, listed, numbers, *arrays]
    for class_id, is_kept, *values, own in zip(*(array.tolist() for array in arrays), all_parts, strict=False):
        yield tuple([
            Slot(
                slot=slot, channel=channel, cell=tuple(cell), score=score, contribution=part, box=tuple(box),
                name=names.get((class_id, slot)),
            )
            for is_listed, slot, channel, cell, score, box, part in zip(is_kept, *values, own, strict=False)
            if is_listed
        ])  # fmt: skip


def error_record(image: str | None, code: str, message: str, **fields: Any) -> Failed:
    """Return the record of an image that could not be classified; `fields` are others of `Failed`."""
    error = Problem(code=code, message=message)
    return Failed(schema=RECORD_SCHEMA, image=image, status="error", error=error, **fields)
