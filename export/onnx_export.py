"""From a checkpoint, or from one of our ONNX files, to ONNX files that were verified before they got their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from opal_deploy.export.blame import worst_layer
from opal_deploy.export.graph_edit import producers, with_outputs
from opal_deploy.export.pictures import BATCHES, Pictures, Pixels, in_batches, verification_pictures
from opal_deploy.export.precision import to_bf16, to_fp16
from opal_deploy.export.quantise import calibration_pictures, to_int8
from opal_deploy.export.rounding import rounded_twin
from opal_deploy.runtime.compare import GATES, Comparison, Rounding, compare
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verify import verify_vectors

Say = Callable[[str], None]

NOT_VERIFIED = "exported with --no-verify"
# on ONNX Runtime's CPU provider these would run in float32, or not at all: see `rounding`
_EMULATED = ("fp16", "bf16")


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
class Export:
    """What was written: where, with which metadata, and what the comparison measured (None with --no-verify)."""

    path: Path
    metadata: Metadata
    comparison: Comparison | None


@dataclass(frozen=True)
class Candidate:
    """A graph on its way to becoming a file, with the reference that it must reproduce.

    Attributes:
        baseline: the float32 graph that a lower precision was made from.
        rounding: how far the reference moves by itself; asked only where the plain gate fails.
    """

    model: onnx.ModelProto
    metadata: Metadata
    reference: Reference
    pictures: Pictures
    compared_with: str
    vectors: Reference = field(repr=False)
    rounding: Callable[[], Rounding] | None = None
    baseline: onnx.ModelProto | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Staged:
    """An export that has passed its gate and still lies under a temporary name."""

    export: Export
    temporary: Path


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
    if options.precision == "fp32":
        raise UsageError(f"{source}: it is fp32 already; choose --precision fp16, bf16 or int8")
    candidate = onnx_candidate(source, options, say)
    out = options.out or file_name(source, options.precision)
    return write_verified(candidate, out, say, options.threads, verify=options.verify)


def onnx_candidate(source: Path, options: ExportOptions, say: Say = lambda _: None) -> Candidate:
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
    verify_vectors(session, str(source))
    calibration = _calibration(options, metadata)
    pictures = _judges(options, metadata, calibration)
    model = onnx.load(source)
    outputs = in_batches(session.run, pictures.pixels, Outputs.concatenate)
    reference = Reference(pictures.pixels, outputs, _gaps(model, session, pictures.pixels))
    candidate = Candidate(
        model,
        metadata,
        reference,
        pictures,
        f"{source.name} in {session.description}",
        test_vectors.unpack(metadata.test_vectors, str(source)),
    )
    return in_precision(candidate, options.precision, calibration, say)


def in_precision(
    candidate: Candidate, precision: Precision, calibration: Pictures | None = None, say: Say = lambda _: None
) -> Candidate:
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


def choose_pictures(options: ExportOptions, metadata: Metadata) -> tuple[Pictures, Pictures | None]:
    """What judges an export, and what int8 is calibrated with: never the same pictures."""
    calibration = _calibration(options, metadata)
    return _judges(options, metadata, calibration), calibration


def _calibration(options: ExportOptions, metadata: Metadata) -> Pictures | None:
    return calibration_pictures(options.calibrate, metadata) if options.precision == "int8" else None


def _judges(options: ExportOptions, metadata: Metadata, calibration: Pictures | None) -> Pictures:
    used = [Path(name) for name in calibration.names] if calibration is not None else []
    return verification_pictures(metadata, options.pictures or (options.calibrate if used else None), used)


def write_verified(
    candidate: Candidate, out: Path, say: Say, threads: int | None = None, *, verify: bool = True
) -> Export:
    """Write a graph under its final name if, and only if, it reproduces its reference.

    Raises:
        VerificationError: it does not; nothing is left behind. UsageError: the place cannot be written to.
    """
    with staged(candidate, out, say, threads, verify=verify) as found:
        return found.export


@contextmanager
def staged(
    candidate: Candidate, out: Path, say: Say, threads: int | None = None, *, verify: bool = True
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
    with written_atomically(out) as temporary:
        comparison = None
        if verify:
            comparison, report = _judge(replace(candidate, metadata=metadata), out, say, threads)
            metadata = replace(metadata, verification=report)
        _write(candidate.model, metadata, temporary)
        digest = onnx_file.seal(temporary)
        if verify and metadata.precision != "bf16":
            # the very bytes that are about to get the name: digest, metadata and vectors
            verify_vectors(OnnxSession(temporary, device="cpu", threads=threads), out.name)
        yield Staged(Export(out, replace(metadata, file_sha256=digest), comparison), temporary)


def _judge(candidate: Candidate, out: Path, say: Say, threads: int | None) -> tuple[Comparison, dict[str, Any]]:
    """Run the graph on the pictures, hold it against its reference; the comparison, and the report for the metadata."""
    metadata, reference, pictures = candidate.metadata, candidate.reference, candidate.pictures
    emulated = metadata.precision in _EMULATED
    gate = GATES[metadata.precision]
    rounding = None
    with written_atomically(out.with_name(f"{out.stem}.gate.onnx"), keep=False) as temporary:
        _write(rounded_twin(candidate.model) if emulated else candidate.model, metadata, temporary)
        session = OnnxSession(temporary, device="cpu", threads=threads, check_digest=False)
        how = session.description + (" emulated: rounded after every operation" if emulated else "")
        say(
            f"Comparing {metadata.precision} with {candidate.compared_with} on {pictures.description} in batches of "
            f"{_listed(BATCHES)}"
        )
        outputs = in_batches(session.run, reference.images, Outputs.concatenate)
        comparison = compare(reference, outputs, metadata, gate)
        if not comparison and candidate.rounding is not None:
            rounding = candidate.rounding()
            gate = gate.opened_for(rounding)
            comparison = compare(reference, outputs, metadata, gate)
        worst = pictures.names[comparison.worst]
        if not comparison:
            layer = _blamed(candidate, reference.images[comparison.worst])
            raise VerificationError(
                f"{out.name} was not written: {'; '.join(comparison.failures)} (against {candidate.compared_with}, on "
                f"{pictures.description}); worst on {worst}{layer}{_ADVICE[metadata.precision]}"
            )
        if emulated:
            verify_vectors(session, out.name)
    report = {
        "reference": candidate.compared_with,
        "candidate": how,
        "pictures": pictures.description,
        "batches": list(BATCHES),
        "gate": asdict(gate),
        **({} if rounding is None else {"rounding": asdict(rounding)}),
        **comparison.to_dict(),
        "worst_picture": worst,
    }
    return comparison, report


def _blamed(candidate: Candidate, picture: Pixels) -> str:
    if candidate.baseline is None:
        return ""
    emulated = candidate.metadata.precision in _EMULATED
    model = rounded_twin(candidate.model) if emulated else candidate.model
    return f", {worst_layer(candidate.baseline, model, picture, candidate.metadata)}"


_ADVICE: dict[Precision, str] = {
    "fp32": "",
    "fp16": "; try --precision bf16, or fp32",
    "bf16": "; try --precision fp16, or fp32",
    "int8": "; calibrate on more photographs such as the model will see (--calibrate), or use fp16",
}


def _gaps(model: onnx.ModelProto, session: OnnxSession, pixels: Pixels) -> Any:
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
