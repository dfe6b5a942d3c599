"""The theoretical receptive field of a network's cells: every input pixel that a cell's features can depend on.

The arithmetic follows Araujo, Norris and Sim, "Computing receptive fields of convolutional neural networks" (Distill
2019). It follows the operations of one forward pass on the device `meta`, whatever modules they are in.
`evaluation.cells` measures what a trained network really depends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.model.backbones import Backbone

aten = torch.ops.aten
_VIEWS = (aten.view, aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze,
          aten.expand, aten.clone, aten.alias, aten.detach, aten._to_copy)  # fmt: skip
# operations without the tag `pointwise` that work on each cell by itself
_CELLWISE = (aten.cat, aten.stack, aten.native_batch_norm, aten._native_batch_norm_legit_no_training,
             aten.native_layer_norm, aten._softmax, aten._prelu_kernel, aten.hardswish, aten.hardswish_)  # fmt: skip
_MATRIX_PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
_REDUCTIONS = (aten.mean, aten.sum, aten.amax, aten.linalg_vector_norm, aten._adaptive_avg_pool2d)
_SLICES = (aten.slice, aten.split, aten.split_with_sizes, aten.select)


@dataclass(frozen=True)
class _Span:
    """The input pixels, along one axis, that cell i depends on: `first + i * step` to `last + i * step`."""

    first: int
    last: int
    step: int


@dataclass(frozen=True)
class _Field:
    """The field of a feature map's cells.

    Attributes:
        rows, cols: along the two axes.
        extent: (H, W) of the feature map; None once all cells are pooled.
        global_context: whether something pooled over all cells was joined to each cell.
    """

    rows: _Span
    cols: _Span
    extent: tuple[int, int] | None
    global_context: bool = False


class _UnboundedError(Exception):
    """An operation other than a sliding window lets a cell depend on others."""


def compute_receptive_field(backbone: Backbone, input_size: tuple[int, int]) -> ReceptiveField:
    """Return the theoretical receptive field of the cells of a backbone's features.

    Convolutions and poolings widen it, normalisation and activation leave it, and where paths meet it is their union.
    If all cells are pooled and the result is joined to each (squeeze-and-excitation), the strict field is the whole
    image: the size leaves that out, and `global_context` is true. Attention between cells and unknown operations give
    no bound: the size is None. `input_size` is (H0, W0).
    """
    tensors = {**dict(backbone.named_parameters()), **dict(backbone.named_buffers())}
    weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    images = torch.empty(1, 3, *input_size, device="meta")
    training = backbone.training
    backbone.eval()
    try:
        with torch.no_grad(), _FieldMode(images) as mode:
            field = mode.field(torch.func.functional_call(backbone, weights, (images,)))
    except _UnboundedError:
        field = None
    finally:
        backbone.train(training)
    if field is None or field.cols.step != backbone.stride:
        return ReceptiveField(backbone.stride, global_context=True)
    return ReceptiveField(
        backbone.stride,
        size=max(span.last - span.first + 1 for span in (field.rows, field.cols)),
        # the middle of the pixels of cell 0, where pixel i reaches from i to i + 1
        offset=(field.cols.first + field.cols.last + 1) / 2,
        global_context=field.global_context,
    )


class _FieldMode(TorchDispatchMode):
    """Follows the field of every tensor through the operations that run inside the mode."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        pixels = _Span(0, 0, 1)
        # keyed by id, since tensors are not hashed by it; kept alive, which costs nothing on the device `meta`
        self._tensors = {id(images): images}
        self._fields = {id(images): _Field(pixels, pixels, (images.shape[2], images.shape[3]))}

    def field(self, tensor: object) -> _Field | None:
        """Return a tensor's field; None if it does not depend on the images."""
        return self._fields.get(id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [field for leaf in tree_leaves((args, kwargs)) if (field := self.field(leaf)) is not None]
        for output in tree_leaves(result) if operands else ():
            if isinstance(output, Tensor):
                self._tensors[id(output)] = output
                self._fields[id(output)] = _propagate(func, args, operands, output)
        return result


def _propagate(func: Any, args: Any, operands: list[_Field], output: Tensor) -> _Field:
    """Return the field of an operation's output; _UnboundedError if it neither keeps nor slides over cells."""
    operation, field = func.overloadpacket, _unite(operands)
    if field.extent is None or operation in _VIEWS:
        return field
    if operation is aten.convolution and not args[6]:
        return _slide(field, output, args[1].shape[2:], *args[3:6])
    if operation in (aten.max_pool2d_with_indices, aten.avg_pool2d):
        kernel = args[1]
        stride = args[2] if len(args) > 2 and args[2] else kernel
        padding = args[3] if len(args) > 3 else [0]
        dilation = args[4] if len(args) > 4 and operation is not aten.avg_pool2d else [1]
        return _slide(field, output, kernel, stride, padding, dilation)
    if operation is aten.constant_pad_nd and len(args[1]) == 4:
        left, _, top, _ = args[1]
        return _slide(field, output, [1], [1], [top, left], [1])
    if operation is aten.upsample_bilinear2d:
        return _upsample(field, output)
    if operation in _REDUCTIONS and not _has_extent(output, field.extent):
        return replace(field, extent=None)
    # a product of two maps of the image is attention between cells; one with weights acts on channels
    on_channels = operation in _MATRIX_PRODUCTS and len(operands) == 1
    of_channels = operation in (*_REDUCTIONS, *_SLICES) and _has_extent(output, field.extent)
    if on_channels or of_channels or operation in _CELLWISE or torch.Tag.pointwise in func.tags:
        return field
    raise _UnboundedError(str(func))


def _slide(field: _Field, output: Tensor, *window: Sequence[int]) -> _Field:
    """Return the field after a window slides over a map; `window`: kernel, stride, padding, dilation.

    Each option has one value for both axes, or one each for rows and columns.
    """

    def widen(span: _Span, axis: int) -> _Span:
        kernel, stride, padding, dilation = (option[axis % len(option)] for option in window)
        first = span.first - padding * span.step
        return _Span(first, span.last + ((kernel - 1) * dilation - padding) * span.step, span.step * stride)

    extent = (output.shape[-2], output.shape[-1])
    return replace(field, rows=widen(field.rows, 0), cols=widen(field.cols, 1), extent=extent)


def _upsample(field: _Field, output: Tensor) -> _Field:
    """Return the field after bilinear upsampling: the two nearest cells along each axis, wherever a new cell lies."""
    assert field.extent is not None  # checked by the caller
    ratio = -(-output.shape[-1] // field.extent[1])
    # a new cell's centre lies up to 1.5 coarse cells, less one fine cell, behind the first centre that it mixes
    rows, cols = (
        _Span(span.first - (3 * span.step // 2 - span.step // ratio), span.last + span.step // 2, span.step // ratio)
        for span in (field.rows, field.cols)
    )
    return replace(field, rows=rows, cols=cols, extent=(output.shape[-2], output.shape[-1]))


def _unite(fields: list[_Field]) -> _Field:
    """Return the union of the fields of maps that meet, of one stride; a pooled one only sets `global_context`."""
    maps = [field for field in fields if field.extent is not None]
    if not maps:
        return fields[0]
    if len({field.cols.step for field in maps}) > 1:
        raise _UnboundedError("maps of different strides")
    rows, cols = (
        _Span(min(span.first for span in spans), max(span.last for span in spans), spans[0].step)
        for spans in ([field.rows for field in maps], [field.cols for field in maps])
    )
    context = len(maps) < len(fields) or any(field.global_context for field in maps)
    return _Field(rows, cols, maps[0].extent, context)


def _has_extent(output: Tensor, extent: tuple[int, int]) -> bool:
    """Return whether a tensor has an axis for the rows and one for the columns of cells, in any layout."""
    sizes = list(output.shape)
    for length in extent:
        if length not in sizes:
            return False
        sizes.remove(length)
    return True
