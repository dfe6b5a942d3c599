"""From a checkpoint, or from one of our ONNX files, to ONNX files that were verified before they got their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import BLANK_DIGEST, Metadata, Precision
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import UsageError
from opal_deploy.export.candidate import ExportCandidate, ExportOptions, Say, choose_images, in_precision, top2_margin
from opal_deploy.export.images import in_batches
from opal_deploy.export.verification import verification_error, verify_candidate, write_model
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verification import Comparison, verify_test_vectors

_PRECISION_ENDINGS = (".fp16", ".bf16", ".int8")
NOT_VERIFIED = "exported with --no-verify"


@dataclass(frozen=True)
class ExportedModel:
    """What was written: where, with which metadata, and what the comparison measured (None with --no-verify)."""

    path: Path
    metadata: Metadata
    comparison: Comparison | None


@dataclass(frozen=True)
class Staged:
    """An export that has passed its gate and still lies under a temporary name."""

    export: ExportedModel
    temporary: Path


def file_name(source: Path, precision: Precision) -> Path:
    """`ckpt.onnx` or `ckpt.fp16.onnx` beside `ckpt.pt` (or beside `ckpt.onnx`)."""
    if source.suffix != ".onnx" and source.stem.endswith(_PRECISION_ENDINGS):
        raise UsageError(f"{source}: its name ends like a precision of ours, which would name another file; rename it")
    suffix = ".onnx" if precision == "fp32" else f".{precision}.onnx"
    return source.with_name(source.stem + suffix)


def export_onnx(source: Path, options: ExportOptions, say: Say = lambda _: None) -> ExportedModel:
    """Another precision of one of our own float32 ONNX files; no torch.

    The source must first reproduce its own test vectors; the result is compared with the source on pictures, and with
    the test vectors.

    Raises:
        ArtifactError: the source is not ours, damaged, or not float32. VerificationError: a gate failed.
    """
    if options.precision == "fp32":
        found = onnx_file.read_metadata(source).precision
        if found == "fp32":
            raise UsageError(f"{source}: it is fp32 already; choose --precision fp16, bf16 or int8, or --trt")
        raise UsageError(f"{source}: it is {found}, and what was rounded away is lost; export the checkpoint")
    candidate = onnx_candidate(source, options, say)
    out = options.out or file_name(source, options.precision)
    return write_verified(candidate, out, say, options.threads, verify=options.verify)


def onnx_candidate(source: Path, options: ExportOptions, say: Say = lambda _: None) -> ExportCandidate:
    """The graph of one of our float32 files in another precision, with the source's own answers as reference.

    Raises:
        ArtifactError: the source is not ours, damaged, or not float32. VerificationError: it does not reproduce its
            own test vectors here.
    """
    metadata = onnx_file.read_metadata(source)
    if metadata.precision != "fp32":
        raise UsageError(f"{source}: it is {metadata.precision} already; give the fp32 file or the checkpoint")
    if options.attention or options.input_kind != metadata.input_kind:
        raise UsageError(f"{source}: inputs and outputs are fixed in an ONNX file; export the checkpoint again")
    say(f"Checking {source.name} against its own test vectors")
    session = OnnxSession(source, device="cpu", threads=options.threads)
    verify_test_vectors(session, str(source))
    pictures, calibration = choose_images(options, metadata)
    model = onnx.load(source)
    outputs = in_batches(session.run, pictures.pixels, Outputs.concatenate)
    reference = Reference(pictures.pixels, outputs, top2_margin(model, session, pictures.pixels))
    candidate = ExportCandidate(
        model,
        metadata,
        reference,
        pictures,
        f"{source.name} in {session.description}",
        test_vectors.unpack(metadata.test_vectors, str(source)),
        unverified=f"made from {source.name}, which was {metadata.unverified}" if metadata.unverified else "",
    )
    return in_precision(candidate, options.precision, calibration, say)


def write_verified(
    candidate: ExportCandidate, out: Path, say: Say, threads: int | None = None, *, verify: bool = True
) -> ExportedModel:
    """Write a graph under its final name if, and only if, it reproduces its reference.

    Raises:
        VerificationError: it does not; nothing is left behind. UsageError: the place cannot be written to.
    """
    with staged(candidate, out, say, threads, verify=verify) as found:
        return found.export


@contextmanager
def staged(
    candidate: ExportCandidate, out: Path, say: Say, threads: int | None = None, *, verify: bool = True
) -> Iterator[Staged]:
    """A verified file under a temporary name beside `out`; it gets its name when the block ends without an error.

    Raises:
        VerificationError: it does not reproduce its reference. UsageError: the place cannot be written to.
    """
    if out.suffix != ".onnx":
        raise UsageError(f"{out}: an ONNX file's name ends in .onnx")
    metadata = replace(
        candidate.metadata,
        test_vectors=test_vectors.pack(candidate.vectors),
        exporter=_exporter(candidate),
        verification={} if verify else {"skipped": NOT_VERIFIED},
        file_sha256=BLANK_DIGEST,
    )
    with atomic_write(out) as temporary:
        comparison = None
        if verify:
            examination = verify_candidate(replace(candidate, metadata=metadata), out.parent, say, threads)
            comparison = examination.comparison
            if not comparison:
                raise verification_error(candidate, examination, out.name)
            doubt = {"skipped": candidate.unverified} if candidate.unverified else {}
            metadata = replace(metadata, verification={**examination.report, **doubt})
        write_model(candidate.model, metadata, temporary)
        digest = onnx_file.embed_digest(temporary)
        if verify and metadata.precision != "bf16":
            # the very bytes that are about to get the name: digest, metadata and vectors
            verify_test_vectors(OnnxSession(temporary, device="cpu", threads=threads), out.name)
        yield Staged(ExportedModel(out, replace(metadata, file_sha256=digest), comparison), temporary)


def _exporter(candidate: ExportCandidate) -> dict[str, Any]:
    import onnxruntime

    return {
        **candidate.metadata.exporter,
        "opal_deploy": __version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "opset": max(o.version for o in candidate.model.opset_import if o.domain in ("", "ai.onnx")),
        "ir_version": candidate.model.ir_version,
    }
