"""Dropping slots in an exported ONNX file, which needs no torch.

The reference of the edited graph is the closed form: the parent's outputs in ONNX Runtime, with the scores of dropped
slots set to 0 and the logits that follow (`editing.scores`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx

from opal_deploy.artifact import test_vectors
from opal_deploy.artifact.heads import drop_slots
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportCandidate, SampledReference
from opal_deploy.export.exporter import stage_onnx
from opal_deploy.export.graph_edit import with_class_map
from opal_deploy.export.images import choose_images
from opal_deploy.export.onnx_source import reference_runner
from opal_deploy.export.options import ExportOptions
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_test_vectors


def write_edited_onnx(path: Path, edited: Metadata, out: Path, options: ExportOptions) -> None:
    """Write the ONNX file `path` with the slots of `edited`, its new metadata, verified against the closed form.

    Raises:
        ArtifactError: the file is damaged, or another version exported it.
        UsageError: ONNX Runtime does not run its precision, or `out` cannot be written.
        VerificationError: the file does not reproduce its test vectors, or the edited graph the closed form.
    """
    if edited.precision == "bf16":
        raise UsageError(f"{path}: ONNX Runtime has no bfloat16 convolutions; edit the fp32 file, and convert it again")
    session = OnnxSession(path, device="cpu", threads=options.threads)
    verify_test_vectors(session, str(path))
    model = onnx.load(path)
    answer = reference_runner(model, session)

    def drop(reference: Reference) -> Reference:
        return replace(reference, outputs=drop_slots(reference.outputs, edited))

    choice = choose_images(edited, options, calibrate=False, torchvision=False)
    vectors = test_vectors.unpack(edited.test_vectors, str(path))
    candidate = ExportCandidate(
        with_class_map(model, edited),
        edited,
        SampledReference(choice.verification, lambda pixels: drop(answer(pixels))),
        reference_name=f"{path.name} in {session.description}, slots dropped in closed form",
        test_vectors=drop(vectors),
        unverified=f"made from {path.name}, which was {edited.unverified}" if edited.unverified else "",
    )
    with stage_onnx(candidate, out, options):
        pass
