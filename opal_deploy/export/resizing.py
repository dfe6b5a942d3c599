"""Files that take images of any size: resizing becomes part of the graph, and is compared with the pipeline's.

The operator Resize with `antialias` would be one node, which ONNX Runtime computes right. But OpenVINO 2026.4 does not
antialias, and is off by up to 102 of 255. Two matrix products are right in both. Their weights, which the graph
computes from the image's size, are Pillow's bilinear filter: a triangle of max(1, size / new size) pixels to each side.
As in Pillow the width comes first, and each pass rounds to whole numbers. These stay float32, which the cast of uint8
images then leaves as they are: IREE 3.13 casts numbers above 127 to uint8 wrongly.

For a letterbox the graph computes the resized image's sides, in float64 as `ResizeRule.fit` does, and its corner.
Beyond its edges the weights are those of the nearest row or column, and grey is painted over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper, parser
from PIL import Image

from opal_deploy.artifact.outputs import INPUT, Outputs
from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.export.images import Pixels, run_in_batches
from opal_deploy.preprocess.geometry import compute_geometry
from opal_deploy.preprocess.resize import BARS, fit_input
from opal_deploy.runtime.gates import GATES
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import Comparison, compare_outputs

# a pixel that differs by 1 of 255 moves outputs less than half precision does, but for the logits of a network's own
# classifier, which have no bound
RESIZING_GATE = replace(GATES["fp16"], logit=GATES["int8"].logit)
_PREFIX, _RESIZED = "resize_", "resized"
# weights, float32 [new size, size], of each pixel of an axis in each new pixel
_WEIGHTS = """
    AXIS_count = Gather <axis = 0> (shape, AXIS_number)
    AXIS_range = Range (zero, AXIS_count, step)
    AXIS_places = Cast <to = 1> (AXIS_range)
    AXIS_centres = Add (AXIS_places, half)
    AXIS_size = Cast <to = 1> (AXIS_count)
    AXIS_scale = Div (AXIS_size, AXIS_new_size)
    AXIS_targets = Mul (AXIS_new_centres, AXIS_scale)
    AXIS_offsets = Sub (AXIS_centres, AXIS_targets)
    AXIS_support = Max (AXIS_scale, one)
    AXIS_relative = Div (AXIS_offsets, AXIS_support)
    AXIS_distances = Abs (AXIS_relative)
    AXIS_height = Sub (one, AXIS_distances)
    AXIS_triangle = Relu (AXIS_height)
    AXIS_total = ReduceSum <keepdims = 1> (AXIS_triangle, last_axis)
    AXIS_weights = Div (AXIS_triangle, AXIS_total)"""
# the resized sides of a letterbox, at the places of height and width in the image's shape
_FITTED = """
    lengths = Cast <to = 11> (shape)
    ratios = Div (most, lengths)
    ratio = ReduceMin <keepdims = 0> (ratios)
    scaled = Mul (lengths, ratio)
    rounded = Round (scaled)
    fitted = Max (rounded, least)"""
# the centres of an axis of the input, in pixels of the resized image
_PLACED = """
    AXIS_fitted = Gather <axis = 0> (fitted, AXIS_number)
    AXIS_new_size = Cast <to = 1> (AXIS_fitted)
    AXIS_spare = Sub (AXIS_new_size, AXIS_input_size)
    AXIS_halved = Mul (AXIS_spare, half)
    AXIS_corner = Ceil (AXIS_halved)
    AXIS_moved = Add (AXIS_input_centres, AXIS_corner)
    AXIS_end = Sub (AXIS_new_size, half)
    AXIS_new_centres = Clip (AXIS_moved, half, AXIS_end)
    AXIS_inside = Equal (AXIS_new_centres, AXIS_moved)"""
_BARRED = """
    column_within = Transpose <perm = [1, 0]> (column_inside)
    inside = And (row_inside, column_within)
    lowered = Where (inside, filled, grey)"""
_GRAPH = f"""resizing (uint8[N, height, width, 3] images) => (float[N, rows, columns, 3] resized) {{
    shape = Shape (images)
    {_WEIGHTS.replace("AXIS", "row")}
    {_WEIGHTS.replace("AXIS", "column")}
    planes = Transpose <perm = [0, 3, 1, 2]> (images)
    values = Cast <to = 1> (planes)
    across = Transpose <perm = [1, 0]> (column_weights)
    narrow = MatMul (values, across)
    narrow_half = Add (narrow, half)
    narrowed = Floor (narrow_half)
    low = MatMul (row_weights, narrowed)
    low_half = Add (low, half)
    lowered = Floor (low_half)
    resized = Transpose <perm = [0, 2, 3, 1]> (lowered)
}}"""


def with_resizing(model: onnx.ModelProto, form: InputForm) -> onnx.ModelProto:
    """Return a copy of a model whose input is uint8 [N, height, width, 3] of any size instead of [N, H0, W0, 3].

    The rule of `form` is squash-bilinear or letterbox-bilinear: an image of (H0, W0) pixels is not changed at all. The
    model has opset 13 or later.
    """
    changed = copy.deepcopy(model)
    for node in changed.graph.node:
        node.input[:] = [_RESIZED if name == INPUT else name for name in node.input]
    text = _GRAPH
    if form.rule.kind == "letterbox":
        sides = _FITTED + _PLACED.replace("AXIS", "row") + _PLACED.replace("AXIS", "column")
        text = text.replace("Shape (images)", f"Shape (images){sides}")
        text = text.replace("lowered = Floor (low_half)", f"filled = Floor (low_half){_BARRED}")
    body, graph = list(changed.graph.node), parser.parse_graph(text)
    for node in graph.node:
        node.input[:], node.output[:] = map(_own_name, node.input), map(_own_name, node.output)
        node.name = node.output[0]
    del changed.graph.node[:]
    changed.graph.node.extend([*graph.node, *body])
    changed.graph.initializer.extend(
        numpy_helper.from_array(value, _own_name(name)) for name, value in _constants(form).items()
    )
    del changed.graph.input[:]
    changed.graph.input.extend(graph.input)
    return changed


def _own_name(name: str) -> str:
    return name if name in (INPUT, _RESIZED) else _PREFIX + name


def _constants(form: InputForm) -> dict[str, NDArray[Any]]:
    constants: dict[str, NDArray[Any]] = {
        "half": np.array(0.5, np.float32), "one": np.array(1, np.float32), "zero": np.array(0), "step": np.array(1),
        "last_axis": np.array([1]),
    }  # fmt: skip
    kind = "new"
    if form.rule.kind == "letterbox":
        # the numbers of images and of channels limit nothing
        kind, most = "input", np.array([np.inf, *form.size, np.inf])
        constants |= {"most": most, "least": np.array(1.0), "grey": np.array(BARS, np.float32)}
    for number, (axis, side) in enumerate(zip(("row", "column"), form.size, strict=True), start=1):
        constants[f"{axis}_number"] = np.array(number)
        constants[f"{axis}_{kind}_size"] = np.array(side, np.float32)
        constants[f"{axis}_{kind}_centres"] = (np.arange(side, dtype=np.float32) + np.float32(0.5))[:, None]
    return constants


def compare_resizing(
    session: OnnxSession, images: Iterable[Image.Image], run: Callable[[Pixels], Reference]
) -> Comparison:
    """Compare a `with_resizing` graph's answers on whole images with its answers on images that the pipeline resized.

    Args:
        session: on the graph.
        images: images of any size.
        run: returns the reference that the same graph is on uint8 [n, H0, W0, 3].
    """
    resized, computed = [], []
    for image in images:
        resized.append(fit_input(image, compute_geometry(image.size), session.metadata.form)[0])
        computed.append(session.run_normalised(np.asarray(image)[None]))
    reference = run_in_batches(run, np.stack(resized), Reference.concatenate)
    return compare_outputs(reference, Outputs.concatenate(computed), session.metadata, RESIZING_GATE)
