"""Checkpoints as sources of an export: the only path of the exporter that needs torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from opal_deploy.artifact.metadata import Metadata, Precision
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.export.candidate import ExportCandidate, SampledReference
from opal_deploy.export.graph import ExportGraph, trace
from opal_deploy.export.images import SAMPLE_SIZES, choose_images, run_in_batches
from opal_deploy.export.options import ExportOptions, Report, no_report
from opal_deploy.model.checkpoint import Checkpoint, build_metadata
from opal_deploy.runtime.gates import Rounding
from opal_deploy.runtime.torch_session import TorchSession
from opal_deploy.synthetic import test_vector_images


@dataclass(frozen=True)
class CheckpointSource:
    """A loaded checkpoint with its path; the reference is PyTorch in float32 on the CPU."""

    checkpoint: Checkpoint
    path: Path

    @property
    def onnx_precision(self) -> None:
        """None: the source is no ONNX file."""
        return None

    @cached_property
    def origin(self) -> Metadata:
        """The checkpoint's metadata, with the version of PyTorch that exports it."""
        return replace(build_metadata(self.checkpoint), exporter={"torch": torch.__version__})

    def build_candidate(
        self, precisions: Collection[Precision], options: ExportOptions, report: Report = no_report
    ) -> ExportCandidate:
        """Trace the network and run it on the verification images and the test vectors; see `ExportSource`.

        Raises:
            UsageError: the network is over ONNX's 2 GB, or too few images to verify on or to calibrate with.
        """
        description = self.origin
        report(f"Tracing {description.backbone}, {description.num_classes} classes")
        graph = ExportGraph(
            self.checkpoint.network,
            options.input_kind,
            description.mean,
            description.std,
            attention=options.attention,
        )
        model = trace(graph)
        metadata = replace(
            description,
            input_kind=options.input_kind,
            outputs=graph.output_names,
        )
        session = TorchSession(self.checkpoint, device="cpu")
        choice = choose_images(metadata, options, calibrate="int8" in precisions, report=report)
        sample = SampledReference(choice.verification, session.run_reference)
        images, reference = sample.first(SAMPLE_SIZES[0])

        def measure_rounding() -> Rounding:
            report("Measuring how far PyTorch's own outputs move in another order of summation and in float64")
            others = [
                run_in_batches(run, images.pixels, Outputs.concatenate)
                for run in (session.run_channels_last, session.run_float64)
            ]
            return Rounding.between(reference.outputs, others, metadata)

        return ExportCandidate(
            model,
            metadata,
            reference,
            images,
            reference_name=session.description,
            test_vectors=_halve_margin(session.run_reference(test_vector_images(*metadata.input_size))),
            more=sample.first,
            calibration=choice.calibration,
            measure_rounding=measure_rounding,
        )


def _halve_margin(reference: Reference) -> Reference:
    # the margin only tells which cells are tied: float16 is enough for it in the file
    if reference.top2_margin is None:
        return reference
    return replace(reference, top2_margin=reference.top2_margin.astype(np.float16))
