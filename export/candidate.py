"""A graph on its way to becoming a file: in which precision, held against which reference, on which pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from opal_deploy.artifact.metadata import InputKind, Metadata, Precision
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.export.graph_edit import producers, with_outputs
from opal_deploy.export.images import BATCHES, Pixels, VerificationImages, choose_verification_images
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.export.quantization import calibration_images, to_int8
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import Rounding

Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportOptions:
    """What a caller may choose.

    Attributes:
        out: the file to write; None: beside the source, by the naming rule.
        input_kind: see Metadata.
        precision: of the body; see Metadata.
        attention: output the attention maps too.
        pictures: a folder of photographs to verify on; None: those of `calibrate` that int8 is not calibrated with,
            else generated creatures.
        threads: of ONNX Runtime while verifying; None: all that the process may use.
        calibrate: a folder of photographs to measure int8's ranges on.
        verify: compare with the reference before a file gets its name.
    """

    out: Path | None = None
    input_kind: InputKind = "uint8"
    precision: Precision = "fp32"
    attention: bool = False
    pictures: Path | None = None
    threads: int | None = None
    calibrate: Path | None = None
    verify: bool = True


@dataclass(frozen=True)
class ExportCandidate:
    """A graph on its way to becoming a file, with the reference that it must reproduce.

    Attributes:
        baseline: the float32 graph that a lower precision was made from.
        unverified: why the reference itself was never verified; the file says so too. Empty if it was.
        rounding: how far the reference moves by itself; asked only where the plain gate fails.
    """

    model: onnx.ModelProto
    metadata: Metadata
    reference: Reference
    pictures: VerificationImages
    compared_with: str
    vectors: Reference = field(repr=False)
    rounding: Callable[[], Rounding] | None = None
    baseline: onnx.ModelProto | None = field(default=None, repr=False)
    unverified: str = ""


def in_precision(
    candidate: ExportCandidate,
    precision: Precision,
    calibration: VerificationImages | None = None,
    say: Say = lambda _: None,
) -> ExportCandidate:
    """The same candidate with its body in a lower precision; it must reproduce the same reference.

    Args:
        candidate: float32.
        precision: fp32 changes nothing.
        calibration: what int8's ranges are measured on.
        say: told what takes long.
    """
    metadata = replace(candidate.metadata, precision=precision)
    if precision == "fp32":
        return candidate
    if precision == "int8":
        if calibration is None:
            raise ValueError("int8 without pictures to calibrate it with")
        say(f"Calibrating int8 on {calibration.description}")
        model = to_int8(candidate.model, calibration.pixels, metadata)
        metadata = replace(metadata, exporter={**metadata.exporter, "calibrated_on": calibration.description})
    else:
        model = to_fp16(candidate.model) if precision == "fp16" else to_bf16(candidate.model)
    return replace(candidate, model=model, metadata=metadata, rounding=None, baseline=candidate.model)


def choose_images(options: ExportOptions, metadata: Metadata) -> tuple[VerificationImages, VerificationImages | None]:
    """What judges an export, and what int8 is calibrated with: never the same pictures."""
    calibration = _calibration(options, metadata)
    return _judges(options, metadata, calibration), calibration


def _calibration(options: ExportOptions, metadata: Metadata) -> VerificationImages | None:
    if options.precision != "int8":
        return None
    # where the same folder has to judge too, a third of it is kept for that
    shared = options.calibrate is not None and (options.pictures or options.calibrate).resolve() == (
        options.calibrate.resolve()
    )
    apart = not options.verify or not shared
    return calibration_images(options.calibrate, metadata, share=1.0 if apart else 2 / 3)


def _judges(options: ExportOptions, metadata: Metadata, calibration: VerificationImages | None) -> VerificationImages:
    used = [Path(name) for name in calibration.names] if calibration is not None else []
    return choose_verification_images(metadata, options.pictures or (options.calibrate if used else None), used)


def top2_margin(model: onnx.ModelProto, session: OnnxSession, pixels: Pixels) -> Any:
    """How far each channel's best cell leads, which a file's own outputs do not tell: float32 [N, K], or None."""
    if "argmax" not in session.metadata.outputs:
        return None
    made_by = producers(model.graph)
    node = made_by["argmax"]
    while node.op_type != "ArgMax":
        node = made_by[node.input[0]]
    maps = with_outputs(model, [node.input[0]])
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = session.threads, 1
    runner = onnxruntime.InferenceSession(maps.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = []
    for start in range(0, len(pixels), BATCHES[-1]):
        (cells,) = runner.run(None, {"images": session.feed(pixels[start : start + BATCHES[-1]])})
        found.append(_lead(cells.reshape(*cells.shape[:2], -1)))
    return np.concatenate(found)


def _lead(cells: Any) -> Any:
    if cells.shape[2] < 2:
        return np.full(cells.shape[:2], np.inf, np.float32)
    best = np.partition(cells, (-2, -1), axis=2)[..., -2:]
    return ((best[..., 1] - best[..., 0]) / np.maximum(np.abs(best[..., 1]), 1e-30)).astype(np.float32)
