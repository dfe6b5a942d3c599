"""The gate that a graph passes before it becomes a file (docs/precision.md), and the error for one that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata, Precision
from opal_deploy.artifact.outputs import Outputs, select_top
from opal_deploy.errors import VerificationError
from opal_deploy.export.candidate import ExportCandidate
from opal_deploy.export.graph_edit import BODY_OUTPUT, body_input, nodes_between, with_outputs
from opal_deploy.export.images import BATCHES, SAMPLE_SIZES, Pixels, run_in_batches
from opal_deploy.export.onnx_source import reference_runner
from opal_deploy.export.precision import simulate_low_precision
from opal_deploy.export.resizing import RESIZING_GATE, compare_resizing
from opal_deploy.logs import Log, log_line
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.gates import GATES
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import Comparison, compare_outputs, verify_test_vectors

# ONNX Runtime's CPU provider runs these in float32, or not at all: see `simulate_low_precision`
_SIMULATED = ("fp16", "bf16")
_ADVICE: dict[Precision, str] = {
    "fp32": "",
    "fp16": "; try --images with photographs such as the model will see, or --precision fp32",
    "bf16": "; try --precision fp16, or fp32",
    "int8": "; calibrate on more photographs such as the model will see (--calibrate), or use fp16",
}
# confidence of each bound of a share: three samples are tested, and together they refuse wrongly in at most 5 %
_CONFIDENCE = 1 - 0.05 / len(SAMPLE_SIZES)
# layers with weights, and the additions that sum up their errors
_LAYERS = ("Conv", "MatMul", "Gemm", "LayerNormalization", "Add")
# least scale of a layer's values: a relative error of values that are all nearly zero says nothing
_MIN_SCALE = 1e-6
_NORM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Verification:
    """The comparison, the metadata's `verification`, and the candidate with the images that it was judged on.

    These may be more than it came with.
    """

    comparison: Comparison
    document: dict[str, Any]
    candidate: ExportCandidate


@dataclass(frozen=True)
class LayerError:
    """The deviation of one layer's values from the float32 graph's.

    `relative` is the RMS of the difference over the RMS of the float32 values, infinite where the layer overflows;
    `largest` the largest absolute float32 value.
    """

    layer: str
    relative: float
    largest: float


def verify_candidate(
    candidate: ExportCandidate, path: Path, threads: int | None = None, log: Log = log_line
) -> Verification:
    """Run a candidate's graph on its images and compare the outputs with its reference.

    The candidate has the metadata, test vectors included, that its file `path` is to have, next to which
    the graph lies while it runs.

    Raises:
        VerificationError: a simulated graph passes the gate, but not its test vectors.
    """
    metadata, reference, images = candidate.metadata, candidate.reference, candidate.images
    simulated = metadata.precision in _SIMULATED
    gate, in_float64 = GATES[metadata.precision], None
    with atomic_write(path, keep=False) as temporary:
        onnx_file.write_model(_runnable_model(candidate), metadata, temporary)
        session = OnnxSession(temporary, device="cpu", threads=threads, check_digest=False)
        *first, last = BATCHES
        log(
            f"Comparing {metadata.precision} with {candidate.reference_name} on {candidate.images.description} in "
            f"batches of {', '.join(map(str, first))} and {last}"
        )
        outputs = run_in_batches(session.run, reference.images, Outputs.concatenate)
        comparison = compare_outputs(reference, outputs, metadata, gate, _CONFIDENCE)
        if not comparison and candidate.compare_in_float64 is not None:
            in_float64 = candidate.compare_in_float64(candidate.model)
            if problem := in_float64.graph.exceeds(gate, in_float64.float32):
                problem = f"the graph is not the network: in float64 {problem}"
                comparison = replace(comparison, failures=(problem, *comparison.failures))
            else:
                gate = gate.widened_by(in_float64.float32)
                comparison = compare_outputs(reference, outputs, metadata, gate, _CONFIDENCE)
        # a maximum grows with the sample: its limits apply to the first one, further images only to the share
        share_gate = replace(gate, cosine=float("inf"), logit=float("inf"), score=float("inf"))
        for size in SAMPLE_SIZES[1:]:
            agreement, seen = comparison.agreement, len(reference.images)
            if not comparison or candidate.more is None or agreement is None or agreement.shown:
                break
            images, reference = candidate.more(size)
            if len(images.names) == seen:
                break
            log(f"Inconclusive after {comparison.block_cells} cells; adding more: {images.description}")
            added = run_in_batches(session.run, reference.images[seen:], Outputs.concatenate)
            outputs = Outputs.concatenate([outputs, added])
            comparison = compare_outputs(reference, outputs, metadata, share_gate, _CONFIDENCE)
        judged = replace(candidate, images=images, reference=reference)
        if comparison and metadata.top_k is not None:
            comparison = replace(comparison, failures=find_selection_errors(outputs, metadata))
        resizing = None
        if comparison and metadata.input_kind == "image":
            log(f"Comparing the graph's resizing with Pillow's on {candidate.images.description}, in their own sizes")
            resizing = compare_resizing(
                session, candidate.images, reference_runner(_runnable_model(candidate), session)
            )
            problems = [f"resized in the graph, {failure}" for failure in resizing.failures]
            comparison = replace(comparison, failures=(*comparison.failures, *problems))
        if comparison and simulated:
            verify_test_vectors(session, "the graph with emulated rounding")
    how = " emulated: rounded after every operation" if simulated else ""
    document: dict[str, Any] = {
        "reference": candidate.reference_name,
        "candidate": session.description + how,
        "image_set": images.description,
        "batches": list(BATCHES),
        "gate": gate.to_dict(),
    }
    if resizing is not None:
        document["resizing"] = {**resizing.to_dict(), "gate": RESIZING_GATE.to_dict()}
    if in_float64 is not None:
        document["float64"] = {name: asdict(part) for name, part in in_float64._asdict().items()}
    document |= {**comparison.to_dict(), "worst_image": Path(images.names[comparison.worst]).name}
    return Verification(comparison, document, judged)


def find_selection_errors(outputs: Outputs, metadata: Metadata) -> tuple[str, ...]:
    """Return one sentence for each best-class output that contradicts the other outputs of the same pass."""
    if outputs.top is None:
        return ("the graph does not list its best classes",)
    expected = select_top(outputs, metadata.class_map, metadata.max_top)
    # the norm alone is computed, by sums in another order; all others are copies
    tolerance = {"score_norm": _NORM_TOLERANCE}
    return tuple(
        f"{name} is not what logits, scores and argmax of the same pass say"
        for name, before, after in zip(TOP_OUTPUTS, expected, outputs.top, strict=True)
        if not np.allclose(after, before, rtol=tolerance.get(name, 0.0), atol=0.0)
    )


def verification_error(verification: Verification, name: str) -> VerificationError:
    """Return the error for a candidate that failed: the measurements, the worst image and layer, and what to try.

    `name` names the file that is not written.
    """
    comparison, candidate = verification.comparison, verification.candidate
    worst = candidate.images.names[comparison.worst]
    if candidate.baseline is not None:
        image = candidate.reference.images[comparison.worst]
        errors = list(layer_errors(candidate.baseline, _runnable_model(candidate), image, candidate.metadata))
        worst += f", where {_describe_worst(errors)}" if errors else ""
    return VerificationError(
        f"{name} was not written: {'; '.join(comparison.failures)} (against {candidate.reference_name}, on "
        f"{candidate.images.description}); worst on {worst}{_ADVICE[candidate.metadata.precision]}"
    )


def layer_errors(
    baseline: onnx.ModelProto, model: onnx.ModelProto, image: Pixels, metadata: Metadata
) -> Iterator[LayerError]:
    """Yield the error of each layer of the body on one image, uint8 [H0, W0, 3], in the graph's order.

    `model` was made from the float32 graph `baseline`: the same names for the same values, float32 between its layers.
    """
    body = nodes_between(baseline.graph, body_input(baseline.graph), BODY_OUTPUT)
    kept = {name for node in model.graph.node for name in node.output}
    layers = {
        node.output[0]: node
        for node in baseline.graph.node
        if node.output[0] in body and node.op_type in _LAYERS and node.output[0] in kept
    }
    batch = image[None]
    feed: Any = normalise(batch, metadata.mean, metadata.std) if metadata.input_kind == "float32" else batch
    expected, actual = (_run_layers(graph, list(layers), feed) for graph in (baseline, model))
    for node, before, after in zip(layers.values(), expected, actual, strict=True):
        scale = max(_rms(before), _MIN_SCALE)
        error = _rms(before - after) / scale if np.isfinite(after).all() else float("inf")
        yield LayerError(f"{node.op_type} {_layer_name(node)}", error, float(np.abs(before).max()))


def _runnable_model(candidate: ExportCandidate) -> onnx.ModelProto:
    """Return the candidate's graph, or its simulation where ONNX Runtime's CPU provider lacks the arithmetic."""
    simulated = candidate.metadata.precision in _SIMULATED
    return simulate_low_precision(candidate.model) if simulated else candidate.model


def _describe_worst(errors: list[LayerError]) -> str:
    for error in errors:
        if not np.isfinite(error.relative):
            return f"{error.layer} is the first layer to overflow (its values reach {error.largest:.3g})"
    worst = max(errors, key=lambda error: error.relative)
    return f"{worst.layer} is furthest off ({100 * worst.relative:.2g} %)"


def _run_layers(model: onnx.ModelProto, names: list[str], feed: Any) -> list[NDArray[np.float32]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        with_outputs(model, names).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(names, {"images": feed}))


def _rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _layer_name(node: onnx.NodeProto) -> str:
    """Return the weight's name, which people know from their network, or the value's."""
    weights = [str(name) for name in node.input[1:] if name.endswith(".weight")]
    return weights[0].removeprefix("network.") if weights else str(node.output[0])
