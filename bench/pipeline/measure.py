"""Time the bare session, `infer` and `infer --explain` on the same pictures.

The bare session answers the same pictures, already decoded, in the same batches. Repeats are interleaved, so that a
machine that slows down slows all three alike.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from opal_deploy.bench.harness.machine import peak_megabytes, reset_peak
from opal_deploy.bench.pipeline.bound import Bound, Pass, find_bound
from opal_deploy.bench.pipeline.cases import Case
from opal_deploy.bench.pipeline.memory import MemoryCurve, MemoryWatch
from opal_deploy.bench.pipeline.pictures import decoded
from opal_deploy.bench.pipeline.replay import ReplaySession
from opal_deploy.pipeline.discover import Item
from opal_deploy.pipeline.engine import EngineOptions
from opal_deploy.pipeline.run.infer import Job, run
from opal_deploy.pipeline.stages import StageClock, Station
from opal_deploy.preprocess.gpu import GpuDecoder
from opal_deploy.runtime.onnx_session import available_cpus
from opal_deploy.runtime.session import ImageBatch, Session

if TYPE_CHECKING:
    from opal_deploy.bench.pipeline.plain import PlainLoop

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
    bound: Bound


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


def measure(
    session: Session,
    items: list[Item],
    case: Case,
    *,
    repeats: int,
    say: Callable[[str], None],
    network: bool = True,
    gpus: Sequence[GpuDecoder] = (),
    plain: PlainLoop | None = None,
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
    batches = decoded(items, session.metadata.input_size, case.batch)
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
    threads: dict[Station, int] = {"decoders": case.workers, "drawers": case.workers, "session": 1, "loop": 1}
    return CaseResult(
        case,
        images,
        len(items),
        session.description,
        tuple(bare),
        tuple(
            Variant(name, tuple(made), curves[name], find_bound(made, threads, available_cpus()))
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
    explain = name == EXPLAIN
    engine = EngineOptions(
        batch=case.batch, fixed_batch=True, workers=case.workers, keep_pictures=explain, time_transfers=True,
        decode=case.decode, gpus=tuple(gpus), isolate=case.isolate,
    )  # fmt: skip
    with MemoryWatch(interval) as watch:
        cpu = _processor_seconds()
        summary = run(iter(items), [session], Job(out, explain, engine=engine), clock=StageClock())
        cpu = _processor_seconds() - cpu
    shutil.rmtree(out)
    return Pass(images, summary.seconds, cpu, summary.times), watch.curve
