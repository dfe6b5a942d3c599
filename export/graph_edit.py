"""What the passes over an exported ONNX graph share: where its body lies, and who makes which value."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from opal_deploy.errors import ArtifactError

# the values that `export.graph` names: where the body begins and ends
BODY_INPUT = "normalised"
BODY_OUTPUT = "projected"


def body_input(graph: onnx.GraphProto) -> str:
    """Name of the normalised picture: BODY_INPUT, or the graph's own input where that is normalised already."""
    return BODY_INPUT if any(BODY_INPUT in node.output for node in graph.node) else "images"


def producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """The node that makes each value."""
    return {name: node for node in graph.node for name in node.output}


def nodes_between(graph: onnx.GraphProto, start: str, end: str) -> set[str]:
    """The nodes that compute `end` from `start` and from weights, each by its first output's name.

    Raises:
        ArtifactError: no value of the graph is called `end`.
    """
    made_by = producers(graph)
    if end not in made_by:
        raise ArtifactError(
            f"the graph does not name its body's output {end!r}; give an ONNX file that `opal-deploy export` wrote"
        )
    body: set[str] = set()
    pending = [end]
    while pending:
        name = pending.pop()
        node = made_by.get(name)
        if node is None or name == start or node.output[0] in body:
            continue
        body.add(node.output[0])
        pending.extend(node.input)
    return body


def projection_input(graph: onnx.GraphProto) -> str:
    """The value that enters the projection: the features F. BODY_OUTPUT itself where there is no projection."""
    node = producers(graph).get(BODY_OUTPUT)
    return node.input[0] if node is not None and node.op_type == "Conv" else BODY_OUTPUT


def with_outputs(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy whose outputs are these values, whatever their types."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.output[:]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return changed
