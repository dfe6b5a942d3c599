"""Exported ONNX files as sources of another export, which needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.metadata import Metadata, Precision, check_all_outputs
from opal_deploy.artifact.outputs import FloatArray
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportCandidate, SampledReference
from opal_deploy.export.graph_edit import producers, with_outputs
from opal_deploy.export.images import SAMPLE_SIZES, Pixels, choose_images
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.portable import from_file_opset
from opal_deploy.logs import WarningLine
from opal_deploy.runtime.onnx_session import OnnxSession, prepare_input
from opal_deploy.runtime.verification import verify_test_vectors


@dataclass(frozen=True)
class OnnxSource:
    """An exported ONNX file; the reference is the file itself in ONNX Runtime on the CPU.

    Every member but `path` raises ArtifactError for another or a damaged file.
    """

    path: Path

    @cached_property
    def metadata(self) -> Metadata:
        """The file's metadata."""
        return onnx_file.read_metadata(self.path)

    @property
    def onnx_precision(self) -> Precision:
        """The file's precision."""
        return self.metadata.precision

    @property
    def origin(self) -> Metadata:
        """The file's metadata."""
        return self.metadata

    def build_candidate(self, precisions: Collection[Precision], options: ExportOptions) -> ExportCandidate:
        """Return the file's graph, with the file's outputs as reference; see `ExportSource`.

        Raises:
            UsageError: the file is not float32, one of the precisions is, or the options change inputs or outputs.
            VerificationError: the file does not reproduce its own test vectors here.
        """
        if "fp32" in precisions:
            if self.onnx_precision == "fp32":
                raise UsageError(f"{self.path}: already fp32; choose --precision fp16, bf16 or int8, or --trt")
            raise UsageError(
                f"{self.path}: is {self.onnx_precision}, and what was rounded away is lost; export the checkpoint"
            )
        if self.onnx_precision != "fp32":
            raise UsageError(f"{self.path}: already {self.onnx_precision}; give the fp32 file or the checkpoint")
        self._check_interface(options)
        # the reference is all of the file's outputs
        check_all_outputs(self.metadata, str(self.path), "another precision of it")
        session = self._verify_vectors(options)
        choice = choose_images(
            self.metadata, options, calibrate="int8" in precisions, torchvision=False, model=self.path
        )
        model = from_file_opset(onnx.load(self.path))
        sample = SampledReference(choice.verification, reference_runner(model, session))
        images, reference = sample.first(SAMPLE_SIZES[0])
        doubt = self.metadata.unverified
        return ExportCandidate(
            model,
            self.metadata,
            reference,
            images,
            reference_name=f"{self.path.name} in {session.description}",
            test_vectors=test_vectors.unpack(self.metadata.test_vectors, str(self.path)),
            more=sample.first,
            calibration=choice.calibration,
            unverified=f"made from {self.path.name}, which was {doubt}" if doubt else "",
        )

    def verify(self, options: ExportOptions) -> None:
        """Check the file before engines are built from it as it is.

        Raises:
            ArtifactError: the file is damaged.
            UsageError: the options change inputs or outputs, or name images that nothing is verified on.
            VerificationError: the file does not reproduce its own test vectors here.
        """
        onnx_file.check_digest(self.path, self.metadata)
        self._check_interface(options)
        if options.listed_classes not in (None, self.metadata.top_k):
            raise UsageError(
                f"{self.path}: already {self.onnx_precision}, so it is built as it is; for --outputs topk give the "
                "fp32 file or the checkpoint"
            )
        if options.images is not None or options.calibrate is not None:
            raise UsageError(
                f"{self.path}: already {self.onnx_precision}, so it is built as it is: nothing to verify or "
                "calibrate on images; leave out --images and --calibrate"
            )
        if self.metadata.unverified:
            options.log(WarningLine(f"NOT VERIFIED: {self.path.name} was {self.metadata.unverified}"))
        # ONNX Runtime has no bfloat16 convolutions
        if options.verify and self.onnx_precision != "bf16":
            self._verify_vectors(options)

    def _check_interface(self, options: ExportOptions) -> None:
        removed = not options.ood_score and self.metadata.has_output("ood_score")
        own = self.metadata.input_kind
        other_input = options.input != own and (own, options.input) != ("uint8", "image")
        if options.attention or removed or other_input:
            raise UsageError(f"{self.path}: inputs and outputs are fixed in an ONNX file; export the checkpoint again")

    def _verify_vectors(self, options: ExportOptions) -> OnnxSession:
        options.log(f"Checking {self.path.name} against its own test vectors")
        session = OnnxSession(self.path, device="cpu", threads=options.threads)
        verify_test_vectors(session, str(self.path))
        return session


def reference_runner(model: onnx.ModelProto, session: OnnxSession) -> Callable[[Pixels], Reference]:
    """Return a function from uint8 [n, H0, W0, 3] to the reference that a graph is in ONNX Runtime.

    `session` runs the graph `model`.
    """
    find_margin = _margin_finder(model, session)

    def run(pixels: Pixels) -> Reference:
        return Reference(pixels, session.run(pixels), None if find_margin is None else find_margin(pixels))

    return run


def _margin_finder(model: onnx.ModelProto, session: OnnxSession) -> Callable[[Pixels], FloatArray] | None:
    """Return a function from uint8 [n, H0, W0, 3] to `Reference.top2_margin`, float32 [n, K]; None without cells."""
    if "argmax" not in session.metadata.outputs:
        return None
    attention = with_outputs(model, [_find_attention(model.graph)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = session.threads, 1
    runner = onnxruntime.InferenceSession(attention.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def find(pixels: Pixels) -> FloatArray:
        (cells,) = runner.run(None, {"images": prepare_input(pixels, session.metadata)})
        return _relative_margin(cells.reshape(*cells.shape[:2], -1))

    return find


def _find_attention(graph: onnx.GraphProto) -> str:
    """Return the name of the attention [N, K, H * W] that a graph's output `argmax` is found in.

    A graph may compare it with its maximum (Equal) instead of using ArgMax.
    """
    made_by = producers(graph)
    node = made_by["argmax"]
    while node.op_type not in ("ArgMax", "Equal"):
        node = made_by[node.input[0]]
    return str(node.input[0])


def _relative_margin(cells: NDArray[Any]) -> FloatArray:
    if cells.shape[2] < 2:
        return np.full(cells.shape[:2], np.inf, np.float32)
    best = np.partition(cells, (-2, -1), axis=2)[..., -2:]  # [N, K, 2]
    margin: NDArray[Any] = (best[..., 1] - best[..., 0]) / np.maximum(np.abs(best[..., 1]), 1e-30)
    return margin.astype(np.float32)
