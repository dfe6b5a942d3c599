"""The record of one image, built from a model's outputs: a line of results.jsonl, and what `Model.explain` returns.

Only numpy is needed, so that a machine without torch explains as well as any. Everything is arithmetic on the outputs
of the forward pass; nothing is looked up, smoothed or recomputed from pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, NotRequired, TypeAlias, TypedDict

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import KL_EPSILON, DoubleArray, Outputs, cosines, embedding
from opal_deploy.preprocess.geometry import Geometry

RECORD_SCHEMA = 1

Status: TypeAlias = Literal["ok", "abstained", "error"]
# (class_id, slot) to the slot's name, where it has one
SlotName: TypeAlias = Callable[[int, int], str | None]


class Digests(NamedTuple):
    """Hex sha256 of an image's file and of the model's file; None where there is no file, or it was not hashed."""

    file_sha256: str | None
    model_sha256: str | None


class Answer(TypedDict):
    """A class and how well the image matches it.

    `logit` is minus the distance to the class's anchor; `cosine` that of the angle to it, None without anchors.
    """

    class_id: int
    label: str
    logit: float
    cosine: float | None


class Slot(TypedDict):
    """One prototype slot's evidence for the predicted class.

    `cell` is [row, col] of the feature map, `box` [x0, y0, x1, y1] in pixels of the whole image as a viewer shows it,
    `score` in [0, 1] with channel-wise softmax. `contribution` is an entry of `contributions`, None where the distance
    is no sum over slots. `name` is there where somebody named the slot.
    """

    slot: int
    channel: int
    cell: list[int]
    score: float
    contribution: float | None
    box: list[float]
    name: NotRequired[str]


class Problem(TypedDict):
    """The reason why an image has no answer: a stable code, and a line for a person."""

    code: str
    message: str


class Record(TypedDict):
    """One image's record; `status` says which of the optional keys are there.

    `ok` and `abstained` (a margin under --min-margin) have the prediction, `error` has `error` instead.

    Attributes:
        file_sha256: digest of the image file's bytes; None without a file, or where it cannot be read or is too large.
        model_sha256: digest of the model's file; None for a session without a file.
        width, height: pixels of the whole image as a viewer shows it.
        margin: cosine of the prediction minus that of the runner-up; None without anchors.
        top: the best classes, the prediction first.
        evidence: slots of the predicted class; only where the model's evidence is `exact`.
        overlay, sheet: paths of the drawn images, relative to the run's folder.
        truth: the image's label, where labels were given.
    """

    schema: int
    image: str | None
    status: Status
    file_sha256: NotRequired[str | None]
    model_sha256: NotRequired[str | None]
    width: NotRequired[int]
    height: NotRequired[int]
    prediction: NotRequired[Answer]
    margin: NotRequired[float | None]
    top: NotRequired[list[Answer]]
    evidence: NotRequired[list[Slot]]
    overlay: NotRequired[str]
    sheet: NotRequired[str]
    truth: NotRequired[str]
    error: NotRequired[Problem]


def contributions(block: DoubleArray, distance: str) -> DoubleArray | None:
    """Return the contribution of each slot of one class to its logit.

    Args:
        block: float64 [m], the embedding's entries of the class's block.
        distance: the head's distance.

    Returns:
        float64 [m]. For l2 they add up to the cosine <z, a_c>, for l1 and kl to the block's part of the distance, for
        l3 to the block's part of its third power (smaller is closer for these three). None for linf and tropical, where
        one extreme entry decides.
    """
    anchor = 1.0 / math.sqrt(len(block))
    values: DoubleArray | None = None
    if distance == "l2":
        values = block * anchor
    elif distance == "l1":
        values = np.abs(block - anchor)
    elif distance == "l3":
        values = np.abs(block - anchor) ** 3
    elif distance == "kl":
        values = block * (np.log(block + KL_EPSILON) - math.log(anchor + KL_EPSILON))
    return values


def build_record(
    image: str | None,
    geometry: Geometry,
    outputs: Outputs,
    row: int,
    metadata: Metadata,
    *,
    top: int = 5,
    min_margin: float | None = None,
    digests: Digests | None = None,
    slot_name: SlotName = lambda class_id, slot: None,
    truth: str | None = None,
) -> Record:
    """Return the record of image `row` of a batch's outputs.

    `margin` is the cosine of the predicted class minus that of the runner-up by logit. Evidence is that of the
    predicted class, in slot order; the key is absent unless the model's evidence is `exact`: elsewhere no single cell
    decided.

    Args:
        image: the image's name; None for an image without one.
        geometry: the image's size and crop.
        outputs: the model's outputs for the batch.
        row: the image's position in the batch.
        metadata: the model's metadata.
        top: number of classes to list.
        min_margin: margin below which the status is `abstained`; None: never.
        digests: of the image's file and the model's; None: the record has neither key.
        slot_name: names the slots of the evidence.
        truth: the image's label; None: the record has no such key.
    """
    logits = outputs.logits[row]
    scores = None if outputs.scores is None else outputs.scores[row]
    cosine = None if scores is None else cosines(scores[None], metadata.prototypes_per_class, metadata.epsilon)[0]
    # stable: of equal logits the lowest class id, as argmax would choose
    order = np.argsort(-logits, kind="stable")[: max(top, 2)]

    def answer(class_id: int) -> Answer:
        return {
            "class_id": class_id,
            "label": metadata.class_names[class_id],
            "logit": float(logits[class_id]),
            "cosine": None if cosine is None else float(cosine[class_id]),
        }

    answers = [answer(int(c)) for c in order]
    margin = None if cosine is None or len(order) < 2 else float(cosine[order[0]] - cosine[order[1]])
    abstained = min_margin is not None and margin is not None and margin < min_margin
    record = _start_record(image, "abstained" if abstained else "ok", digests)
    record["width"], record["height"] = geometry.width, geometry.height
    record["prediction"] = answers[0]
    record["margin"] = margin
    record["top"] = answers[:top]
    if metadata.evidence == "exact" and scores is not None and outputs.argmax is not None:
        record["evidence"] = class_evidence(int(order[0]), geometry, outputs, row, metadata)
        for slot in record["evidence"]:
            if (name := slot_name(int(order[0]), slot["slot"])) is not None:
                slot["name"] = name
    if truth is not None:
        record["truth"] = truth
    return record


def class_evidence(class_id: int, geometry: Geometry, outputs: Outputs, row: int, metadata: Metadata) -> list[Slot]:
    """Return the evidence of image `row` for any class, predicted or not: its slots in their order.

    Raises:
        ValueError: the model's evidence is not `exact`.
    """
    if metadata.evidence != "exact" or outputs.scores is None or outputs.argmax is None:
        raise ValueError(f"evidence {metadata.evidence!r}: no single cell decided")
    scores, argmax = outputs.scores[row], outputs.argmax[row]
    m = metadata.prototypes_per_class
    first = class_id * m
    z = embedding(scores[None], metadata.epsilon)[0]
    slot_contributions = contributions(z[first : first + m], metadata.distance)
    slots: list[Slot] = []
    for slot in range(m):
        channel = first + slot
        cell_row, cell_col = divmod(int(argmax[channel]), metadata.grid[1])
        slots.append(
            {
                "slot": slot,
                "channel": channel,
                "cell": [cell_row, cell_col],
                "score": float(scores[channel]),
                "contribution": None if slot_contributions is None else float(slot_contributions[slot]),
                "box": list(geometry.cell_box(cell_row, cell_col, metadata.grid)),
            }
        )
    return slots


def error_record(
    image: str | None, code: str, message: str, *, digests: Digests | None = None, truth: str | None = None
) -> Record:
    """Return the record of an image that could not be classified; `digests` and `truth` as in `build_record`."""
    record = _start_record(image, "error", digests)
    record["error"] = {"code": code, "message": message}
    if truth is not None:
        record["truth"] = truth
    return record


def _start_record(image: str | None, status: Status, digests: Digests | None) -> Record:
    record: Record = {"schema": RECORD_SCHEMA, "image": image, "status": status}
    if digests is not None:
        record["file_sha256"], record["model_sha256"] = digests.file_sha256, digests.model_sha256
    return record
