"""The documents inside the metadata of models and inside checkpoints: the parts that our code relies on, declared once.

Files keep each document as it was written, with keys that this version does not know. `check_document` compares a
document with its declaration once, when the file is read. A key that a document may lack has a default.
"""

from __future__ import annotations

import base64
import json
import re
import reprlib
import sys
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from opal_deploy.errors import ArtifactError

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

Distance = Literal["l1", "l2", "l3", "linf", "kl", "tropical"]
# `softmax`: PIP-Net; `distance`: ProtoPNet; see `model.linear_head`; `additive`: somebody's classifier
HeadKind = Literal["opal", "softmax", "distance", "additive"]
# of a distance head, from a squared distance d: log((d + 1) / (d + epsilon))
Similarity = Literal["log"]
LARGEST = sys.float_info.max
# finite, unlike JSON's NaN and 1e400
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
# a number of images, cells or pixels; JSON's integers have no limit
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
AtLeastOne = Annotated[int, Meta(ge=1, le=1 << 31)]

# a document may come from anywhere: an array's size is bounded before it is decompressed
_MAX_ARRAY_BYTES = 256 * 1024 * 1024
_ARRAY_TYPES = ("float32", "int32", "float16")
# levels of a document, far more than ours have
_MOST_LEVELS = 32
# shortens values: a few entries of a few levels
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxtuple, SHORT.maxlist, SHORT.maxdict, SHORT.maxstring = 2, 3, 3, 3, 40


class PackedArray(Struct):
    """An array, see `pack_array`."""

    dtype: str
    shape: tuple[Count, ...]
    zlib: str


class Head(Struct):
    """The configuration of a head: OPAL's, see `model.config.HeadConfig`, or a linear one's, see `LinearHeadConfig`."""

    distance: Distance | None = None
    epsilon: Number | None = None
    dropped: tuple[Count, ...] = ()
    kind: HeadKind = "opal"
    similarity: Similarity | None = None
    threshold: Number = 0.0
    # of an additive head: [C], and what follows its logits
    biases: PackedArray | None = None
    activation: Literal["softmax", "sigmoid", "none"] = "none"

    def __post_init__(self) -> None:
        needed = {"opal": ("distance", "epsilon"), "distance": ("similarity", "epsilon"), "additive": ("biases",)}
        if missing := [name for name in needed.get(self.kind, ()) if getattr(self, name) is None]:
            raise ValueError(f"Object missing required field `{missing[0]}`")


class ClassWeights(Struct):
    """A linear head's weights [C, P] and biases [C], float32."""

    weights: PackedArray
    biases: PackedArray


class Verification(Struct):
    """The comparison that a file passed; `skipped` is why there was none."""

    skipped: str = ""
    gate: dict[str, Number] = {}


class TestVectors(Struct):
    """The images of test vectors; `artifact.test_vectors` reads the arrays."""

    images: tuple[str, ...] = ()


class TimmConfig(Struct):
    """How the makers of a backbone's weights prepared images, after timm."""

    crop_mode: str
    crop_pct: Number
    input_size: tuple[AtLeastOne, ...]
    tag: str
    interpolation: str


class Weights(Struct):
    """The weights that training began with."""

    pretrained_cfg: TimmConfig | None = None


class Start(Struct):
    """The checkpoint that training started from."""

    reset: tuple[str, ...] = ()


class Risk(Struct):
    """The summary of a risk-coverage curve; `levels` has (margin, answered, wrong); see `evaluation.metrics`."""

    images: AtLeastOne
    error: Number
    aurc: Number
    coverage_at_error: dict[Number, Number]
    levels: Annotated[tuple[tuple[Number, AtLeastOne, Count], ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if self.levels[-1][1] != self.images or any(wrong > answered for _, answered, wrong in self.levels):
            raise ValueError("the levels of a risk-coverage curve do not fit its images")


class Training(Struct):
    """The summary of a training run."""

    metrics: dict[str, Any] = {}
    weights: Weights | None = None
    start: Start | None = None


class Parent(Struct):
    """The model that `edit` changed."""

    file: str
    sha256: str


class Effect(Struct):
    """The effect of an `edit` on labelled images: accuracy before and after."""

    images: Count
    split: str
    accuracy: tuple[Number, Number]


class Edit(Struct):
    """One `edit` of a model: the slots that it dropped and restored, and why."""

    dropped: tuple[str, ...]
    restored: tuple[str, ...]
    reason: str
    parent: Parent
    when: str
    measured: Effect | None = None


class Hits(Struct):
    """The share of cells on a part or in the object, and the same share for random cells."""

    mean: Number
    random: Number


class PointingGame(Struct):
    """Where the evidence lies."""

    object: Hits | None = None
    part: Hits | None = None
    distinguishing_part: Hits | None = None


class Removal(Struct):
    """The share of images whose predicted class changes without the evidence's cells, or as many random ones.

    Attributes:
        fill: what replaced the cells.
        changed, changed_random: the shares, 0 ... 1.
    """

    fill: str
    changed: Number
    changed_random: Number | None


class Faithfulness(Struct):
    """How removing the evidence changes answers."""

    images: Count
    removal: Annotated[tuple[Removal, ...], Meta(min_length=1)]


class Evaluation(Struct):
    """The figures of `evaluate --record`, see `artifact.measurements`."""

    when: str
    opal_deploy: str
    model: str
    data: str
    split: str
    images: Count
    accuracy: Number
    boxes: bool | None = None
    pointing_game: PointingGame | None = None
    faithfulness: Faithfulness | None = None


class Metrics(Struct):
    """The results of a training run, curves included."""

    val_risk: Risk | None = None


class CheckpointDocuments(Struct):
    """The documents of a checkpoint; empty ones count as missing."""

    version: str = ""
    crop: str | None = None
    metrics: Metrics | None = None
    training: Training | None = None
    edits: tuple[Edit, ...] = ()
    evaluation: Evaluation | None = None


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array of one of three types as a `PackedArray`: little-endian bytes, compressed, in base64."""
    little_endian = array.astype(array.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(little_endian.tobytes(), 9)).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "zlib": data}


def unpack_array(document: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array of `pack_array`; KeyError, TypeError, ValueError or zlib.error for any other document."""
    # most readers of documents do without numpy, which is slow to import
    import numpy as np

    dtype = np.dtype(document["dtype"])
    if dtype.name not in _ARRAY_TYPES:
        raise ValueError(f"dtype {dtype.name}")
    data = zlib.decompressobj().decompress(base64.b64decode(document["zlib"]), _MAX_ARRAY_BYTES)
    return np.frombuffer(data, dtype.newbyteorder("<")).reshape(document["shape"]).astype(dtype)


def check_checkpoint(raw: Mapping[str, Any]) -> None:
    """Raise ArtifactError for a checkpoint in our format with a document that is not as declared."""
    check_document(
        {name: raw[name] for name in CheckpointDocuments.__struct_fields__ if raw.get(name)}, CheckpointDocuments
    )


def check_document(raw: Any, kind: type[T], name: str = "") -> T:
    """Return a document as its declared type.

    Args:
        raw: plain values, from JSON or a checkpoint.
        kind: the type.
        name: of the document, with which the message begins.

    Raises:
        ArtifactError: a key is missing or has another value than declared; the message names the key.
    """
    try:
        return msgspec.convert(raw, kind, str_keys=True)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace("`key` in ", "").partition(" - at `$")
        value = raw
        # the key of an entry of a dictionary is not told
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", where.partition("[...]")[0]):
            value = value[int(index)] if index else value[key]
        path = f"{name}{where}".strip(".`") or "document"
    except UnicodeEncodeError as error:
        # half a surrogate pair where something else than text is expected
        path, value, message = name or "document", error.object, "Expected no text"
    raise ArtifactError(f"{path} {SHORT.repr(value)}: {message}")


def check_values(raw: Any, name: str) -> None:
    """Check a document for values that JSON in UTF-8 cannot hold, so that it can be written again.

    Names of files that are not UTF-8 stay, see `records.names`.

    Raises:
        ArtifactError: a number is not finite, a text has half a surrogate pair, or the document is nested too deeply.
    """
    try:
        json.dumps(raw, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogateescape")
        nesting = _count_levels(raw)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name}: {error}") from None
    if nesting > _MOST_LEVELS:
        raise ArtifactError(f"{name}: nested {nesting} levels deep, more than {_MOST_LEVELS}")


def _count_levels(raw: Any) -> int:
    values = raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ()
    return 1 + max((_count_levels(value) for value in values if isinstance(value, dict | list)), default=0)
