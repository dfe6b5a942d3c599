"""The gate that a graph passes before it becomes a file, and what is said of one that does not.

Which layer a lower precision hurts most: the one line that tells where to look when a gate fails."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from opal_deploy._version import __version__
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import METADATA_KEY, Metadata, Precision
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ArtifactError, VerificationError
from opal_deploy.export.candidate import ExportCandidate, Say
from opal_deploy.export.graph_edit import BODY_OUTPUT, body_input, nodes_between, with_outputs
from opal_deploy.export.images import BATCHES, Pixels, in_batches
from opal_deploy.export.precision import simulate_low_precision
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import GATES, Comparison, compare_outputs, verify_test_vectors

# on ONNX Runtime's CPU provider these would run in float32, or not at all: see `rounding`
_EMULATED = ("fp16", "bf16")


@dataclass(frozen=True)
class VerificationReport:
    """What a comparison measured, and the same as the report for the metadata."""

    comparison: Comparison
    report: dict[str, Any]


def verify_candidate(
    candidate: ExportCandidate, folder: Path, say: Say, threads: int | None = None
) -> VerificationReport:
    """Run a candidate's graph on its pictures and hold the answers against its reference.

    Args:
        candidate: with the metadata, test vectors included, that its file is to have.
        folder: where room for a temporary file is.
        say: told what is compared.
        threads: of ONNX Runtime.
    """
    metadata, reference, pictures = candidate.metadata, candidate.reference, candidate.pictures
    emulated = metadata.precision in _EMULATED
    gate = GATES[metadata.precision]
    rounding = None
    with atomic_write(folder / "gate.onnx", keep=False) as temporary:
        write_model(simulate_low_precision(candidate.model) if emulated else candidate.model, metadata, temporary)
        session = OnnxSession(temporary, device="cpu", threads=threads, check_digest=False)
        how = session.description + (" emulated: rounded after every operation" if emulated else "")
        say(
            f"Comparing {metadata.precision} with {candidate.compared_with} on {pictures.description} in batches of "
            f"{_listed(BATCHES)}"
        )
        outputs = in_batches(session.run, reference.images, Outputs.concatenate)
        comparison = compare_outputs(reference, outputs, metadata, gate)
        if not comparison and candidate.rounding is not None:
            rounding = candidate.rounding()
            gate = gate.widened_by(rounding)
            comparison = compare_outputs(reference, outputs, metadata, gate)
        if comparison and emulated:
            verify_test_vectors(session, "the graph with emulated rounding")
    report = {
        "reference": candidate.compared_with,
        "candidate": how,
        "pictures": pictures.description,
        "batches": list(BATCHES),
        "gate": asdict(gate),
        **({} if rounding is None else {"rounding": asdict(rounding)}),
        **comparison.to_dict(),
        "worst_picture": pictures.names[comparison.worst],
    }
    return VerificationReport(comparison, report)


def verification_error(candidate: ExportCandidate, examination: VerificationReport, name: str) -> VerificationError:
    """Why a candidate gets no file, with the worst picture and the worst layer, and what to try."""
    comparison, pictures = examination.comparison, candidate.pictures
    layer = _blamed(candidate, candidate.reference.images[comparison.worst])
    return VerificationError(
        f"{name} was not written: {'; '.join(comparison.failures)} (against {candidate.compared_with}, on "
        f"{pictures.description}); worst on {pictures.names[comparison.worst]}{layer}"
        f"{_ADVICE[candidate.metadata.precision]}"
    )


def _blamed(candidate: ExportCandidate, picture: Pixels) -> str:
    if candidate.baseline is None:
        return ""
    emulated = candidate.metadata.precision in _EMULATED
    model = simulate_low_precision(candidate.model) if emulated else candidate.model
    return f", {worst_layer(candidate.baseline, model, picture, candidate.metadata)}"


_ADVICE: dict[Precision, str] = {
    "fp32": "",
    "fp16": "; try --pictures with photographs such as the model will see, or --precision fp32",
    "bf16": "; try --precision fp16, or fp32",
    "int8": "; calibrate on more photographs such as the model will see (--calibrate), or use fp16",
}


def write_model(model: onnx.ModelProto, metadata: Metadata, path: Path) -> None:
    """A graph with our metadata, as a file.

    Raises:
        ArtifactError: it is over ONNX's 2 GB.
    """
    del model.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, metadata.to_json()
    model.producer_name, model.producer_version = "opal-deploy", __version__
    try:
        path.write_bytes(model.SerializeToString())
    except ValueError as error:  # protobuf's limit
        raise ArtifactError(
            f"the model is over ONNX's 2 GB ({error}); use a smaller backbone or fewer classes"
        ) from None


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"


# layers with weights, and what adds up their errors
_LAYERS = ("Conv", "MatMul", "Gemm", "LayerNormalization", "Add")
# of one layer's values: a relative error of values that are all nearly zero says nothing
_FLOOR = 1e-6


def worst_layer(
    baseline: onnx.ModelProto, candidate: onnx.ModelProto, picture: NDArray[np.uint8], metadata: Metadata
) -> str:
    """A clause that names the layer of largest relative error (RMS) on one picture, or the first that overflows.

    Args:
        baseline: the float32 graph.
        candidate: made from it, with the same names for the same values, float32 between its layers.
        picture: uint8 [H0, W0, 3].
        metadata: of the model, for its kind of input.
    """
    body = nodes_between(baseline.graph, body_input(baseline.graph), BODY_OUTPUT)
    kept = {name for node in candidate.graph.node for name in node.output}
    layers = {
        node.output[0]: node
        for node in baseline.graph.node
        if node.output[0] in body and node.op_type in _LAYERS and node.output[0] in kept
    }
    names = list(layers)
    batch = picture[None]
    feed: Any = normalise(batch, metadata.mean, metadata.std) if metadata.input_kind == "float32" else batch
    expected, found = (_values(model, names, feed) for model in (baseline, candidate))
    worst, largest = "", -1.0
    for name, before, after in zip(names, expected, found, strict=True):
        title = f"{layers[name].op_type} {_title(layers[name])}"
        if not np.isfinite(after).all():
            return f"where {title} is the first layer to overflow (its values reach {np.abs(before).max():.3g})"
        scale = float(np.sqrt(np.mean(np.square(before, dtype=np.float64))))
        error = float(np.sqrt(np.mean(np.square(before - after, dtype=np.float64)))) / max(scale, _FLOOR)
        if error > largest:
            worst, largest = title, error
    return f"where {worst} is furthest off ({100 * largest:.2g} %)"


def _values(model: onnx.ModelProto, names: list[str], feed: Any) -> list[NDArray[np.float32]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        with_outputs(model, names).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(names, {"images": feed}))


def _title(node: onnx.NodeProto) -> str:
    """The weight's name, which people know from their network, or the value's."""
    weights = [str(name) for name in node.input[1:] if name.endswith(".weight")]
    return weights[0].removeprefix("network.") if weights else str(node.output[0])
