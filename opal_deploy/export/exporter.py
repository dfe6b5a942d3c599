"""The export itself: a source to ONNX files and engines, none of which gets its name before all have passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.files import ONNX_SUFFIX, atomic_write
from opal_deploy.artifact.metadata import BLANK_DIGEST
from opal_deploy.errors import UsageError, VerificationError
from opal_deploy.export.candidate import ExportCandidate, ExportSource, convert_precision, refine_precision
from opal_deploy.export.existing import describe_options, find_kept_files
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import ExportOptions, ExportTargets, Report, no_report
from opal_deploy.export.result import ExportedOnnx, ExportResult
from opal_deploy.export.tensorrt.engine import ExportedEngine, stage_engines
from opal_deploy.export.top_classes import drop_other_outputs, with_top_classes
from opal_deploy.export.verification import verification_error, verify_candidate
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_test_vectors

NOT_VERIFIED = "exported with --no-verify"


@dataclass(frozen=True)
class StagedOnnx:
    """An ONNX file that has passed its gate and still lies under a temporary name."""

    exported: ExportedOnnx
    temporary: Path


def export(
    source: ExportSource,
    targets: ExportTargets,
    options: ExportOptions | None = None,
    report: Report = no_report,
) -> ExportResult:
    """Write ONNX files and engines; all of them, or none if one fails.

    Every ONNX file is compared with the source's reference on the same images (docs/precision.md).

    Args:
        source: a `CheckpointSource` or an `OnnxSource`.
        targets: the files to write; see `plan_targets`.
        options: how ONNX files are made and verified; None for the defaults.
        report: receives progress messages.

    Raises:
        ArtifactError: an ONNX source is not ours or damaged, a weight is beyond a precision's range, or TensorRT's
            parser refuses a graph.
        VerificationError: a file does not reproduce its reference, or an engine its test vectors.
        UsageError: an option does not fit the source, another file is in the way, the builder fails, or a file cannot
            be written.
    """
    options = options or ExportOptions()
    with ExitStack() as stack:
        staged: list[StagedOnnx] = []
        kept = find_kept_files(source, targets, options)
        if targets.onnx:
            missing = [precision for precision in targets.onnx if precision not in kept]
            candidate = source.build_candidate(missing, options, report) if missing else None
            for precision, path in targets.onnx.items():
                if candidate is None or precision in kept:
                    staged.append(StagedOnnx(ExportedOnnx(path, kept[precision], None, kept=True), path))
                    continue
                converted = convert_precision(candidate, precision, report)
                staged.append(_stage_first_to_pass(stack, converted, path, options, report))
            built_from, name = staged[-1].temporary, staged[-1].exported.path.name
        elif isinstance(source, OnnxSource):
            source.verify(options, report)
            built_from, name = source.path, source.path.name
        else:
            raise ValueError("a checkpoint is exported to ONNX files, and engines are built from these")
        engines: list[ExportedEngine] = []
        if targets.engines is not None:
            engines = stack.enter_context(stage_engines(built_from, name, targets.engines, report))
    return ExportResult(source.path, [file.exported for file in staged], engines)


def _stage_first_to_pass(
    stack: ExitStack, candidate: ExportCandidate, path: Path, options: ExportOptions, report: Report
) -> StagedOnnx:
    """Stage a candidate, or the first of its refinements that passes its gate.

    Raises:
        VerificationError: none passes; the error is the last one's.
    """
    refused: VerificationError | None = None
    for attempt in refine_precision(candidate):
        if refused is not None:
            report(f"Refused: {refused}")
            report(f"Trying again, quantised: {attempt.metadata.exporter['quantised']}")
        described = attempt if options.top_k is None else with_top_classes(attempt, options.top_k)
        try:
            return stack.enter_context(stage_onnx(described, path, options, report))
        except VerificationError as error:
            refused = error
    assert refused is not None
    raise refused


@contextmanager
def stage_onnx(
    candidate: ExportCandidate, path: Path, options: ExportOptions, report: Report = no_report
) -> Iterator[StagedOnnx]:
    """Write a verified ONNX file under a temporary name; it gets its name when the block ends without an error.

    Raises:
        VerificationError: the candidate does not reproduce its reference; nothing is left behind.
        UsageError: the file cannot be written.
    """
    if path.suffix != ONNX_SUFFIX:
        raise UsageError(f"{path}: an ONNX file's name ends in {ONNX_SUFFIX}")
    metadata = replace(
        candidate.metadata,
        test_vectors=test_vectors.pack(candidate.test_vectors),
        exporter={**_describe_exporter(candidate), **describe_options(options)},
        verification={} if options.verify else {"skipped": NOT_VERIFIED},
        file_sha256=BLANK_DIGEST,
    )
    with atomic_write(path) as temporary:
        comparison = None
        if options.verify:
            described = replace(candidate, metadata=metadata)
            verification = verify_candidate(described, path.parent, options.threads, report)
            comparison = verification.comparison
            if not comparison:
                raise verification_error(verification, path.name)
            doubt = {"skipped": candidate.unverified} if candidate.unverified else {}
            metadata = replace(metadata, verification={**verification.document, **doubt})
        described = replace(candidate, metadata=metadata)
        if metadata.top_k is not None:
            described = drop_other_outputs(described)
        metadata = described.metadata
        onnx_file.write_model(described.model, metadata, temporary)
        digest = onnx_file.embed_digest(temporary)
        if options.verify and metadata.precision != "bf16":
            # the very bytes that are about to get the name: digest, metadata and test vectors
            verify_test_vectors(OnnxSession(temporary, device="cpu", threads=options.threads), path.name)
        yield StagedOnnx(ExportedOnnx(path, replace(metadata, file_sha256=digest), comparison), temporary)


def _describe_exporter(candidate: ExportCandidate) -> dict[str, Any]:
    # of an ONNX source, the folders were named for that file
    inherited = {k: v for k, v in candidate.metadata.exporter.items() if k not in ("pictures", "calibrate")}
    return {
        **inherited,
        "opal_deploy": __version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "opset": max(o.version for o in candidate.model.opset_import if o.domain in ("", "ai.onnx")),
        "ir_version": candidate.model.ir_version,
    }
