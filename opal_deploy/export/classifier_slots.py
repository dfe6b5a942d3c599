"""Slots of somebody's classifier: the shares of its cells, divided among the parts that each class looks at.

The entries of W_c * F(u, v) add up to the share that a cell has in the logit of class c (`classifier_tail`), and their
direction says what the cell shows. In training images of the class, the directions of the cells that speak for it are
grouped by k-means, which gives the class m directions v_j. Every cell of any image then belongs to the slots of each
class by its cosines to these directions, and a slot's score is the sum of its parts of all shares:

    assignment_j(u, v) = softmax over the class's slots of (s cos(W_c * F(u, v), v_j))
    score_j = sum over cells of assignment_j(u, v) share_c(u, v)
    logit_c = b_c + sum over its m slots of score_j

A slot's cell is the one with its largest part. Logits stay the original's bits: only `edit` takes scores from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from sklearn.cluster import KMeans

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import INPUT, Outputs
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.errors import UsageError
from opal_deploy.evaluation.inputs import check_classes
from opal_deploy.evaluation.patches import MAX_IMAGES, cut_patches
from opal_deploy.evaluation.session import Photographs, choose_samples, photographs
from opal_deploy.export.classifier_tail import Tail
from opal_deploy.export.graph_edit import KEPT, GraphBuilder, declare_outputs, producers, with_outputs
from opal_deploy.export.options import ExportOptions
from opal_deploy.logs import as_progress
from opal_deploy.preprocess.resize import normalise
from opal_deploy.records.regions import find_strong_cells
from opal_deploy.runtime.onnx_session import translate_errors
from opal_deploy.runtime.session import ImageBatch

# s of the module's formula; whole cells to the nearest direction, or 20 and more, give slots that keep less to one part
_SHARPNESS = 10.0
_TINY = 1e-20
_PREFIX = "slots_"
# values of `add_shares`: W times the feature map [N, D, H W], and LayerNorm's deviation; and the logits' new name
_PRODUCTS, _DEVIATION, _LOGITS = "shares_products", "shares_deviation", "shares_own_logits"


def divide_shares(
    model: onnx.ModelProto, metadata: Metadata, tail: Tail, options: ExportOptions, open_session: Callable[..., Any]
) -> tuple[onnx.ModelProto, Metadata]:
    """Return a classifier's graph and metadata with slots instead of regions, found in images of `options.slots`.

    Args:
        model: of `add_shares`, with the input `images`.
        metadata: of the same, with class names and preprocessing.
        open_session: returns ONNX Runtime's session of a graph.

    Raises:
        UsageError: the data set cannot be read, has other classes, or shows too few cells of a class.
    """
    assert options.slots is not None  # decided by it
    is_cropped, progress = options.crop == "boxes", as_progress(options.progress)
    data = read_dataset(Path(options.slots), needs_validation=lambda _: False, progress=progress)
    data = data if is_cropped else data.without_crops()
    check_classes(Path(str(metadata.source["file"])), list(metadata.class_names), data)
    samples = [data.train[index] for index in choose_samples(data.train, MAX_IMAGES)]

    def answer(model: onnx.ModelProto, names: tuple[str, ...], note: str) -> Iterator[Photographs[dict[str, Any]]]:
        session = open_session(with_outputs(model, names))

        def run(pixels: ImageBatch) -> dict[str, Any]:
            inputs = normalise(np.asarray(pixels), metadata.mean, metadata.std)
            with translate_errors(len(inputs)):
                return dict(zip(names, session.run(names, {INPUT: inputs}), strict=True))

        return photographs(run, samples, metadata.form, boxes=is_cropped, progress=progress, note=note)

    cells: list[list[NDArray[np.float32]]] = [[] for _ in metadata.class_names]
    columns = producers(model.graph)[_PRODUCTS].input[1]
    for images in answer(model, (columns,), "finding slots"):
        for index, features in zip(images.indices, images.outputs[columns], strict=True):
            label = samples[index].label
            products = (tail.weights[label][:, None] * features).T  # W_c * F(u, v), [H W, D]
            cells[label].append(products[find_strong_cells(products.sum(axis=1))].astype(np.float32))
    directions = []
    for name, vectors in zip(metadata.class_names, cells, strict=True):
        known = np.concatenate(vectors)
        if len(known) < options.prototypes:
            raise UsageError(
                f"--slots {options.slots}: {len(vectors)} training images of {name} have {len(known)} strong cells for "
                f"{options.prototypes} slots; give more images, or fewer --prototypes"
            )
        directions.append(find_directions(known, options.prototypes))
    metadata = replace(
        metadata, evidence="exact", prototypes_per_class=options.prototypes, outputs=("logits", "argmax", "scores"),
        source={**metadata.source, "slots": {"data": Path(options.slots).resolve().name, "images": len(samples)}},
    )  # fmt: skip
    changed = add_slots(model, tail, np.stack(directions), metadata)
    answers = answer(changed, metadata.outputs, "choosing patches")
    outputs = Outputs.concatenate([Outputs.from_arrays(images.outputs) for images in answers])
    metadata = replace(metadata, head={**metadata.head, "scale": float(np.abs(outputs.logits).max())})
    if options.patches:
        patches = cut_patches(outputs, samples, metadata, "train", boxes=is_cropped).fit()
        metadata = replace(metadata, patches={} if patches is None else patches.to_dict())
    return changed, metadata


def find_directions(cells: NDArray[np.float32], count: int) -> NDArray[np.float64]:
    """Return directions of length 1 [count, D] that group vectors [n, D] by their cosines, the heaviest group first."""
    vectors = cells / np.maximum(np.linalg.norm(cells, axis=1, keepdims=True), _TINY)
    weights = np.maximum(cells.sum(axis=1), _TINY)
    groups = KMeans(count, n_init=4, random_state=0).fit(vectors, sample_weight=weights)
    order = np.argsort(-np.bincount(groups.labels_, weights, minlength=count), kind="stable")
    directions: NDArray[np.float64] = groups.cluster_centers_[order]
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), _TINY)
    return directions


def add_slots(
    model: onnx.ModelProto, tail: Tail, directions: NDArray[np.float64], metadata: Metadata
) -> onnx.ModelProto:
    """Return a copy of the graph of `add_shares` with the outputs `logits`, `argmax` and `scores` instead of its own.

    Args:
        directions: v [C, m, D].
        metadata: of the copy.
    """
    count, slots, channels = directions.shape
    cells, prototypes = metadata.grid[0] * metadata.grid[1], count * slots
    columns = producers(model.graph)[_PRODUCTS].input[1]
    changed = with_outputs(model, ["logits", columns, *([_DEVIATION] if tail.normalised else [])])
    own = producers(changed.graph)["logits"]
    own.output[0] = own.name = _LOGITS
    builder = GraphBuilder(changed.graph, _PREFIX, metadata.outputs)
    add, reshape = builder.node, builder.reshape

    def constant(name: str, value: Any) -> str:
        return builder.constant(name, np.asarray(value, np.float32))

    rows = add("Transpose", "rows", columns, perm=[0, 2, 1])  # [N, H W, D]
    shares = add("MatMul", "shares", rows, constant("weights", tail.weights.T / cells))  # [N, H W, C]
    if tail.normalised:
        shares = add("Div", "shares_normalised", shares, _DEVIATION)
    squares = add("MatMul", "squares", add("Mul", "rows_squared", rows, rows), constant("squared", tail.weights.T**2))
    lengths = add("Sqrt", "lengths", add("Add", "squares_positive", squares, constant("tiny", _TINY)))
    toward = _SHARPNESS * (directions * tail.weights[:, None]).reshape(prototypes, channels).T
    products = add("MatMul", "products", rows, constant("directions", toward))  # [N, H W, C m]
    cosines = add(
        "Div", "cosines", reshape("by_class", products, 0, cells, count, slots),
        reshape("lengths_by_class", lengths, 0, cells, count, 1),
    )  # fmt: skip
    assignment = add("Softmax", "assignment", cosines, axis=3)
    parts = add("Mul", "parts", assignment, reshape("shares_by_class", shares, 0, cells, count, 1))
    maps = add("Transpose", "maps", reshape("by_slot", parts, 0, cells, prototypes), perm=[0, 2, 1])  # [N, C m, H W]
    add("Cast", "argmax", add("ArgMax", "cells", maps, axis=2, keepdims=0), to=TensorProto.INT32)
    sums = add("MatMul", "sums", maps, constant("all_cells", np.ones((cells, 1))))
    scores = reshape("scores", sums, -1, prototypes)
    # `edit` sets entries to 0
    changed.graph.initializer.append(numpy_helper.from_array(np.ones((1, prototypes), np.float32), KEPT))
    dropped = add("Mul", "dropped", scores, add("Sub", "minus_one_if_dropped", KEPT, constant("one", 1.0)))
    losses = add(
        "MatMul", "losses", reshape("dropped_by_class", dropped, -1, count, slots),
        constant("all_slots", np.ones((slots, 1))),
    )  # fmt: skip
    add("Add", "logits", _LOGITS, reshape("losses_by_class", losses, -1, count))
    declare_outputs(changed.graph, metadata)
    return changed
