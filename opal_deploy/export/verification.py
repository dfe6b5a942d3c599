"""The gate that a graph passes before it becomes a file (docs/precision.md), and the error for one that fails."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import TOP_OUTPUTS, Metadata, Precision
from opal_deploy.artifact.outputs import Outputs, select_top
from opal_deploy.errors import VerificationError
from opal_deploy.export.candidate import ExportCandidate
from opal_deploy.export.images import BATCHES, SAMPLE_SIZES, run_in_batches
from opal_deploy.export.onnx_source import reference_runner
from opal_deploy.export.precision import simulate_low_precision
from opal_deploy.export.resizing import RESIZING_GATE, compare_resizing
from opal_deploy.logs import Log, log_line
from opal_deploy.runtime.gates import GATES
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import Comparison, compare_outputs, verify_test_vectors

_ADVICE: dict[Precision, str] = {
    "fp32": "",
    "fp16": "; try --images with photographs such as the model will see, or --precision fp32",
    "bf16": "; try --precision fp16, or fp32",
    "int8": "; calibrate on more photographs such as the model will see (--calibrate), or use fp16",
}
# confidence of each bound of a share: three samples are tested, and together they refuse wrongly in at most 5 %
_CONFIDENCE = 1 - 0.05 / len(SAMPLE_SIZES)
_NORM_TOLERANCE = 1e-6
# enough to see a fault
_FLOAT64_IMAGES = 8


def verify_candidate(
    candidate: ExportCandidate, path: Path, threads: int | None = None, log: Log = log_line
) -> tuple[Comparison, dict[str, Any]]:
    """Run a candidate's graph on its images and compare the outputs with its reference.

    Returns the comparison and the metadata's `verification`.

    The candidate has the metadata, test vectors included, that its file `path` is to have, next to which
    the graph lies while it runs.

    Raises:
        VerificationError: an output is beyond the gate, or a simulated graph does not reproduce its test vectors.
    """
    metadata, sample = candidate.metadata, candidate.sample
    images, reference = sample.first(SAMPLE_SIZES[0])
    first_images = images
    # ONNX Runtime's CPU provider runs these in float32, or not at all: see `simulate_low_precision`
    simulated = metadata.precision in ("fp16", "bf16")
    model = simulate_low_precision(candidate.model) if simulated else candidate.model
    gate, in_float64, resizing = GATES[metadata.precision], None, None
    with atomic_write(path, keep=False) as temporary:
        onnx_file.write_model(model, metadata, temporary)
        session = OnnxSession(temporary, device="cpu", threads=threads, check_digest=False)
        batches = f"{', '.join(map(str, BATCHES[:-1]))} and {BATCHES[-1]}"
        name = candidate.reference_name
        log(f"Comparing {metadata.precision} with {name} on {images.description} in batches of {batches}")
        outputs = run_in_batches(session.run, reference.images, Outputs.concatenate)
        comparison = compare_outputs(reference, outputs, metadata, gate, _CONFIDENCE)
        if not comparison and candidate.compare_in_float64 is not None:
            # float64 is slow. The furthest image has the largest error of float32, which the gate is widened by
            rows = sorted(range(len(images.names)), key=lambda row: row != comparison.worst)[:_FLOAT64_IMAGES]
            in_float64 = candidate.compare_in_float64(candidate.model, images.pixels[rows])
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
            if not comparison or agreement is None or agreement.shown:
                break
            images, reference = sample.first(size)
            if len(images.names) == seen:
                break
            log(f"Inconclusive after {comparison.block_cells} cells; adding more: {images.description}")
            added = run_in_batches(session.run, reference.images[seen:], Outputs.concatenate)
            outputs = Outputs.concatenate([outputs, added])
            comparison = compare_outputs(reference, outputs, metadata, share_gate, _CONFIDENCE)
        if comparison and metadata.top_k is not None:
            comparison = replace(comparison, failures=_find_selection_errors(outputs, metadata))
        if comparison and metadata.input_kind == "image":
            log(f"Comparing the graph's resizing with Pillow's on {first_images.description}, in their own sizes")
            originals = map(sample.pool.read_original, range(len(first_images.names)))
            resizing = compare_resizing(session, originals, reference_runner(model, session))
            problems = [f"resized in the graph, {failure}" for failure in resizing.failures]
            comparison = replace(comparison, failures=(*comparison.failures, *problems))
        if comparison and simulated:
            verify_test_vectors(session, "the graph with emulated rounding")
    document: dict[str, Any] = {
        "reference": candidate.reference_name,
        "candidate": session.description + (" emulated: rounded after every operation" if simulated else ""),
        "image_set": images.description,
        "batches": list(BATCHES),
        "gate": gate.to_dict(),
    }
    if resizing is not None:
        document["resizing"] = {**resizing.to_dict(), "gate": RESIZING_GATE.to_dict()}
    if in_float64 is not None:
        document["float64"] = {name: asdict(part) for name, part in in_float64._asdict().items()}
    document |= {**comparison.to_dict(), "worst_image": Path(images.names[comparison.worst]).name}
    if not comparison:
        raise VerificationError(
            f"{path.name} was not written: {'; '.join(comparison.failures)} (against {candidate.reference_name}, on "
            f"{images.description}); worst on {document['worst_image']}{_ADVICE[metadata.precision]}"
        )
    return comparison, document


def _find_selection_errors(outputs: Outputs, metadata: Metadata) -> tuple[str, ...]:
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
