"""What each precision costs in answers, and what TensorRT makes of it: build time, size, and the gate's own figures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opal_deploy.artifact import test_vectors
from opal_deploy.artifact.metadata import Precision
from opal_deploy.errors import OpalError
from opal_deploy.export.candidate import ExportCandidate, convert_precision
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.options import ExportOptions
from opal_deploy.export.tensorrt.builder import Network
from opal_deploy.export.tensorrt.options import BuildOptions, EngineTarget
from opal_deploy.export.verification import verify_candidate
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.tensorrt.bindings import Bindings

Report = Callable[[str], None]


@dataclass(frozen=True)
class GateResult:
    """One graph against PyTorch in float32, on pictures; see `Comparison` for the figures."""

    passed: bool
    pictures: str
    images: int
    max_logit: float
    max_cosine: float | None
    classes_different: int
    block_cells: int
    block_cells_different: int
    block_near_ties: int
    failures: tuple[str, ...]


@dataclass(frozen=True)
class BuildResult:
    """One engine for one target; `problem` where the parser or the builder refused."""

    target: str
    layers: int
    seconds: float | None
    megabytes: float | None
    problem: str = ""


@dataclass(frozen=True)
class PrecisionResult:
    """One model in one precision."""

    model: str
    backbone: str
    precision: str
    onnx_megabytes: float
    gate: GateResult
    engines: tuple[BuildResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Markdown, a line an engine; `HEADER` stands above them."""
        gate = self.gate
        agreeing = gate.block_cells - gate.block_cells_different
        share = 100 * agreeing / gate.block_cells if gate.block_cells else float("nan")
        verdict = "passed" if gate.passed else "FAILED"
        told = (
            f"{verdict} | {gate.max_logit:.1e} | {gate.images - gate.classes_different}/{gate.images} | "
            f"{share:.2f} % of {gate.block_cells} | {gate.block_near_ties}/{gate.block_cells_different}"
        )
        for engine in self.engines:
            made = engine.problem or f"{engine.seconds:.1f} s | {engine.megabytes:.1f} MB"
            yield f"| {self.model} | {self.precision} | {engine.target} | {made} | {told} |"


TABLE_HEADER = (
    "| model | precision | target | build | engine | gate | max logit difference | classes equal | cells equal | "
    "near ties among the others |\n|" + "---|" * 10
)


def measure_precisions(
    checkpoint: Checkpoint,
    name: str,
    precisions: Sequence[Precision],
    targets: Sequence[EngineTarget],
    library: Bindings,
    options: ExportOptions,
    build: BuildOptions,
    say: Report = lambda _: None,
) -> Iterator[PrecisionResult]:
    """A row a precision; the gate's outcome is reported, and the engine is built whatever it was.

    Args:
        checkpoint: the model.
        name: of it, in the table.
        precisions: of the graphs.
        targets: of the engines.
        library: that builds them.
        options: where the pictures are, and those to calibrate int8 with.
        build: how engines are built.
        say: told what happens.
    """
    original = CheckpointSource(checkpoint, Path(name)).build_candidate(precisions, options, say)
    for precision in precisions:
        candidate = convert_precision(original, precision, say)
        content = candidate.model.SerializeToString()
        yield PrecisionResult(
            name,
            candidate.metadata.backbone,
            precision,
            len(content) / 1e6,
            _gate(candidate, options.threads, say),
            tuple(_build(library, content, name, choice, build) for choice in targets),
        )


def _gate(candidate: ExportCandidate, threads: int | None, say: Report) -> GateResult:
    described = replace(candidate.metadata, test_vectors=test_vectors.pack(candidate.test_vectors))
    with tempfile.TemporaryDirectory(prefix="opal-gate-") as folder:
        found = verify_candidate(replace(candidate, metadata=described), Path(folder), threads, say).comparison
    return GateResult(
        bool(found),
        candidate.images.description,
        found.images,
        found.max_logit,
        found.max_cosine,
        found.classes_different,
        found.block_cells,
        found.block_cells_different,
        found.block_near_ties,
        found.failures,
    )


def _build(library: Bindings, content: bytes, name: str, choice: EngineTarget, options: BuildOptions) -> BuildResult:
    try:
        network = Network(library, content, name)
        plan = network.build(choice, options)
    except OpalError as error:
        return BuildResult(choice.sm, 0, None, None, str(error))
    return BuildResult(choice.sm, network.num_layers, plan.seconds, len(plan.content) / 1e6)
