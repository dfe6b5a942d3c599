"""Time the bare session, `infer` and `infer --explain` on the same pictures.

The bare session answers the same pictures, already decoded, in the same batches. Repeats are interleaved, so that a
machine that slows down slows all three alike.

The model of a measurement, opened as `infer` opens it.

A session that costs nothing: what remains of a run is the pipeline itself."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.machine import peak_megabytes, reset_peak
from opal_deploy.bench.measurement import Target, head_name
from opal_deploy.bench.memory import MemoryCurve, MemorySampler
from opal_deploy.bench.pipeline.bottleneck import Bottleneck, Pass, find_bottleneck
from opal_deploy.bench.pipeline.cases import Case, decode_batches
from opal_deploy.bench.targets.loading import LoadedTarget, Setup, load_file
from opal_deploy.inference.run.drawing import ReportOptions
from opal_deploy.inference.run.run import RunOptions, run
from opal_deploy.inference.sources.items import Item
from opal_deploy.inference.timing import ThreadRole
from opal_deploy.inference.types import InferenceOptions, build_requests
from opal_deploy.preprocess.gpu import GpuDecoder
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.runtime.session import ImageBatch, Session, check_batch

if TYPE_CHECKING:
    from opal_deploy.bench.pipeline.eager_baseline import EagerBaseline


INFER, EXPLAIN = "infer", "infer_explain"


@dataclass(frozen=True)
class Variant:
    """`infer` with or without overlays.

    Attributes:
        name: INFER or EXPLAIN. passes: one a repeat.
        memory: over the last pass. bound: of all passes together.
    """

    name: str
    passes: tuple[Pass, ...]
    memory: MemoryCurve
    bound: Bottleneck


@dataclass(frozen=True)
class CaseResult:
    """One case, measured.

    Attributes:
        images: usable pictures. given: pictures, with those that cannot be used.
        bare: passes of the session alone; empty where there was no network.
        variants: `infer`, and `infer --explain` where the model can explain.
        plain: passes of the same model as a research script runs it, where that was asked for.
        peak_megabytes: largest resident memory while the case was measured, decoded batches and all.
    """

    case: Case
    images: int
    given: int
    session: str
    bare: tuple[Pass, ...]
    variants: tuple[Variant, ...]
    peak_megabytes: float
    plain: tuple[Pass, ...] = ()


def measure_case(
    session: Session,
    items: list[Item],
    case: Case,
    *,
    repeats: int,
    say: Callable[[str], None],
    network: bool = True,
    gpus: Sequence[GpuDecoder] = (),
    plain: EagerBaseline | None = None,
    interval: float = 0.1,
) -> CaseResult:
    """Measure one case.

    Args:
        session: of the model; without `network` it computes the answers that are replayed, and no more.
        items: pictures, already of the case's size.
        repeats: of everything, at least one.
        say: hears of every repeat.
        network: False: answers cost nothing, so that the pipeline itself is measured; there is no bare session then.
        gpus: decode plain JPEG files, where the case says so.
        plain: the same model as a research script runs it, measured in turn.
        interval: between samples of the memory, seconds.

    Raises:
        UsageError: fewer usable pictures than a batch. StoppedEarly: the device was lost, or the disk is full.
    """
    reset_peak()
    batches = decode_batches(items, session.metadata.input_size, case.batch)
    images = sum(len(batch) for batch in batches)
    if not network:
        session, batches = ReplaySession.of(session, batches), []
    names = (INFER,) if session.metadata.evidence == "none" else (INFER, EXPLAIN)
    bare: list[Pass] = []
    scripted: list[Pass] = []
    passes: dict[str, list[Pass]] = {name: [] for name in names}
    curves: dict[str, MemoryCurve] = {}
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as scratch:
        # modules, fonts and the runtime's memory are loaded by the first picture
        for name in names:
            _infer(session, items[: case.batch], case, gpus, name, images, Path(scratch), interval)
        if batches:
            session.run(batches[0])
        if plain is not None:
            plain.measure(items[: case.batch], case.batch)
        for repeat in range(repeats):
            if batches:
                bare.append(_bare(session, batches, images))
            for name in names:
                done, curves[name] = _infer(session, items, case, gpus, name, images, Path(scratch), interval)
                passes[name].append(done)
            if plain is not None:
                scripted.append(plain.measure(items, case.batch))
            told = {"session alone": bare, **passes, "plain PyTorch and Pillow": scripted}
            rates = ", ".join(f"{name} {made[-1].rate:.1f}" for name, made in told.items() if made)
            say(f"repeat {repeat + 1} of {repeats}: {rates} images/s")
    threads: dict[ThreadRole, int] = {"decoders": case.workers, "drawers": case.workers, "session": 1, "loop": 1}
    return CaseResult(
        case,
        images,
        len(items),
        session.description,
        tuple(bare),
        tuple(
            Variant(name, tuple(made), curves[name], find_bottleneck(made, threads, available_cpus()))
            for name, made in passes.items()
        ),
        peak_megabytes(),
        tuple(scripted),
    )


def _processor_seconds() -> float:
    """Of this process and of those that it started and that have ended, as decode workers have at a run's end."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _bare(session: Session, batches: list[ImageBatch], images: int) -> Pass:
    cpu, started = time.process_time(), time.perf_counter()
    for batch in batches:
        session.run(batch)
    return Pass(images, time.perf_counter() - started, time.process_time() - cpu)


def _infer(
    session: Session,
    items: list[Item],
    case: Case,
    gpus: Sequence[GpuDecoder],
    name: str,
    images: int,
    scratch: Path,
    interval: float,
) -> tuple[Pass, MemoryCurve]:
    out = scratch / name
    out.mkdir()
    inference = InferenceOptions(
        batch=case.batch, fixed_batch=True, workers=case.workers, time_transfers=True,
        decode=case.decode, gpus=tuple(gpus), isolate=case.isolate,
    )  # fmt: skip
    with MemorySampler(interval) as watch:
        cpu = _processor_seconds()
        options = RunOptions(out, inference, report=ReportOptions() if name == EXPLAIN else None)
        summary = run(build_requests(items), [session], options)
        cpu = _processor_seconds() - cpu
    shutil.rmtree(out)
    return Pass(images, summary.seconds, cpu, summary.times), watch.curve


def load_for_inference(path: Path, *, device: str, threads: int | None) -> LoadedTarget:
    """An ONNX file or an engine in its runtime; a checkpoint in the reference session, normalised on the host.

    Raises:
        ArtifactError, CheckpointError: no such model, or not ours. MissingExtra: its runtime is not installed.
        UsageError: a device that is not there.
    """
    if model_kind(path) == "checkpoint" and path.is_file():
        return _checkpoint(path, device, threads)
    return load_file(path, Setup(device=device, threads=threads))


def _checkpoint(path: Path, device: str, threads: int | None) -> LoadedTarget:
    from opal_deploy.runtime.select import open_sessions

    (session,) = open_sessions(path, device=device, threads=threads)
    import torch

    from opal_deploy.artifact.files import compute_sha256
    from opal_deploy.runtime.torch_session import torch_device

    metadata = session.metadata
    target = Target(
        name=path.name,
        backbone=metadata.backbone,
        head=head_name(metadata.head),
        runtime="torch eager",
        runtime_version=torch.__version__,
        device=str(torch_device(device)),
        precision=metadata.precision,
        layout="uint8 NHWC, normalised on the host; convolutions NCHW",
        input_size=metadata.input_size,
        num_classes=metadata.num_classes,
        prototypes_per_class=metadata.prototypes_per_class,
        sha256=compute_sha256(path),
    )
    return LoadedTarget(session, target, torch.get_num_threads() if target.device == "cpu" else None)


class ReplaySession:
    """Answers with outputs that a network computed beforehand, in turn and again from the first, as views.

    Attributes:
        metadata: the model's, so that records and overlays are as much work as its own.
        description: says so.
    """

    def __init__(self, metadata: Metadata, outputs: Outputs, origin: str) -> None:
        self.metadata = metadata
        self.description = f"no network: answers computed beforehand by {origin}"
        self._count = len(outputs)
        self._next = 0
        # twice, so that answers that wrap around are a view too
        self._outputs = Outputs.concatenate([outputs, outputs])

    @staticmethod
    def of(session: Session, batches: Iterable[ImageBatch]) -> ReplaySession:
        """What `session` answers to `batches`."""
        answers = Outputs.concatenate([session.run(batch) for batch in batches])
        return ReplaySession(session.metadata, answers, session.description)

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`; raises ValueError for a batch larger than what was computed."""
        check_batch(images, self.metadata)
        if len(images) > self._count:
            raise ValueError(f"a batch of {len(images)}; only {self._count} answers were computed")
        start = self._next
        self._next = (start + len(images)) % self._count
        return self._outputs.rows(start, start + len(images))
