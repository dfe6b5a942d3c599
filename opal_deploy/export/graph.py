"""The network as it is exported, and its tracing into an ONNX graph of the contract's shape (docs/contract.md).

Input `images`: uint8 [N, H0, W0, 3]. Outputs: logits float32 [N, C], argmax int32 [N, K], scores float32 [N, K] and, on
request, attention float32 [N, K, H, W]. The traced graph carries no metadata yet, and nothing is verified.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import onnx
import torch
from torch import Tensor

from opal_deploy.errors import UsageError
from opal_deploy.export.graph_edit import BODY_INPUT, BODY_OUTPUT
from opal_deploy.model.graph import InferenceGraph

OPSET = 20
# onnx 1.23 writes IR 14 by default, which ONNX Runtime 1.31 rejects
IR_VERSION = 10
# ONNX files are protobuf messages; one file without external data cannot be larger
MAX_BYTES = (1 << 31) - 1
_PREFIX = "traced_"


class ExportGraph(InferenceGraph):
    """A network wrapped for tracing.

    `forward` returns the outputs in the order of `output_names`, then the tensors of `marker_names`, which name the
    body's two ends.
    """

    @property
    def marker_names(self) -> tuple[str, ...]:
        """The two ends of the body; an input that is normalised already is the graph's own `images`."""
        return (BODY_INPUT, BODY_OUTPUT) if self.input_kind == "uint8" else (BODY_OUTPUT,)

    def example(self) -> Tensor:
        """Return a batch of two to trace with; a batch of one would be taken for a constant."""
        height, width = self.network.config.input_size
        if self.input_kind == "uint8":
            return torch.zeros(2, height, width, 3, dtype=torch.uint8)
        return torch.zeros(2, 3, height, width)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        normalised = self.normalise(images)
        projected = self.project(normalised)
        values = {**self.explain(projected), BODY_INPUT: normalised, BODY_OUTPUT: projected}
        return tuple(values[name] for name in (*self.output_names, *self.marker_names))


def trace(graph: ExportGraph) -> onnx.ModelProto:
    """Return the ONNX model of an export graph: input `images` with dynamic N, outputs of the contract's names.

    Raises:
        UsageError: the file would be over ONNX's 2 GB.
    """
    parameters = sum(t.numel() * t.element_size() for t in (*graph.parameters(), *graph.buffers()))
    if parameters > MAX_BYTES:
        raise UsageError(
            f"the network has {parameters / 1e9:.1f} GB of parameters, over ONNX's limit of 2 GB for one file; "
            "use a smaller backbone, or fewer classes or prototypes"
        )
    graph.eval()
    names = [*graph.output_names, *graph.marker_names]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        program = torch.onnx.export(
            graph,
            (graph.example(),),
            dynamo=True,
            input_names=["images"],
            # traced under other names: the tracer's own `argmax` would clash with the output of that name
            output_names=[_PREFIX + name for name in names],
            dynamic_shapes=({0: torch.export.Dim("N")},),
            opset_version=OPSET,
            optimize=True,
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    return _clean(program.model_proto, graph)


def _clean(model: onnx.ModelProto, graph: ExportGraph) -> onnx.ModelProto:
    """Give outputs the contract's names, take markers from the outputs, and remove traces of the exporting machine."""
    final = {_PREFIX + name: name for name in (*graph.output_names, *graph.marker_names)}
    taken = set(final.values())
    for node in model.graph.node:
        # the tracer leaves stack traces with the exporting machine's paths in every node
        del node.metadata_props[:]
        node.doc_string = ""
        _rename(node.input, final, taken)
        _rename(node.output, final, taken)
    for value in model.graph.output:
        value.name = final.get(value.name, value.name)
    keep = [value for value in model.graph.output if value.name in graph.output_names]
    keep.sort(key=lambda value: graph.output_names.index(value.name))
    del model.graph.output[:]
    model.graph.output.extend(keep)
    del model.graph.value_info[:]
    del model.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    for tensor in model.graph.initializer:
        tensor.doc_string = ""
        del tensor.metadata_props[:]
    model.doc_string = model.graph.doc_string = ""
    model.graph.name = "opal"
    model.ir_version = IR_VERSION
    return model


def _rename(names: Any, final: dict[str, str], taken: set[str]) -> None:
    for index, name in enumerate(names):
        if name in final:
            names[index] = final[name]
        elif name in taken:
            names[index] = f"{name}_inner"
