"""From a checkpoint to a verified ONNX file: the part of the exporter that needs torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.export.candidate import ExportCandidate, ExportOptions, Say, choose_images, in_precision
from opal_deploy.export.graph import ExportGraph, trace
from opal_deploy.export.images import VerificationImages, in_batches, test_vector_images
from opal_deploy.export.onnx_export import ExportedModel, file_name, write_verified
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.runtime.verification import Rounding


def export_checkpoint(
    checkpoint: Checkpoint, source: Path, options: ExportOptions, say: Say = lambda _: None
) -> ExportedModel:
    """Trace, verify against PyTorch, write.

    Args:
        checkpoint: as loaded.
        source: its path; the file goes beside it unless `options.out` says otherwise.

    Raises:
        VerificationError: the graph does not reproduce PyTorch's outputs; nothing was written.
        UsageError: over ONNX's 2 GB, or the place cannot be written to.
    """
    candidate, calibration = build_candidate(checkpoint, options, say)
    candidate = in_precision(candidate, options.precision, calibration, say)
    out = options.out or file_name(source, options.precision)
    return write_verified(candidate, out, say, options.threads, verify=options.verify)


def build_candidate(
    checkpoint: Checkpoint, options: ExportOptions, say: Say = lambda _: None
) -> tuple[ExportCandidate, VerificationImages | None]:
    """The traced float32 graph together with what PyTorch answers for the verification pictures and the test vectors.

    Also what `options.precision` is to be calibrated with.
    """
    described = build_metadata(checkpoint)
    say(f"Tracing {described.backbone}, {described.num_classes} classes")
    graph = ExportGraph(
        checkpoint.network, options.input_kind, described.mean, described.std, attention=options.attention
    )
    model = trace(graph)
    metadata = replace(
        described,
        input_kind=options.input_kind,
        outputs=graph.output_names,
        exporter={"torch": torch.__version__},
    )
    session = TorchSession(checkpoint, device="cpu")
    pictures, calibration = choose_images(options, metadata)
    reference = in_batches(session.run_reference, pictures.pixels, join_references)
    vectors = _storable(session.run_reference(test_vector_images(metadata)))

    def rounding() -> Rounding:
        say("Measuring how far PyTorch's own answers move when its convolutions sum in another order")
        other = in_batches(session.run_channels_last, pictures.pixels, Outputs.concatenate)
        return Rounding.between(reference.outputs, other, metadata)

    return ExportCandidate(model, metadata, reference, pictures, session.description, vectors, rounding), calibration


def join_references(parts: list[Reference]) -> Reference:
    """One reference for the pictures of several."""
    gaps = [part.top2_margin for part in parts if part.top2_margin is not None]
    return Reference(
        np.concatenate([part.images for part in parts]),
        Outputs.concatenate([part.outputs for part in parts]),
        np.concatenate(gaps) if gaps else None,
    )


def _storable(reference: Reference) -> Reference:
    """The gap only says which cells are tied: half its digits are enough in the file."""
    if reference.top2_margin is None:
        return reference
    return replace(reference, top2_margin=reference.top2_margin.astype(np.float16))
