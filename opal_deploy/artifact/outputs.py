"""The outputs of a model for a batch, which every session returns and every gate compares (docs/contract.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata
from opal_deploy.artifact.slots import Slots
from opal_deploy.errors import ArtifactError

FloatArray = NDArray[np.float32]
DoubleArray = NDArray[np.float64]
IntArray = NDArray[np.int32]

# name of the input, which all graphs share
INPUT = "images"
# shape per image, and dtype
TensorSpec = tuple[tuple[int, ...], np.dtype[Any]]

_NORM_ROWS = 8
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
class Outputs:
    """The outputs of one batch of N images.

    Attributes:
        logits: float32 [N, C], minus the distance to each class's anchor (paper, Eq. 4); [N, 0] where the graph has
            `top` instead.
        argmax: int32 [N, K], flat row-major cell of each channel's maximum; None for `evidence: none` and with `top`.
        scores: float32 [N, K], each channel's pooled attention (paper, Eq. 3); None like `argmax`.
        attention: float32 [N, K, H, W], only where the graph was exported with it.
        top: the best classes, where the graph selects them itself.
        strangeness: float32 [N], at least 0: how far an image's features are from those of the training images; None
            where the graph does not compute it.
    """

    logits: FloatArray
    argmax: IntArray | None = None
    scores: FloatArray | None = None
    attention: FloatArray | None = None
    top: TopOutputs | None = None
    strangeness: FloatArray | None = None

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Outputs:
        """Return the outputs of a graph from its arrays by name (docs/contract.md)."""
        top = TopOutputs(*(arrays[name] for name in TOP_OUTPUTS)) if TOP_OUTPUTS[0] in arrays else None
        logits = arrays["logits"] if top is None or "logits" in arrays else np.empty((len(top.logits), 0), np.float32)
        return Outputs(
            logits, arrays.get("argmax"), arrays.get("scores"), arrays.get("attention"), top, arrays.get("strangeness")
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by the names of the graph's outputs, in the graph's order: what `from_arrays` reads."""
        names = ("logits", "argmax", "scores", "attention") if self.top is None else ()
        arrays = {name: getattr(self, name) for name in (*names, "strangeness")}
        if self.top is not None:
            arrays = {**dict(zip(TOP_OUTPUTS, self.top, strict=True)), **arrays}
        return {name: array for name, array in arrays.items() if array is not None}

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
        """Return bool [N]: whether an image's logits (or those listed, and the norm) and strangeness are finite."""
        finite: NDArray[np.bool_] = np.isfinite(self.logits if self.top is None else self.top.logits).min(axis=1)
        for value in (None if self.top is None else self.top.norm, self.strangeness):
            if value is not None:
                finite = finite & np.isfinite(value)
        return finite

    @staticmethod
    def concatenate(parts: Sequence[Outputs]) -> Outputs:
        """Return the outputs of consecutive batches of one model as one."""

        def join(name: str) -> Any:
            arrays = [getattr(part, name) for part in parts]
            return None if arrays[0] is None else np.concatenate(arrays)

        tops = [part.top for part in parts if part.top is not None]
        top = TopOutputs(*(np.concatenate(arrays) for arrays in zip(*tops, strict=True))) if tops else None
        return Outputs(join("logits"), join("argmax"), join("scores"), join("attention"), top, join("strangeness"))

    def _map(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Outputs:
        def apply(array: NDArray[Any] | None) -> Any:
            return None if array is None else function(array)

        top = None if self.top is None else TopOutputs(*(function(array) for array in self.top))
        return Outputs(
            function(self.logits), apply(self.argmax), apply(self.scores), apply(self.attention), top,
            apply(self.strangeness),
        )  # fmt: skip


def tensor_specs(metadata: Metadata) -> dict[str, TensorSpec]:
    """Return shape per image and dtype of every input and output that the metadata promises; raise ArtifactError."""
    height, width = metadata.input_size
    channels, k, m = metadata.num_prototypes, metadata.max_top, metadata.prototypes_per_class
    shapes: dict[str, tuple[int, ...]] = {
        "logits": (metadata.num_classes,),
        "argmax": (channels,),
        "scores": (channels,),
        "attention": (channels, *metadata.grid),
        "top_classes": (k,),
        "top_logits": (k,),
        "top_scores": (k, m),
        "top_cells": (k, m),
        "score_norm": (),
        "strangeness": (),
    }
    specs: dict[str, TensorSpec] = {INPUT: ((height, width, 3), np.dtype(np.uint8))}
    if metadata.input_kind == "float32":
        specs[INPUT] = (3, height, width), np.dtype(np.float32)
    for name in metadata.outputs:
        if name not in shapes:
            raise ArtifactError(f"its metadata promises an unknown output, {name!r}")
        specs[name] = shapes[name], np.dtype(np.int32 if name in ("argmax", "top_classes", "top_cells") else np.float32)
    return specs


def check_tensors(metadata: Metadata, actual: Mapping[str, tuple[tuple[Any, ...], np.dtype[Any]]]) -> None:
    """Check that a model's tensors are those that its metadata promises.

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
        and all(size == found or not isinstance(found, int) for size, found in zip(shape, actual[name][0], strict=True))
        for name, (shape, dtype) in expected.items()
    )
    if not fits:
        raise ArtifactError(
            f"its tensors are {_format_specs(actual)}, and its metadata promises {_format_specs(expected)}"
        )


def _format_specs(specs: Mapping[str, tuple[tuple[Any, ...], np.dtype[Any]]]) -> str:
    return ", ".join(f"{name} {dtype} {['N', *shape]}" for name, (shape, dtype) in sorted(specs.items()))


def select_top(outputs: Outputs, prototypes_per_class: int, k: int) -> TopOutputs:
    """Return what a graph of `export --outputs topk` selects from all channels: the `k` best classes, C at most."""
    assert outputs.scores is not None
    assert outputs.argmax is not None
    classes = find_largest(outputs.logits, k)
    return TopOutputs(
        classes.astype(np.int32),
        np.take_along_axis(outputs.logits, classes, axis=1),
        take_blocks(outputs.scores, classes, prototypes_per_class),
        take_blocks(outputs.argmax, classes, prototypes_per_class),
        embedding_norms(outputs.scores, 0.0).astype(np.float32),
    )


def find_largest(values: FloatArray, k: int) -> NDArray[np.int64]:
    """Return int64 [N, k], the positions of the `k` largest of each row [C], of equal ones the first; C at most."""
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


def take_blocks(values: NDArray[Any], classes: NDArray[np.integer[Any]], prototypes_per_class: int) -> NDArray[Any]:
    """Return the values of some classes' slots: [N, K] and int [N, k] to [N, k, m]."""
    blocks = values.reshape(len(values), -1, prototypes_per_class)
    taken: NDArray[Any] = blocks[np.arange(len(values))[:, None], classes]
    return taken


def compute_probabilities(logits: FloatArray, classes: NDArray[np.integer[Any]], temperature: float) -> DoubleArray:
    """Return softmax(logits / temperature) of some classes, in float64: logits [N, C] and int [N, k] to [N, k]."""
    scaled = (logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / temperature
    np.exp(scaled, out=scaled)
    probabilities: DoubleArray = np.take_along_axis(scaled, classes, axis=1) / scaled.sum(axis=1, keepdims=True)
    return probabilities


def embedding(scores: FloatArray, epsilon: float) -> DoubleArray:
    """Return z = s / (|s| + epsilon) for scores s [N, K]: float64 [N, K], so that no rounding is added."""
    z: DoubleArray = scores.astype(np.float64) / embedding_norms(scores, epsilon)[:, None]
    return z


def embedding_norms(scores: FloatArray, epsilon: float) -> DoubleArray:
    """Return |s| + epsilon for scores s [N, K]: float64 [N]."""
    # some rows at a time: large temporary arrays cost ten times the arithmetic
    norms = [
        np.linalg.norm(scores[start : start + _NORM_ROWS].astype(np.float64), axis=1)
        for start in range(0, len(scores), _NORM_ROWS)
    ]
    return np.concatenate(norms) + epsilon if norms else np.empty(0)


def cosines(scores: FloatArray, slots: Slots, epsilon: float) -> DoubleArray:
    """Return the cosine <z, a_c> of every class for scores [N, K]: float64 [N, C], from block sums."""
    blocks = embedding(scores, epsilon).reshape(len(scores), -1, slots.per_class)
    sums: DoubleArray = blocks.sum(axis=2) / np.sqrt(slots.counts)
    return sums
