"""The record of one image: a line of results.jsonl, and `Explanation.record`.

The classes below declare each field once: its name, its type, when it may be missing, and its meaning. Reading and
writing, the JSON schema, the columns of tables (`tables`) and the reference page follow from them. An optional field
that a record lacks is None and is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from opal_deploy.artifact.documents import LARGEST, Number

RECORD_SCHEMA: Final = 1

AnswerStatus: TypeAlias = Literal["ok", "abstained", "unknown"]
Status: TypeAlias = Literal[AnswerStatus, "error"]
STATUSES: tuple[Status, ...] = get_args(Status)

# JSON's integers have no limit, those of numpy and of images do
_MOST = (1 << 63) - 1
# columns of int32; others are int64
_SMALL = {"arrow": "int32"}
Position = Annotated[int, Meta(ge=0, le=_MOST)]
Index = Annotated[int, Meta(ge=0, le=_MOST, extra=_SMALL)]
Pixels = Annotated[int, Meta(ge=1, le=_MOST, extra=_SMALL)]
# limits that the schema states and reading does not check
Probability = Annotated[Number, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Sha256 = Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-f]{64}$"})]
Code = Annotated[str, Meta(extra_json_schema={"pattern": "^[a-z][a-z0-9_]*$"})]


class Answer(Struct, frozen=True, omit_defaults=True):
    """A class and how well the image matches it."""

    class_id: Index
    label: str
    logit: Annotated[
        Number,
        Meta(description="Negative distance to the class's anchor; the plain softmax of logits is no probability."),
    ]
    cosine: Annotated[Number | None, Meta(description="Cosine to the class's anchor; null if the model has none.")]
    calibrated_probability: Annotated[
        Probability | None,
        Meta(
            description="softmax(logits / temperature): how likely the class is correct, for images like those that "
            "the temperature was fitted on. Absent if the model has no temperature or outputs only its best classes."
        ),
    ] = None


class Slot(Struct, frozen=True, omit_defaults=True):
    """One prototype slot's evidence for the predicted class."""

    slot: Annotated[Index, Meta(description="Number of the slot within its class, from 0.")]
    channel: Annotated[Index, Meta(description="The slot's channel in the graph's outputs.")]
    cell: Annotated[tuple[Index, Index], Meta(description="[row, col] of the feature map.")]
    score: Annotated[Number, Meta(description="In [0, 1] with softmax over channels.")]
    contribution: Annotated[
        Number | None,
        Meta(
            description="Contributions add up to the cosine (l2), to the class's share of the distance (l1, kl) or of "
            "its cube (l3). null if the distance has no such sum. Heads that share prototypes: weight times score, of "
            "either sign."
        ),
    ]
    box: Annotated[
        tuple[Number, Number, Number, Number],
        Meta(description="[x0, y0, x1, y1] in pixels of the whole image, EXIF orientation applied, crops undone."),
    ]
    name: Annotated[str | None, Meta(description="The slot's name, from a file of slot names.")] = None


class Label(Struct, frozen=True, omit_defaults=True):
    """One of an image's several labels, with the evidence for it."""

    class_id: Index
    label: str
    logit: Number
    probability: Annotated[Probability, Meta(description="The logit's sigmoid, as the classifier states it.")]
    evidence: Annotated[
        tuple[Slot, ...],
        Meta(description="Its regions, for the 40 strongest labels. Contributions, rest and bias add up to the logit."),
    ] = ()
    rest: Annotated[Number | None, Meta(description="Sum of the shares that are in no region listed.")] = None
    bias: Annotated[Number | None, Meta(description="The class's bias.")] = None


class Problem(Struct, frozen=True, omit_defaults=True):
    """Why an image has no answer or no drawing."""

    code: Annotated[Code, Meta(description="Stable code of the error.")]
    message: Annotated[str, Meta(description="One line of text.")]


class Signature(Struct, frozen=True, omit_defaults=True):
    """With --sign: a signature of all other fields and of its own, except value, as canonical JSON (RFC 8785)."""

    algorithm: Annotated[str, Meta(description="Ed25519 (RFC 8032).", extra_json_schema={"const": "ed25519"})]
    key: Annotated[Sha256, Meta(description="SHA-256 of the public key in DER (SubjectPublicKeyInfo).")]
    time: Annotated[str, Meta(description="When the record was signed, ISO 8601, UTC.")]
    value: Annotated[str, Meta(description="The signature in base64.")]
    run: Annotated[
        str | None,
        Meta(description="The `id` of the run's run.json, which is signed too. Absent in answers of `serve`."),
    ] = None


# of both kinds of records, after the fields that they do not share
_Label: TypeAlias = Annotated[str | None, Meta(description="The image's label, if labels were given.")]
_Signed: TypeAlias = Signature | None
_StatusT = TypeVar("_StatusT")


class _Image(Struct, Generic[_StatusT], frozen=True, omit_defaults=True):
    """The fields that every record begins with."""

    schema: Annotated[Literal[1], Meta(description="Version of this schema.")]
    image: Annotated[
        str | None,
        Meta(
            description="The image's path; backslashes are doubled, bytes that are not UTF-8 written as \\xNN. null "
            "for an image without a path. Members of an archive may share theirs."
        ),
    ]
    status: Annotated[
        _StatusT,
        Meta(
            description="ok, abstained (the margin is below --min-margin), unknown (the OOD score is above that of "
            "--unknown), or error (no answer)."
        ),
    ]
    image_index: Annotated[
        Position | None,
        Meta(
            description="Position among all inputs of the run, from 0, the same in every shard; unique within a run. "
            "Absent in records of Model.predict."
        ),
    ] = None
    frame: Annotated[Position | None, Meta(description="Frames of videos: number of frames before this one.")] = None
    # absent for an image, null for a frame
    time: (
        Annotated[
            Number | None,
            Meta(description="Frames of videos: seconds after the first frame; null if the video has no time stamps."),
        ]
        | UnsetType
    ) = UNSET
    detection: Annotated[
        Position | None,
        Meta(
            description="With the boxes of a detector: position of the classified one among the image's detections in "
            "that file, from 0."
        ),
    ] = None
    # a factory's None is written, see `omit_defaults`
    image_sha256: Annotated[
        Sha256 | None,
        Meta(
            description="SHA-256 of the image's or video's file. null without a file, or if it was not read or is over "
            "1 GiB."
        ),
    ] = field(default_factory=NoneType)
    model_sha256: Annotated[Sha256 | None, Meta(description="SHA-256 of the model's file; null without a file.")] = (
        field(default_factory=NoneType)
    )


class Answered(_Image[AnswerStatus], frozen=True, kw_only=True):
    """The record of an image with an answer."""

    width: Annotated[Pixels, Meta(description="Width of the whole image in pixels, EXIF orientation applied.")]
    height: Annotated[Pixels, Meta(description="Height of the whole image in pixels, EXIF orientation applied.")]
    prediction: Answer
    margin: Annotated[
        Number | None,
        Meta(
            description="Cosine of the predicted class minus that of the runner-up, or logit for heads that share "
            "prototypes; null if the model has no evidence or only one class."
        ),
    ]
    ood_score: Annotated[
        Number | None,
        Meta(
            description="How far the image's features are from those of the training images: 1 minus the mean cosine "
            "to the five nearest, and more if it is nearer to background images. Only if the model computes it."
        ),
    ] = None
    reason: Annotated[str | None, Meta(description="Why the status is unknown, in words.")] = None
    top: Annotated[
        tuple[Answer, ...], Meta(description="The best classes, best first; the first is the prediction.", min_length=1)
    ]
    labels: Annotated[
        tuple[Label, ...] | None,
        Meta(
            description="Models of several labels per image (a sigmoid per class): the classes with a logit above 0, "
            "a probability over one half; the strongest first. The prediction is the strongest class, listed or not."
        ),
    ] = None
    evidence: Annotated[
        tuple[Slot, ...],
        Meta(
            description="Slots of the predicted class, in order; only if each slot's score comes from one cell. Heads "
            "that share prototypes: the ten whose contributions are furthest from 0, the first of them first.",
            min_length=1,
        ),
    ] = ()
    rest: Annotated[
        Number | None,
        Meta(
            description="Heads that share prototypes: sum of the contributions that are not listed. Contributions, "
            "rest and bias add up to the logit."
        ),
    ] = None
    bias: Annotated[Number | None, Meta(description="Heads that share prototypes: the class's bias.")] = None
    label: _Label = None
    overlay: Annotated[str | None, Meta(description="The overlay's file, relative to the run's folder.")] = None
    sheet: Annotated[str | None, Meta(description="The evidence sheet's file, relative to the run's folder.")] = None
    drawing_error: Annotated[Problem | None, Meta(description="Why a requested overlay or sheet is missing.")] = None
    signature: _Signed = None


class Failed(_Image[Literal["error"]], frozen=True, kw_only=True):
    """The record of an image without an answer."""

    error: Problem
    label: _Label = None
    signature: _Signed = None


Record: TypeAlias = Answered | Failed


def to_record(document: Any) -> Record:
    """Return the record that a document of JSON holds, or the record itself; keys of later versions are left out.

    Raises:
        ValueError: a key is missing, or has a value of another type.
    """
    if isinstance(document, (Answered, Failed)):
        return document
    if not isinstance(document, Mapping):
        raise ValueError(f"{type(document).__name__} found, expected an object")
    try:
        if document.get("status") == "error":
            return msgspec.convert(document, Failed)
        return msgspec.convert(document, Answered)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def describe_status(record: Record) -> str:
    """Return a sentence on a status that a reader should know; empty for `ok` and `error`."""
    if record.status == "unknown":
        return f"Unknown: {record.reason or 'OOD score above the threshold'}"
    return "Abstained: margin below the threshold" if record.status == "abstained" else ""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a record."""
    kinds = (Answered, Failed)
    references, parts = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    names = [set(parts[kind.__name__]["properties"]) for kind in kinds]
    for kind, own, other in zip(kinds, names, reversed(names), strict=True):
        parts[kind.__name__]["not"] = {"anyOf": [{"required": [name]} for name in sorted(other - own)]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:opal-deploy:record:{RECORD_SCHEMA}",
        "title": "opal-deploy record",
        "description": "One image's answer with its evidence, or its error: a line of results.jsonl. Later versions "
        "may add keys under the same schema number.",
        "oneOf": list(references),
        "$defs": {name: _simplify(part) for name, part in parts.items()},
    }


def _simplify(part: Any) -> Any:
    """Return a part of the schema without the limits of 64 bits, and without null for a key that is left out."""
    if isinstance(part, list):
        return [_simplify(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    kept = {
        key: _simplify(value)
        for key, value in part.items()
        if key != "default" and not (key in ("minimum", "maximum") and value in (-LARGEST, LARGEST, _MOST))
    }
    if "default" in part and (choices := kept.pop("anyOf", None)):
        kept |= next(choice for choice in choices if choice != {"type": "null"})
    return kept
