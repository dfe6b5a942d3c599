"""The cost of each precision in verification figures, and TensorRT's engines for it: build time and size."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from opal_deploy.artifact import test_vectors
from opal_deploy.artifact.metadata import Precision
from opal_deploy.errors import OpalError
from opal_deploy.export.builder import EngineTarget, Network
from opal_deploy.export.candidate import ExportCandidate, convert_precision
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.options import EngineOptions, ExportOptions
from opal_deploy.export.verification import verify_candidate
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.runtime.tensorrt.bindings import Bindings
from opal_deploy.runtime.verification import Comparison

Report = Callable[[str], None]

TABLE_HEADER = (
    "| model | precision | target | build | engine | gate | max logit difference | classes equal | cells equal | "
    "near ties among the others |\n|" + "---|" * 10
)
_GATE_FIELDS = (
    "images", "max_logit", "max_cosine", "classes_different", "block_cells", "block_cells_different", "block_near_ties",
    "failures",
)  # fmt: skip


@dataclass(frozen=True)
class EngineBuild:
    """One engine for one target GPU; `problem` says why the parser or the builder refused, empty if they did not."""

    target: str
    layers: int
    seconds: float | None
    megabytes: float | None
    problem: str = ""


@dataclass(frozen=True)
class PrecisionResult:
    """One model in one precision.

    Attributes:
        model: name of the model.
        backbone: torchvision's name.
        precision: of the ONNX graph.
        onnx_megabytes: size of the ONNX file in MB of 10^6 bytes.
        images: description of the images that the graph was compared with PyTorch on.
        comparison: the ONNX graph against PyTorch in float32.
        engines: one a target GPU.
    """

    model: str
    backbone: str
    precision: str
    onnx_megabytes: float
    images: str
    comparison: Comparison
    engines: tuple[EngineBuild, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "model": self.model,
            "backbone": self.backbone,
            "precision": self.precision,
            "onnx_megabytes": self.onnx_megabytes,
            "gate": {
                "passed": bool(self.comparison),
                "pictures": self.images,
                **{name: getattr(self.comparison, name) for name in _GATE_FIELDS},
            },
            "engines": tuple(asdict(engine) for engine in self.engines),
        }

    def table_rows(self) -> Iterator[str]:
        """Yield one row of Markdown an engine; `TABLE_HEADER` stands above."""
        gate = self.comparison
        equal = gate.block_cells - gate.block_cells_different
        percent = 100 * equal / gate.block_cells if gate.block_cells else float("nan")
        figures = (
            f"{'passed' if gate else 'FAILED'} | {gate.max_logit:.1e} | "
            f"{gate.images - gate.classes_different}/{gate.images} | {percent:.2f} % of {gate.block_cells} | "
            f"{gate.block_near_ties}/{gate.block_cells_different}"
        )
        for engine in self.engines:
            built = engine.problem or f"{engine.seconds:.1f} s | {engine.megabytes:.1f} MB"
            yield f"| {self.model} | {self.precision} | {engine.target} | {built} | {figures} |"


def measure_precisions(
    checkpoint: Checkpoint,
    name: str,
    precisions: Sequence[Precision],
    targets: Sequence[EngineTarget],
    library: Bindings,
    options: ExportOptions,
    build: EngineOptions,
    report: Report = lambda _: None,
    on_engine: Callable[[], None] = lambda: None,
) -> Iterator[PrecisionResult]:
    """Yield one result a precision; engines are built whether or not the graph passes verification.

    Args:
        checkpoint: the model.
        name: its name in the table.
        precisions: of the graphs.
        targets: GPUs to build engines for.
        library: TensorRT, which builds them.
        options: the images to verify on, and those to calibrate int8 with.
        build: how engines are built.
        report: prints what is being done.
        on_engine: called after each engine.
    """

    def build_engine(content: bytes, target: EngineTarget) -> EngineBuild:
        engine = _build_engine(library, content, name, target, build)
        on_engine()
        return engine

    original = CheckpointSource(checkpoint, Path(name)).build_candidate(precisions, options)
    for precision in precisions:
        candidate = convert_precision(original, precision, report)
        content = candidate.model.SerializeToString()
        yield PrecisionResult(
            name,
            candidate.metadata.backbone,
            precision,
            len(content) / 1e6,
            candidate.images.description,
            _verify(candidate, options.threads, report),
            tuple(build_engine(content, target) for target in targets),
        )


def _verify(candidate: ExportCandidate, threads: int | None, report: Report) -> Comparison:
    metadata = replace(candidate.metadata, test_vectors=test_vectors.pack(candidate.test_vectors))
    with tempfile.TemporaryDirectory(prefix="opal-gate-") as folder:
        return verify_candidate(replace(candidate, metadata=metadata), Path(folder), threads, report).comparison


def _build_engine(
    library: Bindings, content: bytes, name: str, target: EngineTarget, options: EngineOptions
) -> EngineBuild:
    try:
        network = Network(library, content, name)
        plan = network.build(target, options)
    except OpalError as error:
        return EngineBuild(target.sm, 0, None, None, str(error))
    return EngineBuild(target.sm, network.num_layers, plan.seconds, len(plan.content) / 1e6)
