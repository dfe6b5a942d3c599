"""The export itself: a source to ONNX files and engines, none of which gets its name before all have passed.

A file that the same source and options gave is kept: the ONNX bytes would be the same, and engines need not be built
again. Any other file in the way is replaced only on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnxruntime

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.engine_file import check_engine
from opal_deploy.artifact.files import ONNX_SUFFIX, atomic_write, is_same_file, remove_temporary_files
from opal_deploy.artifact.metadata import BLANK_DIGEST, Metadata, Precision
from opal_deploy.errors import ArtifactError, UsageError, VerificationError
from opal_deploy.export.candidate import (
    ExportCandidate,
    ExportSource,
    convert_precision,
    drop_other_outputs,
    refine_precision,
    with_image_input,
    with_top_classes,
)
from opal_deploy.export.engine import stage_engines
from opal_deploy.export.files import (
    EngineTargets,
    ExportedEngine,
    ExportedOnnx,
    ExportResult,
    ExportTargets,
    engine_name,
)
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.portable import opset_of, to_file_opset
from opal_deploy.export.verification import verification_error, verify_candidate
from opal_deploy.logs import WarningLine
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import verify_test_vectors, wide_batch

NOT_VERIFIED = "exported with --no-verify"


class StagedOnnx(NamedTuple):
    """An ONNX file that passed its gate and still has a temporary name."""

    exported: ExportedOnnx
    temporary: Path


def export(source: ExportSource, targets: ExportTargets, options: ExportOptions | None = None) -> ExportResult:
    """Write ONNX files and engines: all of them, or none if one fails.

    Every ONNX file is compared with the source's reference on the same images (docs/precision.md).

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
        kept = _find_kept_files(source, targets, options)
        if targets.onnx:
            missing = [precision for precision in targets.onnx if precision not in kept]
            candidate = source.build_candidate(missing, options) if missing else None
            for precision, path in targets.onnx.items():
                if candidate is None or precision in kept:
                    staged.append(StagedOnnx(ExportedOnnx(path, kept[precision], None, kept=True), path))
                    continue
                converted = convert_precision(candidate, precision, options)
                staged.append(_stage_first_to_pass(stack, converted, path, options))
            built_from, name = staged[-1].temporary, staged[-1].exported.path.name
        elif isinstance(source, OnnxSource):
            if source.origin.int8_activations == "uint8":
                raise UsageError(
                    f"{source.path}: made for processors (uint8 activations), which TensorRT does not take; export the "
                    "checkpoint with --trt --precision int8"
                )
            source.verify(options)
            built_from, name = source.path, source.path.name
        else:
            raise ValueError("a checkpoint is exported to ONNX files, and engines are built from these")
        engines: list[ExportedEngine] = []
        if targets.engines is not None:
            engines = stack.enter_context(stage_engines(built_from, name, targets.engines, options))
    return ExportResult(source.path, [file.exported for file in staged], engines)


def _stage_first_to_pass(
    stack: ExitStack, candidate: ExportCandidate, path: Path, options: ExportOptions
) -> StagedOnnx:
    """Stage a candidate, or the first of its refinements that passes its gate; if none does, raise the last error."""
    refused: VerificationError | None = None
    for attempt in refine_precision(candidate, options.threads):
        if refused is not None:
            options.log(f"Refused: {refused}")
            options.log(f"Trying again, quantised: {attempt.metadata.exporter['quantised']}")
        listed = options.listed_classes
        try:
            selected = attempt if listed is None else with_top_classes(attempt, listed)
            if options.input == "image":
                selected = with_image_input(selected)
            selected = replace(selected, model=to_file_opset(selected.model))
            return stack.enter_context(stage_onnx(selected, path, options))
        except VerificationError as error:
            refused = error
    assert refused is not None
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
        verification={} if options.verify else {"skipped": NOT_VERIFIED},
        file_sha256=BLANK_DIGEST,
    )
    with atomic_write(path, replace=options.overwrite) as temporary:
        comparison = None
        if options.verify:
            described = replace(candidate, metadata=metadata)
            verification = verify_candidate(described, path, options.threads, options.log)
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
            try:
                verify_test_vectors(OnnxSession(temporary, device="cpu", threads=options.threads), path.name)
            except VerificationError as error:
                raise VerificationError(f"{path.name} was not written: {error}") from None
        if options.verify and metadata.is_for_openvino and find_spec("openvino") is not None:
            _check_in_openvino(temporary, path.name, options)
        yield StagedOnnx(ExportedOnnx(path, replace(metadata, file_sha256=digest), comparison), temporary)


def _check_in_openvino(temporary: Path, name: str, options: ExportOptions) -> None:
    """Warn where OpenVINO does not reproduce the test vectors of a file that is made for it."""
    from opal_deploy.runtime.openvino_session import OpenvinoSession

    try:
        session = OpenvinoSession(temporary, threads=options.threads)
        verify_test_vectors(session, name, wide_batch(session.metadata))
    except (ArtifactError, VerificationError) as error:
        options.log(WarningLine(str(error)))


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


def _find_kept_files(source: ExportSource, targets: ExportTargets, options: ExportOptions) -> dict[Precision, Metadata]:
    """Return the metadata of ONNX files that exist as this export would write them.

    Raises:
        UsageError: another file is in the way of an ONNX file or an engine, without `overwrite`.
    """
    for precision, path in targets.onnx.items():
        remove_temporary_files(path)
        # in its own precision the source is verified again
        is_other = options.overwrite and source.onnx_precision not in (None, precision)
        if is_other and is_same_file(path, source.path):
            raise UsageError(f"{path}: this is the model to export; give another --out")
    if options.overwrite:
        return {}
    kept = {}
    existing = {precision: path for precision, path in targets.onnx.items() if path.exists()}
    for precision, path in existing.items():
        try:
            metadata = onnx_file.read_metadata(path)
            onnx_file.check_digest(path, metadata)
        except ArtifactError:
            raise _in_the_way(path, "not an exported file, or a damaged one") from None
        _check_same(path, metadata, source, precision, options)
        kept[precision] = metadata
    if targets.engines is not None and not options.rebuild and len(kept) < len(targets.onnx):
        *_, (precision, path) = targets.onnx.items()
        _check_engines(targets.engines, path, source, precision, options)
    return kept


def _check_engines(
    engines: EngineTargets, path: Path, source: ExportSource, precision: Precision, options: ExportOptions
) -> None:
    """Check the engines of an ONNX file that does not exist yet; where it does, its graph decides at the build."""
    for target in engines.targets:
        engine = engines.folder / engine_name(path.stem, precision, target)
        if not engine.exists():
            continue
        try:
            sidecar = check_engine(engine)
        except ArtifactError:
            raise _in_the_way(engine, "not an exported engine, or a damaged one") from None
        _check_same(engine, sidecar.metadata, source, precision, options)
        if sidecar.options != options.to_dict() or sidecar.builder["name"] != target.builder:
            raise _in_the_way(engine, "built with other options")


def _check_same(
    path: Path,
    metadata: Metadata,
    source: ExportSource,
    precision: Precision,
    options: ExportOptions,
) -> None:
    """Raise UsageError unless the file matches the source and these options."""
    found, expected = _describe_file(metadata), _describe_request(source, precision, options)
    if expected["checkpoint"] is not None and found == expected:
        return
    checkpoint = f"of {metadata.checkpoint_name} (sha256 {str(found['checkpoint'])[:12]})"
    if found["checkpoint"] != expected["checkpoint"]:
        other = f"{checkpoint}, not of this checkpoint ({str(expected['checkpoint'])[:12]})"
        raise _in_the_way(path, other)
    others = ", ".join(name for name in found if found[name] != expected[name])
    raise _in_the_way(path, f"{checkpoint}, the same checkpoint, exported with other {others or 'weights'}")


def _in_the_way(path: Path, what: str) -> UsageError:
    return UsageError(f"{path}: the file exists, {what}; choose another --out, or pass --overwrite to replace it")


def _describe_file(metadata: Metadata) -> dict[str, Any]:
    exporter = metadata.exporter
    return {
        **_describe_origin(metadata),
        "precision": metadata.precision,
        "input": metadata.input_kind,
        "outputs": ["attention" in metadata.outputs, metadata.has_output("ood_score"), metadata.top_k],
        "images": exporter.get("images"),
        "calibration images": exporter.get("calibrate"),
        "activations": metadata.int8_activations,
        "verification": not metadata.unverified,
        "versions": [exporter.get(name) for name in ("opal_deploy", "onnx", "onnxruntime")],
    }


def _describe_request(source: ExportSource, precision: Precision, options: ExportOptions) -> dict[str, Any]:
    origin = source.origin
    return {
        **_describe_origin(origin),
        "precision": precision,
        "input": options.input,
        "outputs": [options.attention, origin.has_output("ood_score"), options.listed_classes],
        "images": None if options.images is None else str(options.images),
        "calibration images": None if options.calibrate is None else str(options.calibrate),
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
