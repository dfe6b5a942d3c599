"""The JSON document that makes a model file self-describing (docs/contract.md).

An ONNX file has the document in its `metadata_props` under the key `opal`, an engine in its sidecar. Everything that
`infer`, `verify` and `inspect` know about a model, they know from this document.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from msgspec import Meta, Struct

from opal_deploy.artifact import documents
from opal_deploy.artifact.documents import (
    SHORT,
    AtLeastOne,
    Distance,
    HeadKind,
    Number,
    check_document,
    check_values,
    unpack_array,
)
from opal_deploy.artifact.files import CHECKPOINT_SUFFIXES, without_folders
from opal_deploy.artifact.measurements import Calibration, EffectiveField, ReceptiveField
from opal_deploy.artifact.patches import Patches
from opal_deploy.artifact.preprocessing import InputForm, ResizeRule
from opal_deploy.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.baseline import Baseline
    from opal_deploy.artifact.cells import CellGrid
    from opal_deploy.artifact.class_map import ClassMap

T = TypeVar("T")

# 1: OPAL's head; 2: a linear head, with `class_weights`, which versions up to 0.1 would take for OPAL's
SCHEMA: Literal[1] = 1
LINEAR_SCHEMA: Literal[2] = 2
METADATA_KEY = "opal"
# labels of an image whose shares a graph outputs
MOST_LABELS = 40
# stands in `file_sha256` while the digest is computed
BLANK_DIGEST = "0" * 64

Evidence = Literal["exact", "regions", "map", "none"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]
InputKind = Literal["uint8", "float32", "image"]
# uint8 for processors, int8 for TensorRT
Activations = Literal["uint8", "int8"]

# outputs of a graph that lists only its best classes; see `artifact.outputs.TopOutputs`
TOP_OUTPUTS = ("top_classes", "top_logits", "top_scores", "top_cells", "score_norm")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


DISTANCES: tuple[str, ...] = get_args(Distance)
# these bound what is allocated before the graph is opened and compared
Prototypes = Annotated[int, Meta(ge=1, le=10_000)]
_MOST_PROTOTYPES = 1_000_000
Side = Annotated[int, Meta(ge=1, le=1 << 16)]
_Names = Annotated[tuple[str, ...], Meta(min_length=1)]
Channels = Annotated[tuple[Number, ...], Meta(min_length=3, max_length=3)]
# keys of every file of schema 1; a key that was added since is optional, and its default means "not known"
_REQUIRED = frozenset({
    "schema", "class_names", "prototypes_per_class", "head", "evidence", "backbone", "grid", "input_size", "input_kind",
    "mean", "std", "resize", "crop", "precision", "source", "training", "exporter", "verification", "test_vectors",
    "outputs", "file_sha256",
})  # fmt: skip


class _Documents(Struct):
    """The declared parts of the metadata's documents; one that is empty counts as missing."""

    head: documents.Head
    class_weights: documents.ClassWeights | None = None
    training: documents.Training | None = None
    verification: documents.Verification | None = None
    risk: documents.Risk | None = None
    calibration: Calibration | None = None
    edits: tuple[documents.Edit, ...] = ()
    evaluation: documents.Evaluation | None = None
    receptive_field: ReceptiveField | None = None
    test_vectors: documents.TestVectors | None = None
    patches: Patches | None = None


@dataclass(frozen=True, repr=False)
class Metadata:
    """The metadata of a model: what it is, where it comes from, and how it was verified.

    Attributes:
        class_names: C names, in the order of the logits.
        prototypes_per_class: m; for a linear head, whose classes share prototypes, their number.
        head: configuration of the head: projection, cws, pooling, anchors, distance, epsilon, dropped; for a linear
            head its kind and that kind's settings (`documents.Head`).
        evidence: `exact` (a slot's score comes from one cell), `regions` (every cell has a share of the logit), `map`
            (attention maps, no single cell) or `none`.
        backbone: torchvision's name of the backbone.
        keep_layers: whether the backbone reaches its stride with all of its layers, some of them with stride 1, instead
            of being cut.
        grid: (H, W) of the feature map.
        input_size: (H0, W0) in pixels.
        input_kind: `uint8`: `images` is uint8 [N, H0, W0, 3], RGB, and normalisation is in the graph;
            `float32`: [N, 3, H0, W0], already normalised; `image`: as `uint8`, but of any size, resized in the graph.
        mean, std: of pixels scaled to [0, 1], per channel R, G, B.
        resize: how an image becomes H0 x W0, see `ResizeRule`.
        crop: `boxes` where training images were cropped to annotated boxes first, else None.
        precision: precision of the graph's body; softmax, max and everything after them are always float32. `bf16`
            keeps the projection in float32 too, `int8` all but the backbone's convolutions and matrix products.
        source: checkpoint file name, sha256, format and the settings that its format does not record (`assumed`).
        training: summary of the run that made the checkpoint.
        exporter: versions of the exporting packages, and the opset.
        verification: the comparison that the file passed, or `{"skipped": WHY}`.
        risk: summary of the risk-coverage curve of the validation images (`evaluation.metrics`), from which a
            `min_margin` for an error rate can be chosen; empty where unknown.
        calibration: the `Calibration` that turns logits into probabilities; empty where none was fitted.
        edits: the model's edits, the first one first; see `measurements.describe_edits`.
        evaluation: what `evaluate --record` measured of the evidence (`artifact.measurements`); empty if it never did.
        receptive_field: the `ReceptiveField` of a cell; empty where unknown.
        baseline: the `Baseline` of the answers to validation images; empty where none was measured.
        patches: the `Patches` of training images that show what each slot found; empty where there are none.
        test_vectors: images with the float32 outputs of the reference; see `artifact.test_vectors`.
        outputs: names of the graph's outputs, in order.
        top_k: number of classes that the graph lists in `TOP_OUTPUTS`; None where it outputs all.
        file_sha256: digest of the file with this field blanked; see `artifact.onnx_file`.
        class_weights: of a linear head: weights [C, P] and biases [C], float32 (`documents.PackedArray`); else empty.
        unknown: keys of the document that this version does not know, kept where the document is written again.
    """

    class_names: _Names
    prototypes_per_class: Prototypes
    head: dict[str, Any]
    evidence: Evidence
    backbone: str
    grid: tuple[Side, Side]
    input_size: tuple[Side, Side]
    input_kind: InputKind = "uint8"
    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD
    resize: str = "squash-bilinear"
    crop: str | None = None
    precision: Precision = "fp32"
    source: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    exporter: dict[str, Any] = field(default_factory=dict)
    verification: dict[str, Any] = field(default_factory=dict)
    risk: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    edits: tuple[dict[str, Any], ...] = ()
    evaluation: dict[str, Any] = field(default_factory=dict)
    receptive_field: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    test_vectors: dict[str, Any] = field(default_factory=dict)
    outputs: _Names = ("logits", "argmax", "scores")
    keep_layers: bool = False
    top_k: AtLeastOne | None = None
    file_sha256: str = BLANK_DIGEST
    schema: Literal[1, 2] = SCHEMA
    class_weights: dict[str, Any] = field(default_factory=dict)
    patches: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, Any] = field(default_factory=dict)

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return len(self.class_names)

    @property
    def num_prototypes(self) -> int:
        """The number of prototypes, K = C * m, or P of a linear head."""
        if self.head_kind in ("opal", "additive"):
            return self.num_classes * self.prototypes_per_class
        return int(self.class_weights["weights"]["shape"][1])

    @property
    def head_kind(self) -> HeadKind:
        """The kind of the head."""
        kind: HeadKind = self.head.get("kind", "opal")
        return kind

    @property
    def is_opal(self) -> bool:
        """Whether the head is OPAL's; else its logits are W s + b (`artifact.heads`)."""
        return self.head_kind == "opal"

    @property
    def is_multi_label(self) -> bool:
        """Whether an image may have several labels: a sigmoid of its own follows each logit."""
        return bool(self.head.get("activation") == "sigmoid")

    @property
    def num_shared(self) -> int:
        """The number of classes whose shares the graph of an additive head outputs, the best first."""
        return min(MOST_LABELS if self.is_multi_label else 2, self.num_classes)

    @property
    def shares_prototypes(self) -> bool:
        """Whether classes share prototypes, which then have numbers instead of slots of classes."""
        return self.head_kind in ("softmax", "distance")

    @property
    def dropped(self) -> tuple[int, ...]:
        """The channels of the slots that `edit` dropped, ascending."""
        return tuple(self.head.get("dropped", ()))

    def with_dropped(self, dropped: Iterable[int]) -> Metadata:
        """Return the metadata with these slots dropped, without measurements that hold only before the edit.

        The temperature stays, marked as fitted before the edit.
        """
        calibration = Calibration.from_dict(self.calibration)
        if calibration is not None:
            calibration = replace(calibration, split=f"{calibration.split.partition(' ')[0]} (before the edit)")
        return replace(
            self,
            head={**self.head, "dropped": sorted({*dropped})},
            evaluation={},
            baseline={},
            risk={},
            calibration={} if calibration is None else calibration.to_dict(),
        )

    @cached_property
    def class_map(self) -> ClassMap:
        """The map from classes to prototypes; ArtifactError if a linear head's weights are damaged."""
        # needs numpy, which the command line does without
        from opal_deploy.artifact.class_map import ClassMap

        if self.head_kind == "additive":
            # without slots, regions of an image stand in for them: only their number and the biases are the model's
            blocks = ClassMap.blocks(self.num_classes, self.prototypes_per_class, self.dropped)
            return replace(blocks, biases=unpack_array(self.head["biases"]).astype(float), unit_length=False)
        if not self.is_opal:
            try:
                weights, biases = (unpack_array(self.class_weights[name]) for name in ("weights", "biases"))
            except (ValueError, zlib.error) as error:
                raise ArtifactError(f"its class weights are damaged ({error}); export it again") from None
            return ClassMap.from_matrix(weights, biases.astype(float)).with_dropped(self.dropped)
        return ClassMap.blocks(self.num_classes, self.prototypes_per_class, self.dropped)

    def describe_exporter(self) -> str:
        """Return the names and versions of the packages that exported the file, in one line; empty if unknown."""
        return ", ".join(f"{name} {value}" for name, value in self.exporter.items() if name != "quantised")

    def describe_head(self, dropped: str = "") -> str:
        """Return the head in a few words; `dropped` says how many slots it lacks."""
        if self.is_opal:
            return f"m = {self.prototypes_per_class}{dropped}, distance {self.distance}"
        if self.head_kind == "additive":
            if self.evidence == "exact":
                return (
                    f"its own head, the cells' shares of a logit divided among m = {self.prototypes_per_class}{dropped}"
                )
            labels = ", several labels per image" if self.is_multi_label else ""
            return f"its own head{labels}, each cell with its share of the logit"
        scores = "channels of a softmax" if self.head_kind == "softmax" else f"distances, {self.head['similarity']}"
        return f"{self.num_prototypes} shared prototypes{dropped} ({scores})"

    @property
    def max_top(self) -> int:
        """The largest number of classes that a record can list: C, or fewer where the graph lists only the best."""
        return self.num_classes if self.top_k is None else self.top_k

    @property
    def int8_activations(self) -> Activations | None:
        """The type of an int8 graph's activations; None in other precisions."""
        return self.exporter["activations"] if self.precision == "int8" else None

    @property
    def is_for_openvino(self) -> bool:
        """Whether, on a CPU, OpenVINO is the runtime that has fast kernels for the file, or any."""
        return self.precision == "bf16" or self.int8_activations == "uint8"

    def has_output(self, name: str) -> bool:
        """Return whether the graph has an output."""
        return name in self.outputs

    @property
    def checkpoint_name(self) -> str:
        """The name of the checkpoint's file that the model was exported from; `ckpt.pt` where that is not known."""
        return str(self.source.get("file") or "ckpt.pt")

    def find_checkpoint(self, path: Path) -> str | None:
        """Return the checkpoint that the file `path` was exported from, with its folder if it lies there.

        None for a checkpoint, and for a linear head, whose checkpoint cannot store figures. Figures belong in the
        checkpoint: recorded in an exported file, they change the digest by which records name the file.
        """
        if path.suffix in CHECKPOINT_SUFFIXES or not self.is_opal:
            return None
        beside = path.with_name(self.checkpoint_name)
        return str(beside) if beside.is_file() else self.checkpoint_name

    @property
    def form(self) -> InputForm:
        """The form of the input: its size and the resize rule."""
        return InputForm(*self.input_size, ResizeRule.parse(self.resize))

    @property
    def cells(self) -> CellGrid:
        """The feature map's cells, and where their boxes lie."""
        from opal_deploy.artifact.cells import CellGrid

        return CellGrid(*self.grid, self.receptive_field.get("box_offset", 0.0))

    @property
    def stride(self) -> int:
        """Input pixels per cell, H0 / H, the same in both directions."""
        return self.input_size[0] // self.grid[0]

    @property
    def distance(self) -> str:
        """OPAL's distance: l1, l2, l3, linf, kl or tropical; empty for linear heads."""
        return str(self.head.get("distance") or "")

    @property
    def epsilon(self) -> float:
        """The constant added to the scores' norm, z = s / (|s| + epsilon); for other heads see `LinearHeadConfig`."""
        return float(self.head.get("epsilon", 0.0))

    @property
    def temperature(self) -> float | None:
        """The temperature of calibrated probabilities, softmax(logits / temperature); None where it was not fitted."""
        calibration = Calibration.from_dict(self.calibration)
        return None if calibration is None else calibration.temperature

    @property
    def effective_field(self) -> EffectiveField | None:
        """The effective receptive field of a cell; None where it was not measured."""
        field = ReceptiveField.from_dict(self.receptive_field)
        return None if field is None else field.in_cells(self.grid)

    @property
    def reach(self) -> float:
        """How far patches reach around a slot's box, in cells: to what the slot saw, at least 1 and at most 2.5."""
        field = self.effective_field
        return 1.0 if field is None else min(max((field.side - 1) / 2, 1.0), 2.5)

    @cached_property
    def known_patches(self) -> Patches | None:
        """The patches of training images; None where there are none."""
        return Patches.from_dict(self.patches)

    @cached_property
    def known_baseline(self) -> Baseline | None:
        """The answers to validation images, None if not measured; ArtifactError for a damaged or another model's."""
        # needs numpy, which the command line does without
        from opal_deploy.artifact.baseline import Baseline

        baseline = Baseline.from_dict(self.baseline)
        if baseline and (baseline.stride, len(baseline.classes)) != (self.stride, self.num_classes):
            raise ArtifactError("its baseline is another model's; measure it with `opal-deploy evaluate --record`")
        return baseline

    @property
    def unverified(self) -> str:
        """The reason why the file was not compared with its reference; empty if it was."""
        return str(self.verification.get("skipped", ""))

    def __repr__(self) -> str:
        """Return all fields, each shortened: the test vectors alone are hundreds of kilobytes."""
        return f"Metadata({', '.join(f'{f.name}={SHORT.repr(getattr(self, f.name))}' for f in fields(self))})"

    def to_dict(self) -> dict[str, Any]:
        """Return the document, without the folders of absolute paths, which earlier versions kept."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("training", "verification"):
            document[name] = without_folders(document[name])
        unknown = document.pop("unknown")
        # last: the first `file_sha256` of a file is the one that its digest replaces
        return {**document, **unknown}

    def to_json(self) -> str:
        """Return the document as one line of ASCII JSON, which `from_json` reads back."""
        return json.dumps(self.to_dict(), ensure_ascii=True)

    @staticmethod
    def from_json(text: str, origin: str = "model metadata") -> Metadata:
        """Return the metadata of a document, which may lack keys that were added after schema 1 began.

        Raises:
            ArtifactError: the text is not JSON, has another schema, or a field is missing or of the wrong type; its
                message begins with `origin`.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{origin}: its opal metadata is not valid JSON ({error}); export it again") from None
        if not isinstance(raw, dict):
            raise ArtifactError(f"{origin}: its opal metadata is not a JSON object; export it again")
        if raw.get("schema") not in (SCHEMA, LINEAR_SCHEMA):
            raise ArtifactError(f"{origin}: metadata schema {raw.get('schema')!r}, expected 1 or 2; export it again")
        if missing := sorted(_REQUIRED - raw.keys()):
            raise ArtifactError(f"{origin}: metadata lacks {', '.join(missing)}; export it again")
        known = {f.name for f in fields(Metadata)} - {"unknown"}
        values = {name: value for name, value in raw.items() if name in known}
        values["unknown"] = {name: value for name, value in raw.items() if name not in known}
        try:
            metadata = check_document(values, Metadata)
            check_document({name: value for name, value in values.items() if value != {}}, _Documents)
            metadata._check()
            for name, value in raw.items():
                check_values(value, name)
        except ArtifactError as error:
            raise ArtifactError(f"{origin}: {error}; export it again") from None
        return metadata

    def _check(self) -> None:
        """Raise ArtifactError for fields that do not fit each other."""
        if self.is_opal and self.schema != SCHEMA:
            raise ArtifactError(f"metadata schema {self.schema!r} found with OPAL's head, {SCHEMA} expected")
        if self.head_kind == "additive":
            if self.schema != LINEAR_SCHEMA or self.head["biases"]["shape"] != [self.num_classes]:
                raise ArtifactError("a head of kind additive needs schema 2 and a bias per class")
        elif not self.is_opal:
            shapes = [self.class_weights.get(name, {}).get("shape", ()) for name in ("weights", "biases")]
            if (
                self.schema != LINEAR_SCHEMA
                or [len(shape) for shape in shapes] != [2, 1]
                or not 0 < shapes[0][1] <= _MOST_PROTOTYPES
            ):
                raise ArtifactError(f"a head of kind {self.head_kind} needs schema {LINEAR_SCHEMA} and class_weights")
            if (shapes[0][0], shapes[1][0]) != (self.num_classes, self.num_classes):
                raise ArtifactError(f"class_weights are of {shapes[0][0]} classes, the model of {self.num_classes}")
        try:
            ResizeRule.parse(self.resize)
        except ValueError as error:
            raise ArtifactError(str(error)) from None
        listed = [name for name in TOP_OUTPUTS if name in self.outputs]
        if len(listed) != (0 if self.top_k is None else len(TOP_OUTPUTS)) or not (listed or "logits" in self.outputs):
            raise ArtifactError(f"outputs {', '.join(self.outputs)} are not those of a model with top_k {self.top_k!r}")
        if self.top_k is not None and self.top_k > self.num_classes:
            raise ArtifactError(f"top_k {self.top_k} is not a number of its {self.num_classes} classes")
        if any(cells > pixels for cells, pixels in zip(self.grid, self.input_size, strict=True)):
            raise ArtifactError(f"grid {self.grid} has more cells than input_size {self.input_size} has pixels")
        if any(channel >= self.num_prototypes for channel in self.dropped):
            raise ArtifactError(f"dropped {SHORT.repr(self.dropped)} is not of its {self.num_prototypes} channels")
        if self.dropped and self.class_map.silenced.any():
            raise ArtifactError("a class has no slot left")


def check_all_outputs(metadata: Metadata, model: str, use: str) -> None:
    """Raise UsageError for a model exported with `--outputs topk`; `use` says what needs all classes and channels."""
    if metadata.top_k is not None:
        source = metadata.checkpoint_name
        precision = "" if metadata.precision == "fp32" else f" --precision {metadata.precision}"
        raise UsageError(
            f"{model}: outputs only the best {metadata.top_k} classes, and {use} needs all; export one with all "
            f"outputs: opal-deploy export {source}{precision}"
        )


def check_fixed_size(metadata: Metadata, model: str, use: str) -> None:
    """Raise UsageError for a model that takes images of any size, which `use` cannot run."""
    if metadata.input_kind == "image":
        raise UsageError(f"{model}: takes images of any size, {use} of one; export it without --input image")
