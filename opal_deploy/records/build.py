"""Records built from a model's outputs, a batch at a time.

Needs numpy only. Everything is arithmetic on the outputs of the forward pass; nothing is smoothed or recomputed from
pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import UNSET

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.slots import Slots
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.evidence import SlotEvidence, TopClasses, find_evidence, find_top_classes
from opal_deploy.records.names import SlotNames
from opal_deploy.records.record import RECORD_SCHEMA, Answer, Answered, Failed, Problem, Slot


class Digests(NamedTuple):
    """Hex sha256 of an image's file and of the model's file; None without a file, or if it was not hashed."""

    image_sha256: str | None
    model_sha256: str | None


class FramePlace(NamedTuple):
    """A frame's place in its video: number of frames before it, and seconds after the first, if known."""

    frame: int
    time: float | None


class ImageInfo(NamedTuple):
    """The part of a record that does not come from the model.

    All but the image's size and crop may be None: the image has no name, or the record no such field.
    """

    name: str | None
    geometry: Geometry
    digests: Digests | None = None
    label: str | None = None
    image_index: int | None = None
    frame: FramePlace | None = None


def build_records(
    images: Sequence[ImageInfo],
    outputs: Outputs,
    metadata: Metadata,
    *,
    top: int = 5,
    min_margin: float | None = None,
    max_strangeness: float | None = None,
    slot_names: SlotNames | None = None,
) -> list[Answered]:
    """Return the records of N images, in the order of the outputs, whose logits are all finite.

    Args:
        top: number of classes to list, or all that the model lists.
        min_margin: margin below which the status is `abstained`; None: never.
        max_strangeness: strangeness above which the status is `unknown`, whatever the margin; None: never.
    """
    best = find_top_classes(outputs, metadata, max(top, 2))
    all_slots: Iterable[tuple[Slot, ...]] = itertools.repeat(())
    if metadata.evidence == "exact":
        geometries = [image.geometry for image in images]
        evidence = find_evidence(outputs, best.class_ids[:, 0], geometries, metadata, best.norms)
        all_slots = _build_slots(evidence, metadata.slots, slot_names or {})
    scores: Iterable[float | None] = itertools.repeat(None)
    if outputs.strangeness is not None:
        scores = outputs.strangeness.tolist()
    records = []
    for image, answers, slots, ood_score in zip(
        images, _build_answers(best, metadata), all_slots, scores, strict=False
    ):
        first, second = answers[0].cosine, answers[1].cosine if len(answers) > 1 else None
        margin = None if first is None or second is None else first - second
        status: Literal["ok", "abstained", "unknown"] = "ok"
        reason = None
        if max_strangeness is not None and ood_score is not None and ood_score > max_strangeness:
            status, reason = "unknown", describe_strangeness(ood_score, max_strangeness, slots, metadata)
        elif min_margin is not None and margin is not None and margin < min_margin:
            status = "abstained"
        record = Answered(
            **_begin(image.name, image.image_index, image.digests, image.frame), status=status,
            width=image.geometry.width, height=image.geometry.height, prediction=answers[0], margin=margin,
            ood_score=ood_score, reason=reason, top=answers[:top], evidence=slots, label=image.label,
        )  # fmt: skip
        records.append(record)
    return records


def describe_strangeness(strangeness: float, limit: float, slots: Sequence[Slot], metadata: Metadata) -> str:
    """Return why an image is `unknown`, in words: its strangeness, and the slot whose score is the least usual."""
    text = f"strangeness {strangeness:.2f}, more than {limit:.2f}"
    baseline = metadata.known_baseline
    worst: tuple[float, str] | None = None
    for slot in slots:
        usual = None if baseline is None else baseline.find_slot(slot.channel)
        if usual is None:
            continue
        low, high, score = usual.score[0], usual.score[-1], slot.score
        unusual = max(low / max(score, 1e-9), score / max(high, 1e-9))
        if unusual > 1 and (worst is None or unusual > worst[0]):
            own = baseline is not None and slot.channel in baseline.slots
            whose = f"in {usual.images:,} images of this class" if own else "over all classes"
            worst = unusual, f"; slot {slot.slot} usually {low:.2g} to {high:.2g} {whose}, here {score:.2g}"
    if baseline is None:
        return text
    return text + (worst[1] if worst else "; the slots score as usual")


def class_evidence(class_id: int, geometry: Geometry, outputs: Outputs, metadata: Metadata) -> tuple[Slot, ...]:
    """Return the slots of any class, predicted or not, for one image, N = 1.

    Raises:
        ValueError: the model's evidence is not `exact`, or it does not list this class.
    """
    return next(_build_slots(find_evidence(outputs, np.array([class_id]), [geometry], metadata), metadata.slots, {}))


def _build_answers(best: TopClasses, metadata: Metadata) -> Iterator[tuple[Answer, ...]]:
    labels = metadata.class_names
    unknown = itertools.repeat(itertools.repeat(None))
    all_cosines, all_probabilities = (
        unknown if values is None else values.tolist() for values in (best.cosines, best.probabilities)
    )
    columns = best.class_ids.tolist(), best.logits.tolist(), all_cosines, all_probabilities
    for answers in zip(*columns, strict=False):
        yield tuple(
            [
                Answer(
                    class_id=number,
                    label=labels[number],
                    logit=logit,
                    cosine=cosine,
                    calibrated_probability=probability,
                )
                for number, logit, cosine, probability in zip(*answers, strict=False)
            ]
        )


def _build_slots(evidence: SlotEvidence, slots: Slots, names: SlotNames) -> Iterator[tuple[Slot, ...]]:
    num_slots, kept = evidence.scores.shape[1], slots.kept
    no_parts = itertools.repeat(itertools.repeat(None))
    all_parts = no_parts if evidence.contributions is None else evidence.contributions.tolist()
    arrays = (evidence.class_ids, evidence.cells, evidence.scores, evidence.boxes)
    for class_id, cells, scores, boxes, parts in zip(*(array.tolist() for array in arrays), all_parts, strict=False):
        first = class_id * num_slots
        yield tuple([
            Slot(
                slot=slot, channel=first + slot, cell=tuple(cell), score=score, contribution=part, box=tuple(box),
                name=names.get((class_id, slot)),
            )
            for slot, (cell, score, part, box) in enumerate(zip(cells, scores, parts, boxes, strict=False))
            if kept[class_id, slot]
        ])  # fmt: skip


def error_record(
    image: str | None,
    code: str,
    message: str,
    *,
    digests: Digests | None = None,
    label: str | None = None,
    index: int | None = None,
    frame: FramePlace | None = None,
) -> Failed:
    """Return the record of an image that could not be classified; optional arguments as in `ImageInfo`."""
    error = Problem(code=code, message=message)
    return Failed(**_begin(image, index, digests, frame), status="error", error=error, label=label)


def _begin(image: str | None, index: int | None, digests: Digests | None, frame: FramePlace | None) -> dict[str, Any]:
    """Return the values of the fields that every record begins with."""
    frame_index, time = (None, UNSET) if frame is None else frame
    image_sha256, model_sha256 = (None, None) if digests is None else digests
    return {
        "schema": RECORD_SCHEMA, "image": image, "image_index": index, "frame": frame_index, "time": time,
        "image_sha256": image_sha256, "model_sha256": model_sha256,
    }  # fmt: skip
