"""The gate that a graph passes before it becomes a file, and what is said of one that does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from opal_deploy._version import __version__
from opal_deploy.artifact.files import written_atomically
from opal_deploy.artifact.metadata import METADATA_KEY, Metadata, Precision
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ArtifactError, VerificationError
from opal_deploy.export.blame import worst_layer
from opal_deploy.export.candidate import Candidate, Say
from opal_deploy.export.pictures import BATCHES, Pixels, in_batches
from opal_deploy.export.rounding import rounded_twin
from opal_deploy.runtime.compare import GATES, Comparison, compare
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.verify import verify_vectors

# on ONNX Runtime's CPU provider these would run in float32, or not at all: see `rounding`
_EMULATED = ("fp16", "bf16")


@dataclass(frozen=True)
class Examination:
    """What a comparison measured, and the same as the report for the metadata."""

    comparison: Comparison
    report: dict[str, Any]


def examine(candidate: Candidate, folder: Path, say: Say, threads: int | None = None) -> Examination:
    """Run a candidate's graph on its pictures and hold the answers against its reference.

    Args:
        candidate: with the metadata, test vectors included, that its file is to have.
        folder: where room for a temporary file is.
        say: told what is compared.
        threads: of ONNX Runtime.
    """
    metadata, reference, pictures = candidate.metadata, candidate.reference, candidate.pictures
    emulated = metadata.precision in _EMULATED
    gate = GATES[metadata.precision]
    rounding = None
    with written_atomically(folder / "gate.onnx", keep=False) as temporary:
        write_model(rounded_twin(candidate.model) if emulated else candidate.model, metadata, temporary)
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
        if comparison and emulated:
            verify_vectors(session, "the graph with emulated rounding")
    report = {
        "reference": candidate.compared_with,
        "candidate": how,
        "pictures": pictures.description,
        "batches": list(BATCHES),
        "gate": asdict(gate),
        **({} if rounding is None else {"rounding": asdict(rounding)}),
        **comparison.to_dict(),
        "worst_picture": pictures.names[comparison.worst],
    }
    return Examination(comparison, report)


def refusal(candidate: Candidate, examination: Examination, name: str) -> VerificationError:
    """Why a candidate gets no file, with the worst picture and the worst layer, and what to try."""
    comparison, pictures = examination.comparison, candidate.pictures
    layer = _blamed(candidate, candidate.reference.images[comparison.worst])
    return VerificationError(
        f"{name} was not written: {'; '.join(comparison.failures)} (against {candidate.compared_with}, on "
        f"{pictures.description}); worst on {pictures.names[comparison.worst]}{layer}"
        f"{_ADVICE[candidate.metadata.precision]}"
    )


def _blamed(candidate: Candidate, picture: Pixels) -> str:
    if candidate.baseline is None:
        return ""
    emulated = candidate.metadata.precision in _EMULATED
    model = rounded_twin(candidate.model) if emulated else candidate.model
    return f", {worst_layer(candidate.baseline, model, picture, candidate.metadata)}"


_ADVICE: dict[Precision, str] = {
    "fp32": "",
    "fp16": "; try --pictures with photographs such as the model will see, or --precision fp32",
    "bf16": "; try --precision fp16, or fp32",
    "int8": "; calibrate on more photographs such as the model will see (--calibrate), or use fp16",
}


def write_model(model: onnx.ModelProto, metadata: Metadata, path: Path) -> None:
    """A graph with our metadata, as a file.

    Raises:
        ArtifactError: it is over ONNX's 2 GB.
    """
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


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"
