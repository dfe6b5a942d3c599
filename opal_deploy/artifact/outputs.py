"""The outputs of a model for a batch, which every session returns and every gate compares (docs/contract.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata
from opal_deploy.artifact.opal_head import embedding_norms
from opal_deploy.errors import ArtifactError

FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

# name of the input, which all graphs share
INPUT = "images"
# shape per image, and dtype
TensorSpec = tuple[tuple[int, ...], np.dtype[Any]]

# above this many classes sorting all logits is faster than finding one maximum after another
_MAX_SCANS = 32


class TopOutputs(NamedTuple):
    """The k best classes of N images and the evidence of each: TOP_OUTPUTS of a graph of `export --outputs topk`.

    Attributes:
        classes: int32 [N, k], the best first; of equal logits the lowest class.
        logits: float32 [N, k], of these classes.
        scores: float32 [N, k, m], of the slots of these classes.
        cells: int32 [N, k, m], flat row-major cell of each of these slots' maxima.
        norm: float32 [N], |s| over all K channels.
    """

    classes: IntArray
    logits: FloatArray
    scores: FloatArray
    cells: IntArray
    norm: FloatArray


@dataclass(frozen=True)
class OutputSpec:
    """One output of a graph: its shape, its type, and how it is compared.

    Attributes:
        shape: from the metadata to the shape per image.
        dtype: float32 or int32.
        tolerance: largest absolute difference by precision; None for outputs that `runtime.verification` has rules for.
        in_test_vectors: whether the test vectors hold it.
    """

    shape: Callable[[Metadata], tuple[int, ...]]
    dtype: type[np.generic] = np.float32
    tolerance: Mapping[str, float] | None = None
    in_test_vectors: bool = True


@dataclass(frozen=True)
class Outputs:
    """The outputs of one batch of N images. Each field declares an output; everything else follows from its spec.

    Attributes:
        logits: float32 [N, C], minus the distance to each class's anchor (paper, Eq. 4); [N, 0] where the graph has
            `top` instead.
        argmax: int32 [N, K], flat row-major cell of each channel's maximum; None for `evidence: none` and with `top`.
        scores: float32 [N, K], each channel's pooled attention (paper, Eq. 3); None like `argmax`.
        attention: float32 [N, K, H, W], only where the graph was exported with it.
        top: the best classes, where the graph selects them itself.
        ood_score: float32 [N], at least 0: how far an image's features are from those of the training images; None
            where the graph does not compute it.
        share_classes: int32 [N, k], the k best classes, see `Metadata.num_shared`; only with evidence `regions`.
        shares: float32 [N, k, H, W], the share of each cell in the logits of these classes; likewise.
    """

    logits: FloatArray = field(metadata={"spec": OutputSpec(lambda m: (m.num_classes,))})
    argmax: IntArray | None = field(
        default=None, metadata={"spec": OutputSpec(lambda m: (m.num_prototypes,), np.int32)}
    )
    scores: FloatArray | None = field(default=None, metadata={"spec": OutputSpec(lambda m: (m.num_prototypes,))})
    attention: FloatArray | None = field(
        default=None, metadata={"spec": OutputSpec(lambda m: (m.num_prototypes, *m.grid), in_test_vectors=False)}
    )
    top: TopOutputs | None = None
    ood_score: FloatArray | None = field(
        default=None,
        metadata={"spec": OutputSpec(lambda m: (), tolerance={"fp32": 1e-3, "fp16": 5e-2, "bf16": 1e-1, "int8": 3e-1})},
    )

    share_classes: IntArray | None = field(
        default=None, metadata={"spec": OutputSpec(lambda m: (m.num_shared,), np.int32, in_test_vectors=False)}
    )
    shares: FloatArray | None = field(
        default=None, metadata={"spec": OutputSpec(lambda m: (m.num_shared, *m.grid), in_test_vectors=False)}
    )

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Outputs:
        """Return the outputs of a graph from its arrays by name (docs/contract.md)."""
        values: dict[str, Any] = {name: arrays[name] for name in OUTPUT_SPECS if name in arrays}
        if TOP_OUTPUTS[0] in arrays:
            values["top"] = top = TopOutputs(*(arrays[name] for name in TOP_OUTPUTS))
            values.setdefault("logits", np.empty((len(top.logits), 0), np.float32))
        return Outputs(**values)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by the names of the graph's outputs, in the graph's order: what `from_arrays` reads."""
        if self.top is None:
            return self._arrays()
        return {**dict(zip(TOP_OUTPUTS, self.top, strict=True)), **self.per_image()}

    def per_image(self) -> dict[str, FloatArray]:
        """Return the graph's outputs with one number per image, float32 [N], by name."""
        return {name: array for name in PER_IMAGE if (array := getattr(self, name)) is not None}

    def __len__(self) -> int:
        return len(self.logits)

    def rows(self, start: int, stop: int) -> Outputs:
        """Return the outputs of images start ... stop-1, as views."""
        return self._map(lambda array: array[start:stop])

    def take(self, rows: Sequence[int]) -> Outputs:
        """Return the outputs of some images, in that order; views where these are the first ones."""
        picked = list(rows)
        if picked == list(range(len(picked))):
            return self.rows(0, len(picked))
        return self._map(lambda array: array[picked])

    def is_finite(self) -> NDArray[np.bool_]:
        """Return bool [N]: whether an image's logits (or those listed, and the norm) and single numbers are finite."""
        finite: NDArray[np.bool_] = np.isfinite(self.logits if self.top is None else self.top.logits).min(axis=1)
        for value in (*(() if self.top is None else (self.top.norm,)), *self.per_image().values()):
            finite = finite & np.isfinite(value)
        return finite

    @staticmethod
    def concatenate(parts: Sequence[Outputs]) -> Outputs:
        """Return the outputs of consecutive batches of one model as one."""
        joined = [np.concatenate(arrays) for arrays in zip(*(part._arrays().values() for part in parts), strict=True)]
        return parts[0]._with(joined)

    def _map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Outputs:
        return self._with([function(array) for array in self._arrays().values()])

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays, with `top`'s arrays last."""
        arrays = {name: array for name in OUTPUT_SPECS if (array := getattr(self, name)) is not None}
        return arrays if self.top is None else {**arrays, **dict(zip(TOP_OUTPUTS, self.top, strict=True))}

    def _with(self, arrays: list[NDArray[Any]]) -> Outputs:
        """Return outputs of the same names with other arrays."""
        return Outputs.from_arrays(dict(zip(self._arrays(), arrays, strict=True)))


# the outputs that are fields of `Outputs`, and those of `export --outputs topk`
OUTPUT_SPECS: dict[str, OutputSpec] = {
    field.name: field.metadata["spec"] for field in fields(Outputs) if "spec" in field.metadata
}
PER_IMAGE = tuple(name for name, spec in OUTPUT_SPECS.items() if spec.tolerance is not None)
TOP_SPECS: dict[str, OutputSpec] = {
    "top_classes": OutputSpec(lambda m: (m.max_top,), np.int32),
    "top_logits": OutputSpec(lambda m: (m.max_top,)),
    "top_scores": OutputSpec(lambda m: (m.max_top, m.class_map.max_slots)),
    "top_cells": OutputSpec(lambda m: (m.max_top, m.class_map.max_slots), np.int32),
    "score_norm": OutputSpec(lambda m: ()),
}


def tolerances(precision: str) -> dict[str, float]:
    """Return the largest difference that a precision may cause in each output with one number per image."""
    return {name: tolerance[precision] for name in PER_IMAGE if (tolerance := OUTPUT_SPECS[name].tolerance)}


def tensor_specs(metadata: Metadata) -> dict[str, TensorSpec]:
    """Return shape per image and dtype of every input and output that the metadata promises; raise ArtifactError."""
    height, width = metadata.input_size
    specs: dict[str, TensorSpec] = {INPUT: ((height, width, 3), np.dtype(np.uint8))}
    if metadata.input_kind == "float32":
        specs[INPUT] = (3, height, width), np.dtype(np.float32)
    known = {**OUTPUT_SPECS, **TOP_SPECS}
    for name in metadata.outputs:
        if name not in known:
            raise ArtifactError(f"its metadata promises an unknown output, {name!r}")
        specs[name] = known[name].shape(metadata), np.dtype(known[name].dtype)
    return specs


def check_tensors(metadata: Metadata, actual: Mapping[str, tuple[tuple[Any, ...], np.dtype[Any]]]) -> None:
    """Check that a model has the tensors that its metadata promises.

    Args:
        metadata: of the model.
        actual: shape per image and dtype of the model's inputs and outputs; a dimension that is no integer fits any.

    Raises:
        ArtifactError: they differ.
    """
    expected = tensor_specs(metadata)
    fits = actual.keys() == expected.keys() and all(
        dtype == actual[name][1]
        and len(shape) == len(actual[name][0])
        and all(size == own or not isinstance(own, int) for size, own in zip(shape, actual[name][0], strict=True))
        for name, (shape, dtype) in expected.items()
    )
    if not fits:
        raise ArtifactError(f"its tensors are {_format_specs(actual)}; its metadata promises {_format_specs(expected)}")


def _format_specs(specs: Mapping[str, tuple[tuple[Any, ...], np.dtype[Any]]]) -> str:
    return ", ".join(f"{name} {dtype} {['N', *shape]}" for name, (shape, dtype) in sorted(specs.items()))


def select_top(outputs: Outputs, class_map: ClassMap, k: int) -> TopOutputs:
    """Return the outputs of `export --outputs topk` computed from all channels: the `k` best classes, C at most."""
    assert outputs.scores is not None
    assert outputs.argmax is not None
    classes = find_largest(outputs.logits, k)
    return TopOutputs(
        classes.astype(np.int32),
        np.take_along_axis(outputs.logits, classes, axis=1),
        class_map.take(outputs.scores, classes),
        class_map.take(outputs.argmax, classes),
        embedding_norms(outputs.scores, 0.0).astype(np.float32),
    )


def find_largest(values: FloatArray, k: int) -> NDArray[np.int64]:
    """Return int64 [N, k], the positions of the `k` largest values of each row [C], at most C; of equals the first."""
    k = min(k, values.shape[1])
    if k > _MAX_SCANS:
        return np.argsort(-values, axis=1, kind="stable")[:, :k]
    remaining = values.copy()
    positions = np.empty((len(values), k), np.int64)
    for place in range(k):
        best = remaining.argmax(axis=1)
        positions[:, place] = best
        np.put_along_axis(remaining, best[:, None], -np.inf, axis=1)
    return positions


def compute_probabilities(logits: FloatArray, classes: NDArray[np.integer[Any]], temperature: float) -> DoubleArray:
    """Return softmax(logits / temperature) of some classes, in float64: logits [N, C] and int [N, k] to [N, k]."""
    scaled = (logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / temperature
    np.exp(scaled, out=scaled)
    probabilities: DoubleArray = np.take_along_axis(scaled, classes, axis=1) / scaled.sum(axis=1, keepdims=True)
    return probabilities
