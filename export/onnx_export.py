"""From a checkpoint, or from one of our ONNX files, to an ONNX file that was verified before it got its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file, test_vectors
from opal_deploy.artifact.files import written_atomically
from opal_deploy.artifact.metadata import BLANK_DIGEST, METADATA_KEY, InputKind, Metadata, Precision
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import ArtifactError, UsageError, VerificationError
from opal_deploy.export.pictures import BATCHES, in_batches, verification_pictures
from opal_deploy.export.precision import to_fp16
from opal_deploy.runtime.compare import GATES, Comparison, Rounding, compare
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verify import verify_vectors

Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportOptions:
    """What a caller may choose.

    Attributes:
        out: the file to write; None: beside the source, by the naming rule.
        input_kind: see Metadata.
        precision: `fp32` or `fp16`.
        attention: output the attention maps too.
        pictures: a folder of photographs to verify on; None: generated creatures.
        threads: of ONNX Runtime while verifying; None: all that the process may use.
    """

    out: Path | None = None
    input_kind: InputKind = "uint8"
    precision: Precision = "fp32"
    attention: bool = False
    pictures: Path | None = None
    threads: int | None = None


@dataclass(frozen=True)
class Export:
    """What was written: where, with which metadata, and what the comparison measured."""

    path: Path
    metadata: Metadata
    comparison: Comparison


@dataclass(frozen=True)
class Candidate:
    """A graph on its way to becoming a file, with the reference that it must reproduce."""

    model: onnx.ModelProto
    metadata: Metadata
    reference: Reference
    pictures: str
    compared_with: str
    vectors: Reference = field(repr=False)
    # how far the reference moves by itself; asked only where the plain gate fails
    rounding: Callable[[], Rounding] | None = None


def file_name(source: Path, precision: Precision) -> Path:
    """`ckpt.onnx` or `ckpt.fp16.onnx` beside `ckpt.pt` (or beside `ckpt.onnx`)."""
    suffix = ".onnx" if precision == "fp32" else f".{precision}.onnx"
    return source.with_name(source.stem + suffix)


def export_onnx(source: Path, options: ExportOptions, say: Say = lambda _: None) -> Export:
    """Another precision of one of our own float32 ONNX files; no torch.

    The source must first reproduce its own test vectors; the result is compared with the source on pictures, and with
    the test vectors.

    Raises:
        ArtifactError: the source is not ours, damaged, or not float32. VerificationError: a gate failed.
    """
    metadata = onnx_file.read_metadata(source)
    if metadata.precision != "fp32":
        raise UsageError(f"{source}: it is {metadata.precision} already; give the fp32 file or the checkpoint")
    if options.precision == "fp32":
        raise UsageError(f"{source}: it is fp32 already; choose --precision fp16")
    if options.attention or options.input_kind != metadata.input_kind:
        raise UsageError(f"{source}: inputs and outputs are fixed in an ONNX file; export the checkpoint again")
    say(f"Checking {source.name} against its own test vectors")
    session = OnnxSession(source, device="cpu", threads=options.threads)
    verify_vectors(session, str(source))
    pictures, what = verification_pictures(metadata, options.pictures)
    reference = Reference(pictures, in_batches(session.run, pictures, Outputs.concatenate))
    if reference.outputs.scores is not None:
        # the graph does not say how close its second-best cells are: count every cell, which is the stricter gate
        reference = replace(reference, gap=np.full(reference.outputs.scores.shape, np.inf, np.float32))
    model = to_fp16(onnx.load(source))
    candidate = Candidate(
        model,
        replace(metadata, precision=options.precision),
        reference,
        what,
        f"{source.name} in {session.description}",
        test_vectors.unpack(metadata.test_vectors, str(source)),
    )
    return write_verified(candidate, options.out or file_name(source, options.precision), say, options.threads)


def write_verified(candidate: Candidate, out: Path, say: Say, threads: int | None = None) -> Export:
    """Write a graph under its final name if, and only if, it reproduces its reference.

    Raises:
        VerificationError: it does not; nothing is left behind. UsageError: the place cannot be written to.
    """
    if out.suffix != ".onnx":
        raise UsageError(f"{out}: an ONNX file's name ends in .onnx")
    metadata = replace(
        candidate.metadata,
        test_vectors=test_vectors.pack(candidate.vectors),
        exporter=_exporter(candidate),
        verification={},
        file_sha256=BLANK_DIGEST,
    )
    with written_atomically(out) as temporary:
        _write(candidate.model, metadata, temporary)
        session = OnnxSession(temporary, device="cpu", threads=threads, check_digest=False)
        say(f"Comparing with {candidate.compared_with} on {candidate.pictures} in batches of {_listed(BATCHES)}")
        gate = GATES[metadata.precision]
        outputs = in_batches(session.run, candidate.reference.images, Outputs.concatenate)
        comparison = compare(candidate.reference, outputs, metadata, gate)
        rounding = candidate.rounding() if not comparison and candidate.rounding is not None else None
        if rounding is not None:
            gate = gate.opened_for(rounding)
            comparison = compare(candidate.reference, outputs, metadata, gate)
        if not comparison:
            raise VerificationError(
                f"{out.name} was not written: {'; '.join(comparison.failures)} (against {candidate.compared_with}, on "
                f"{candidate.pictures})"
            )
        report = {
            "reference": candidate.compared_with,
            "candidate": session.description,
            "pictures": candidate.pictures,
            "batches": list(BATCHES),
            "gate": asdict(gate),
            **({} if rounding is None else {"rounding": asdict(rounding)}),
            **comparison.to_dict(),
        }
        metadata = replace(metadata, verification=report)
        _write(candidate.model, metadata, temporary)
        digest = onnx_file.seal(temporary)
        # the very bytes that are about to get the name: digest, metadata and vectors
        verify_vectors(OnnxSession(temporary, device="cpu", threads=threads), out.name)
    return Export(out, replace(metadata, file_sha256=digest), comparison)


def _write(model: onnx.ModelProto, metadata: Metadata, path: Path) -> None:
    del model.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, metadata.to_json()
    model.producer_name, model.producer_version = "opal-deploy", __version__
    try:
        path.write_bytes(model.SerializeToString())
    except ValueError as error:  # protobuf's limit
        raise ArtifactError(
            f"the model is over ONNX's 2 GB ({error}); use a smaller backbone or fewer classes"
        ) from None


def _exporter(candidate: Candidate) -> dict[str, Any]:
    import onnxruntime

    return {
        **candidate.metadata.exporter,
        "opal_deploy": __version__,
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "opset": max(o.version for o in candidate.model.opset_import if o.domain in ("", "ai.onnx")),
        "ir_version": candidate.model.ir_version,
    }


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"
