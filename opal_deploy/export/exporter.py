"""The export itself: a source to ONNX files and engines, none of which gets its name before all have passed.

A file that the same source and options gave is kept: the ONNX bytes would be the same, and engines need not be built
again. Any other file in the way is replaced only on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnxruntime

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.files import ONNX_SUFFIX, atomic_write, remove_temporary_files
from opal_deploy.artifact.metadata import BLANK_DIGEST, Metadata, Precision
from opal_deploy.errors import ArtifactError, UsageError, VerificationError
from opal_deploy.export.candidate import (
    ExportCandidate,
    convert_precision,
    drop_other_outputs,
    refine_precision,
    with_image_input,
    with_top_classes,
)
from opal_deploy.export.engine import stage_engines
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.plan import ExportedEngine, ExportedOnnx, ExportPlan, ExportResult
from opal_deploy.export.portable import opset_of, to_file_opset
from opal_deploy.export.verification import verify_candidate
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_file, verify_test_vectors


class StagedOnnx(NamedTuple):
    """An ONNX file that passed its gate and still has a temporary name."""

    exported: ExportedOnnx
    temporary: Path


def export(plan: ExportPlan) -> ExportResult:
    """Write ONNX files and engines: all of them, or none if one fails.

    Every ONNX file is compared with the source's reference on the same images (docs/precision.md).

    Raises:
        ArtifactError: an ONNX source is damaged, a weight is beyond a precision's range, or TensorRT's parser refuses a
            graph.
        VerificationError: a file does not reproduce its reference, or an engine its test vectors.
        UsageError: another file is in the way, the builder fails, or a file cannot be written.
    """
    source, options = plan.source, plan.options
    with ExitStack() as stack:
        kept = _find_kept_files(plan)
        missing = [precision for precision in plan.onnx if precision not in kept]
        candidate = source.build_candidate(missing, options) if missing else None
        staged: list[StagedOnnx] = []
        for precision, path in plan.onnx.items():
            if candidate is None or precision in kept:
                staged.append(StagedOnnx(ExportedOnnx(path, kept[precision], None, kept=True), path))
            else:
                converted = convert_precision(candidate, precision, options)
                staged.append(_stage_first_to_pass(stack, converted, path, options))
        if not plan.onnx:
            verify_file(source.path, verify=options.verify, threads=options.threads, log=options.log)
        engines: list[ExportedEngine] = []
        if plan.engines is not None:
            file, name = source.path, source.path.name
            if staged:
                file, name = staged[-1].temporary, staged[-1].exported.path.name
            engines = stack.enter_context(stage_engines(file, name, plan.engines, options))
    return ExportResult(source.path, [file.exported for file in staged], engines)


def _stage_first_to_pass(
    stack: ExitStack, candidate: ExportCandidate, path: Path, options: ExportOptions
) -> StagedOnnx:
    """Stage a candidate, or the first of its refinements that passes its gate; if none does, raise the last error."""
    refused, listed = VerificationError(""), options.listed_classes
    for number, attempt in enumerate(refine_precision(candidate, options.threads)):
        if number:
            options.log(f"Refused: {refused}")
            options.log(f"Trying again, quantised: {attempt.metadata.exporter['quantised']}")
        try:
            selected = attempt if listed is None else with_top_classes(attempt, listed)
            if options.input == "image":
                selected = with_image_input(selected)
            selected = replace(selected, model=to_file_opset(selected.model))
            return stack.enter_context(stage_onnx(selected, path, options))
        except VerificationError as error:
            refused = error
    raise refused


@contextmanager
def stage_onnx(candidate: ExportCandidate, path: Path, options: ExportOptions) -> Iterator[StagedOnnx]:
    """Write a verified ONNX file under a temporary name; it gets its name when the block ends without an error.

    Raises:
        VerificationError: the candidate does not reproduce its reference; nothing is left behind.
        UsageError: the file cannot be written.
    """
    if path.suffix != ONNX_SUFFIX:
        raise UsageError(f"{path}: expected a name that ends in {ONNX_SUFFIX}")
    metadata = replace(
        candidate.metadata,
        test_vectors=test_vectors.pack(candidate.test_vectors),
        exporter=_describe_exporter(candidate, options),
        verification={} if options.verify else {"skipped": "exported with --no-verify"},
        file_sha256=BLANK_DIGEST,
    )
    with atomic_write(path, replace=options.overwrite) as temporary:
        comparison = None
        if options.verify:
            described = replace(candidate, metadata=metadata)
            comparison, report = verify_candidate(described, path, options.threads, options.log)
            doubt = {"skipped": candidate.unverified} if candidate.unverified else {}
            metadata = replace(metadata, verification={**report, **doubt})
        described = replace(candidate, metadata=metadata)
        if metadata.top_k is not None:
            described = drop_other_outputs(described)
        metadata = described.metadata
        onnx_file.write_model(described.model, metadata, temporary)
        digest = onnx_file.embed_digest(temporary)
        if options.verify and metadata.precision != "bf16":
            # the very bytes that are about to get the name: digest, metadata and test vectors
            try:
                verify_test_vectors(OnnxSession(temporary, device="cpu", threads=options.threads), path.name)
            except VerificationError as error:
                raise VerificationError(f"{path.name} was not written: {error}") from None
        yield StagedOnnx(ExportedOnnx(path, replace(metadata, file_sha256=digest), comparison), temporary)


def _describe_exporter(candidate: ExportCandidate, options: ExportOptions) -> dict[str, Any]:
    # the folders of an ONNX source were named for that file
    inherited = {k: v for k, v in candidate.metadata.exporter.items() if k not in ("images", "calibrate")}
    folders = {"images": options.images, "calibrate": options.calibrate}
    return {
        **inherited,
        "opal_deploy": __version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "opset": opset_of(candidate.model),
        "ir_version": candidate.model.ir_version,
        **{name: str(folder) for name, folder in folders.items() if folder is not None},
    }


def _find_kept_files(plan: ExportPlan) -> dict[Precision, Metadata]:
    """Return the metadata of ONNX files that exist as this export would write them; UsageError for any other file."""
    for path in plan.onnx.values():
        remove_temporary_files(path)
    kept = {}
    for precision, path in plan.onnx.items():
        if plan.options.overwrite or not path.exists():
            continue
        try:
            metadata = onnx_file.read_metadata(path)
            onnx_file.check_digest(path, metadata)
        except ArtifactError:
            raise _in_the_way(path, "not an exported file, or a damaged one") from None
        existing, requested = _describe_file(metadata), _describe_request(plan, precision)
        if requested["checkpoint"] is None or existing != requested:
            others = ", ".join(name for name in existing if existing[name] != requested[name])
            raise _in_the_way(path, f"of {metadata.checkpoint_name}, exported with other {others or 'weights'}")
        kept[precision] = metadata
    return kept


def _in_the_way(path: Path, what: str) -> UsageError:
    return UsageError(f"{path}: the file exists, {what}; choose another --out, or pass --overwrite to replace it")


def _describe_file(metadata: Metadata) -> dict[str, Any]:
    """Return what a file was made from and how."""
    exporter = metadata.exporter
    return {
        **_describe_origin(metadata),
        "precision": metadata.precision,
        "input": metadata.input_kind,
        "outputs": ["attention" in metadata.outputs, metadata.has_output("ood_score"), metadata.top_k],
        "images": [exporter.get("images"), exporter.get("calibrate")],
        "activations": metadata.int8_activations,
        "verification": not metadata.unverified,
        "versions": [exporter.get(name) for name in ("opal_deploy", "onnx", "onnxruntime")],
    }


def _describe_request(plan: ExportPlan, precision: Precision) -> dict[str, Any]:
    """Return what `_describe_file` does of the file that the plan would write."""
    options, origin = plan.options, plan.source.origin
    return {
        **_describe_origin(origin),
        "precision": precision,
        "input": options.input,
        "outputs": [options.attention, origin.has_output("ood_score"), options.listed_classes],
        "images": [None if path is None else str(path) for path in (options.images, options.calibrate)],
        "activations": options.int8_activations if precision == "int8" else None,
        "verification": options.verify and not origin.unverified,
        "versions": [__version__, onnx.__version__, onnxruntime.__version__],
    }


def _describe_origin(metadata: Metadata) -> dict[str, Any]:
    """Return what a file takes from its checkpoint: digest, assumed settings, class names, PyTorch's version."""
    return {
        "checkpoint": metadata.source.get("sha256"),
        "assumptions": metadata.source.get("assumed"),
        "dropped slots": metadata.head.get("dropped", []),
        "class names": list(metadata.class_names),
        "PyTorch": metadata.exporter.get("torch"),
    }
