"""Exported ONNX files as sources of another export, which needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.metadata import Metadata, Precision
from opal_deploy.artifact.test_vectors import Reference, find_top2_margin
from opal_deploy.export.candidate import ExportCandidate, SampledReference
from opal_deploy.export.graph_edit import producers, with_outputs
from opal_deploy.export.images import Pixels, choose_images
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.portable import from_file_opset
from opal_deploy.runtime.onnx_session import CPU, OnnxSession, prepare_input, session_options
from opal_deploy.runtime.verification import verify_test_vectors


@dataclass(frozen=True)
class OnnxSource:
    """An exported ONNX file; the reference is the file itself in ONNX Runtime on the CPU.

    Every member but `path` raises ArtifactError for another or a damaged file.
    """

    path: Path

    @cached_property
    def origin(self) -> Metadata:
        """The file's metadata."""
        metadata = onnx_file.read_metadata(self.path)
        onnx_file.check_digest(self.path, metadata)
        return metadata

    @property
    def onnx_precision(self) -> Precision:
        """The file's precision."""
        return self.origin.precision

    def build_candidate(self, precisions: Collection[Precision], options: ExportOptions) -> ExportCandidate:
        """Return the file's float32 graph with the file's outputs as reference; see `CheckpointSource`.

        Raises:
            UsageError: too few images to verify on or to calibrate with.
            VerificationError: the file does not reproduce its own test vectors.
        """
        options.log(f"Checking {self.path.name} against its own test vectors")
        session = OnnxSession(self.path, device="cpu", threads=options.threads)
        verify_test_vectors(session, str(self.path))
        choice = choose_images(self.origin, options, calibrate="int8" in precisions, torchvision=False, model=self.path)
        model = from_file_opset(onnx.load(self.path))
        # types that a tool which simplified the graph noted, and that another precision changes
        del model.graph.value_info[:]
        doubt = self.origin.unverified
        return ExportCandidate(
            model,
            self.origin,
            SampledReference(choice.verification, reference_runner(model, session)),
            reference_name=f"{self.path.name} in {session.description}",
            test_vectors=test_vectors.unpack(self.origin.test_vectors, str(self.path)),
            calibration=choice.calibration,
            unverified=f"made from {self.path.name}, which was {doubt}" if doubt else "",
        )


def reference_runner(model: onnx.ModelProto, session: OnnxSession) -> Callable[[Pixels], Reference]:
    """Return a function from uint8 [n, H0, W0, 3] to the reference that a graph is in ONNX Runtime.

    `session` runs the graph `model`. The reference has leads of the best cells where the graph outputs cells.
    """
    runner: Any = None
    if "argmax" in session.metadata.outputs:
        attention = with_outputs(model, [_find_attention(model.graph)])
        options = session_options(session.threads)
        runner = onnxruntime.InferenceSession(attention.SerializeToString(), options, providers=[CPU])

    def run(pixels: Pixels) -> Reference:
        outputs, margin = session.run(pixels), None
        if runner is not None:
            (cells,) = runner.run(None, {"images": prepare_input(pixels, session.metadata)})
            margin = find_top2_margin(cells.reshape(*cells.shape[:2], -1))
        return Reference(pixels, outputs, margin)

    return run


def _find_attention(graph: onnx.GraphProto) -> str:
    """Return the name of the attention [N, K, H * W] that a graph's output `argmax` is found in."""
    made_by = producers(graph)
    node = made_by["argmax"]
    while node.op_type != "ArgMax":
        node = made_by[node.input[0]]
    return str(node.input[0])
