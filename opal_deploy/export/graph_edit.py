"""Navigation in an exported ONNX graph: the ends of its body, and the nodes that compute a value.

The body reaches from the normalised images to the projection; the head behind it stays float32 always.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from opal_deploy.errors import ArtifactError

# values that `graph.trace` names: the two ends of the body
BODY_INPUT = "normalised"
BODY_OUTPUT = "projected"


def body_input(graph: onnx.GraphProto) -> str:
    """Return the name of the normalised images: BODY_INPUT, or the graph's input where that is normalised already."""
    return BODY_INPUT if any(BODY_INPUT in node.output for node in graph.node) else "images"


def producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Return the node that computes each value, by the value's name."""
    return {name: node for node in graph.node for name in node.output}


def nodes_between(graph: onnx.GraphProto, start: str, end: str) -> set[str]:
    """Return the nodes that compute `end` from `start` and from weights, each by its first output's name.

    Raises:
        ArtifactError: no value of the graph is called `end`.
    """
    made_by = producers(graph)
    if end not in made_by:
        raise ArtifactError(
            f"the graph does not name its body's output {end!r}; give an ONNX file that `opal-deploy export` wrote"
        )
    return _ancestors(made_by, [end], start)


def nodes_of(graph: onnx.GraphProto, names: Iterable[str]) -> set[str]:
    """Return the nodes that compute these values, each by its first output's name."""
    return _ancestors(producers(graph), names)


def _ancestors(made_by: dict[str, onnx.NodeProto], ends: Iterable[str], start: str | None = None) -> set[str]:
    body: set[str] = set()
    pending = list(ends)
    while pending:
        name = pending.pop()
        node = made_by.get(name)
        if node is None or name == start or node.output[0] in body:
            continue
        body.add(node.output[0])
        pending.extend(node.input)
    return body


def projection_input(graph: onnx.GraphProto) -> str:
    """Return the name of the features that enter the projection; BODY_OUTPUT where there is no projection."""
    node = producers(graph).get(BODY_OUTPUT)
    return node.input[0] if node is not None and node.op_type == "Conv" else BODY_OUTPUT


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """Return a copy of a model whose outputs are these values, whatever their types."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.output[:]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return changed
