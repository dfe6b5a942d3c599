"""The record of one image, built from a model's outputs: a line of results.jsonl, returned by `Model.explain`.

Needs numpy only. Everything is arithmetic on the outputs of the forward pass; nothing is smoothed or recomputed from
pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypeAlias, TypedDict, get_args

import numpy as np

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.files import is_finite_number
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.decision import NO_DECISION, Decision
from opal_deploy.records.evidence import SlotEvidence, TopClasses, find_evidence, find_top_classes
from opal_deploy.records.names import SlotNames

RECORD_SCHEMA = 1

Status: TypeAlias = Literal["ok", "abstained", "unknown", "error"]
STATUSES: tuple[Status, ...] = get_args(Status)


class Digests(NamedTuple):
    """Hex sha256 of an image's file and of the model's file; None without a file, or if it was not hashed."""

    image_sha256: str | None
    model_sha256: str | None


class FramePlace(NamedTuple):
    """A frame's place in its video: number of frames before it, and seconds after the first, if known."""

    frame: int
    time: float | None


class Answer(TypedDict):
    """A class and how well the image matches it.

    `logit` is minus the distance to the class's anchor, `cosine` the cosine of the angle to it (None without anchors).
    `calibrated_probability` is softmax(logits / temperature) of the class; only if the model was calibrated and outputs
    all logits.
    """

    class_id: int
    label: str
    logit: float
    cosine: float | None
    calibrated_probability: NotRequired[float]


class Slot(TypedDict):
    """One prototype slot's evidence for the predicted class.

    `cell` is [row, col] of the feature map, `box` [x0, y0, x1, y1] in pixels of the whole oriented image, `score` in
    [0, 1] with channel-wise softmax. `contribution` is None if the distance is not a sum over slots.
    """

    slot: int
    channel: int
    cell: list[int]
    score: float
    contribution: float | None
    box: list[float]
    name: NotRequired[str]


class Problem(TypedDict):
    """Why an image has no answer or no drawing: a stable code and a message."""

    code: str
    message: str


class Signature(TypedDict):
    """A signature of the rest of the record, see `opal_deploy.records.signatures`.

    `key` is the hex sha256 of the public key in DER, `time` ISO 8601, `value` base64.
    """

    algorithm: str
    key: str
    time: str
    value: str


class Record(TypedDict):
    """One image's record.

    Attributes:
        image: the image's name; members of an archive may share theirs.
        image_index: position among all inputs of the run, from 0, the same in every shard; unique. Only from `infer`.
        status: `ok`, `abstained` (margin below --min-margin), `unknown` (OOD score above that of --unknown), or
            `error`, which has `error` instead of a prediction.
        frame: number of frames before a frame of a video.
        time: seconds after the video's first frame; None for a video without time stamps.
        image_sha256: digest of the image's or video's file; None without a file, or if it is unreadable or too large.
        model_sha256: digest of the model's file; None for a session without a file.
        width, height: pixels of the whole oriented image.
        margin: cosine of the prediction minus that of the runner-up; None without anchors.
        ood_score: how far the image's features are from those of the training images, at least 0; only if the model
            computes it.
        reason: why the status is `unknown`, in words.
        top: the best classes, the prediction first.
        evidence: slots of the predicted class; only if the model's evidence is `exact`.
        overlay, sheet: paths of the drawings, relative to the run's folder.
        drawing_error: why a requested drawing is missing.
        label: the image's label, if labels were given.
        signature: made of the finished record with `--sign`.
    """

    schema: int
    image: str | None
    image_index: NotRequired[int]
    status: Status
    frame: NotRequired[int]
    time: NotRequired[float | None]
    image_sha256: NotRequired[str | None]
    model_sha256: NotRequired[str | None]
    width: NotRequired[int]
    height: NotRequired[int]
    prediction: NotRequired[Answer]
    margin: NotRequired[float | None]
    ood_score: NotRequired[float]
    reason: NotRequired[str]
    top: NotRequired[list[Answer]]
    evidence: NotRequired[list[Slot]]
    overlay: NotRequired[str]
    sheet: NotRequired[str]
    drawing_error: NotRequired[Problem]
    label: NotRequired[str]
    error: NotRequired[Problem]
    signature: NotRequired[Signature]


def is_record(document: Any) -> bool:
    """Return whether a document of JSON is a whole record: no key is missing or has a value of another type."""
    if not (isinstance(document, dict) and document.get("schema") == RECORD_SCHEMA and "image" in document):
        return False
    status = document.get("status")
    required = {"ok": _ANSWERED, "abstained": _ANSWERED, "unknown": _ANSWERED, "error": _FAILED}.get(
        status if isinstance(status, str) else ""
    )
    return required is not None and _has(document, required, _OPTIONAL)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    # JSON's integers have no limit, those of numpy and of images do
    return type(value) is int and 0 <= value < 1 << 63


def _is_size(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_number_or_none(value: Any) -> bool:
    return value is None or is_finite_number(value)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_cell(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))


def _is_box(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(is_finite_number, value))


def _is_answer(value: Any) -> bool:
    return _has(value, _ANSWER, _CALIBRATED)


def _is_slot(value: Any) -> bool:
    return _has(value, _SLOT, _NAMED)


def _is_problem(value: Any) -> bool:
    return _has(value, _PROBLEM, {})


def _is_signature(value: Any) -> bool:
    return _has(value, _SIGNATURE, {})


def _are_answers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_answer, value))


def _are_slots(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_slot, value))


_Checks: TypeAlias = dict[str, Callable[[Any], bool]]
_ANSWER: _Checks = {"class_id": _is_count, "label": _is_text, "logit": is_finite_number, "cosine": _is_number_or_none}
_CALIBRATED: _Checks = {"calibrated_probability": is_finite_number}
_SLOT: _Checks = {
    "slot": _is_count, "channel": _is_count, "cell": _is_cell, "score": is_finite_number,
    "contribution": _is_number_or_none, "box": _is_box,
}  # fmt: skip
_NAMED: _Checks = {"name": _is_text}
_PROBLEM: _Checks = {"code": _is_text, "message": _is_text}
_SIGNATURE: _Checks = dict.fromkeys(("algorithm", "key", "time", "value"), _is_text)
_ANSWERED: _Checks = {
    "width": _is_size, "height": _is_size, "prediction": _is_answer, "margin": _is_number_or_none, "top": _are_answers,
}  # fmt: skip
_FAILED: _Checks = {"error": _is_problem}
_OPTIONAL: _Checks = {
    "ood_score": is_finite_number, "reason": _is_text,
    "image": _is_text_or_none, "image_index": _is_count, "frame": _is_count, "time": _is_number_or_none,
    "image_sha256": _is_text_or_none, "model_sha256": _is_text_or_none, "evidence": _are_slots, "overlay": _is_text,
    "sheet": _is_text, "drawing_error": _is_problem, "label": _is_text, "signature": _is_signature,
}  # fmt: skip


def _has(value: Any, required: _Checks, optional: _Checks) -> bool:
    """Return whether a value is an object with the required keys, all of which, and the optional ones, are valid."""
    if not isinstance(value, dict):
        return False
    for key, check in required.items():
        if key not in value or not check(value[key]):
            return False
    return all(check(value[key]) for key, check in optional.items() if key in value)


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
    decision: Decision = NO_DECISION,
    slot_names: SlotNames | None = None,
) -> list[Record]:
    """Return the records of N images, in the order of the outputs, whose logits are all finite.

    Args:
        top: number of classes to list, or all that the model lists.
        decision: gives each record its status; resolved, see `Decision.resolve`.
    """
    best = find_top_classes(outputs, metadata, max(top, 2))
    all_answers = _build_answers(best, metadata)
    all_slots: Iterable[list[Slot] | None] = itertools.repeat(None)
    if metadata.evidence == "exact":
        geometries = [image.geometry for image in images]
        evidence = find_evidence(outputs, best.class_ids[:, 0], geometries, metadata, best.norms)
        all_slots = _build_slots(evidence, metadata.class_map)
    columns = {name: array.tolist() for name, array in outputs.per_image().items()}
    records = []
    for number, (image, answers, slots) in enumerate(zip(images, all_answers, all_slots, strict=False)):
        first, second = answers[0]["cosine"], answers[1]["cosine"] if len(answers) > 1 else None
        margin = None if first is None or second is None else first - second
        values = {"margin": margin, **{name: column[number] for name, column in columns.items()}}
        status, reason = decision.judge(values, slots or (), metadata)
        record = _start_record(image.name, image.image_index, status, image.digests, image.frame)
        record["width"], record["height"] = image.geometry.width, image.geometry.height
        record["prediction"] = answers[0]
        record["margin"] = margin
        if (ood_score := values.get("ood_score")) is not None:
            record["ood_score"] = ood_score
        if reason:
            record["reason"] = reason
        record["top"] = answers[:top]
        if slots is not None:
            record["evidence"] = slots
            for slot in slots:
                if slot_names and (name := slot_names.get((answers[0]["class_id"], slot["slot"]))) is not None:
                    slot["name"] = name
        if image.label is not None:
            record["label"] = image.label
        records.append(record)
    return records


def describe_status(record: Record) -> str:
    """Return a sentence on a status that a reader should know; empty for `ok` and `error`."""
    if record["status"] == "unknown":
        return f"Unknown: {record.get('reason', 'OOD score above the threshold')}"
    return "Abstained: margin below the threshold" if record["status"] == "abstained" else ""


def class_evidence(class_id: int, geometry: Geometry, outputs: Outputs, metadata: Metadata) -> list[Slot]:
    """Return the slots of any class, predicted or not, for one image, N = 1.

    Raises:
        ValueError: the model's evidence is not `exact`, or it does not list this class.
    """
    return next(_build_slots(find_evidence(outputs, np.array([class_id]), [geometry], metadata), metadata.class_map))


def _build_answers(best: TopClasses, metadata: Metadata) -> Iterator[list[Answer]]:
    labels = metadata.class_names
    no_cosines = itertools.repeat(itertools.repeat(None))
    all_cosines = no_cosines if best.cosines is None else best.cosines.tolist()
    all_probabilities = itertools.repeat(None) if best.probabilities is None else best.probabilities.tolist()
    columns = best.class_ids.tolist(), best.logits.tolist(), all_cosines, all_probabilities
    for class_ids, logits, cosines, probabilities in zip(*columns, strict=False):
        answers: list[Answer] = [
            {"class_id": class_id, "label": labels[class_id], "logit": logit, "cosine": cosine}
            for class_id, logit, cosine in zip(class_ids, logits, cosines, strict=False)
        ]
        if probabilities is not None:
            for answer, probability in zip(answers, probabilities, strict=True):
                answer["calibrated_probability"] = probability
        yield answers


def _build_slots(evidence: SlotEvidence, class_map: ClassMap) -> Iterator[list[Slot]]:
    no_parts = itertools.repeat(itertools.repeat(None))
    all_parts = no_parts if evidence.contributions is None else evidence.contributions.tolist()
    tables = (table[evidence.class_ids] for table in (class_map.kept, class_map.channel_table))
    arrays = (*tables, evidence.cells, evidence.scores, evidence.boxes)
    for kept, *columns, parts in zip(*(array.tolist() for array in arrays), all_parts, strict=False):
        yield [
            {"slot": slot, "channel": channel, "cell": cell, "score": score, "contribution": part, "box": box}
            for slot, (channel, cell, score, box, part) in enumerate(zip(*columns, parts, strict=False))
            if kept[slot]
        ]


def error_record(
    image: str | None,
    code: str,
    message: str,
    *,
    digests: Digests | None = None,
    label: str | None = None,
    index: int | None = None,
    frame: FramePlace | None = None,
) -> Record:
    """Return the record of an image that could not be classified; optional arguments as in `ImageInfo`."""
    record = _start_record(image, index, "error", digests, frame)
    record["error"] = {"code": code, "message": message}
    if label is not None:
        record["label"] = label
    return record


def _start_record(
    image: str | None, index: int | None, status: Status, digests: Digests | None, frame: FramePlace | None
) -> Record:
    record: Record = {"schema": RECORD_SCHEMA, "image": image, "status": status}
    if index is not None:
        record["image_index"] = index
    if frame is not None:
        record["frame"], record["time"] = frame
    if digests is not None:
        record["image_sha256"], record["model_sha256"] = digests.image_sha256, digests.model_sha256
    return record
