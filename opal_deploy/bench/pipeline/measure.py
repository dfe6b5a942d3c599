"""Time the bare session, `infer` and `infer --explain` on the same images.

The bare session runs on the same images, already decoded, in batches of the same size, and as `infer` runs it: with as
many batches in flight as it takes, from page-locked memory on a GPU. Copies to and from a GPU are timed apart, because
a session whose copies are waited for is slower. Repeats are interleaved, so that a machine that slows down slows all
three alike.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opal_deploy.bench.batch_timing import time_stages_of
from opal_deploy.bench.measurement import Figure
from opal_deploy.bench.memory import MemoryCurve, MemorySampler, peak_memory_mb, reset_peak_memory
from opal_deploy.bench.monitor import monitor_devices
from opal_deploy.bench.pipeline.bottleneck import Bottleneck, Pass, find_bottleneck
from opal_deploy.bench.pipeline.cases import Case, decode_images
from opal_deploy.bench.pipeline.replay import HeldSession, ReplayDecoders, ReplaySession
from opal_deploy.inference.decoding.pool import DecoderPool
from opal_deploy.inference.run.backend import LocalBackend, RunOptions
from opal_deploy.inference.run.report import ReportOptions
from opal_deploy.inference.run.run import run
from opal_deploy.inference.sources.items import Item
from opal_deploy.inference.timing import ThreadRole
from opal_deploy.inference.types import InferenceOptions, build_requests
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.runtime.session import ImageBatch, PipelinedSession, Session, pinned

if TYPE_CHECKING:
    from opal_deploy.bench.pipeline.eager_baseline import EagerBaseline

Report = Callable[[str], None]

INFER, EXPLAIN = "infer", "infer_explain"
# NVML's reading, as the monitor names it
_USE = "utilisation_percent"


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a measurement of the pipeline.

    Attributes:
        repeats: of everything, at least one.
        network: False: outputs computed beforehand are replayed, so that only the pipeline costs time; the bare session
            is not measured then.
        decoding: False: pixels are in their slots beforehand; overlays are not drawn then.
        hold: seconds that a pretended device holds each replayed batch; 0: none does.
        explain: measure `infer --explain` too.
        baseline: the same model as a research script runs it; None: not measured.
        device: of the session; the use of a GPU is sampled while `infer` runs.
        interval: seconds between samples of the memory.
        progress: called after each pass over the images with passes done and in all.
    """

    repeats: int = 5
    network: bool = True
    decoding: bool = True
    hold: float = 0.0
    explain: bool = True
    baseline: EagerBaseline | None = None
    device: str = "cpu"
    interval: float = 0.1
    progress: Callable[[int, int], None] = lambda done, total: None


@dataclass(frozen=True)
class Variant:
    """`infer` with or without overlays.

    Attributes:
        name: INFER or EXPLAIN.
        passes: one a repeat.
        memory: over the last pass.
        bottleneck: of all passes together.
    """

    name: str
    passes: tuple[Pass, ...]
    memory: MemoryCurve
    bottleneck: Bottleneck


@dataclass(frozen=True)
class CaseResult:
    """The passes of one case.

    Attributes:
        case: what was measured.
        images: usable images.
        given: all images, the unusable ones included.
        session: the session's description.
        bare: passes of the session alone; empty without the network.
        variants: `infer`, and `infer --explain` where the model has evidence.
        peak_megabytes: peak resident memory of the process, decoded batches included.
        baseline: passes of the same model as a research script runs it; empty if not requested.
        stages: milliseconds of a batch's copies to and from a GPU and of its computing; empty on the CPU.
    """

    case: Case
    images: int
    given: int
    session: str
    bare: tuple[Pass, ...]
    variants: tuple[Variant, ...]
    peak_megabytes: float
    baseline: tuple[Pass, ...] = ()
    stages: dict[str, Figure] = field(default_factory=dict)


def measure_case(
    session: Session, items: list[Item], case: Case, options: PipelineOptions, report: Report
) -> CaseResult:
    """Measure one case.

    Args:
        session: of the model; without the network it only computes the outputs that are replayed.
        items: images, already of the case's size.
        case: what to measure.
        options: how to measure.
        report: prints a line after every repeat.

    Raises:
        UsageError: fewer usable images than a batch.
        StoppedEarly: the device was lost, or the disk is full.
    """
    reset_peak_memory()
    decoded = decode_images(items, session.metadata.input_size, case.batch)
    batches = np.split(decoded, len(decoded) // case.batch)
    if not options.network:
        session, batches = ReplaySession.record(session, batches), []
        if options.hold:
            session = HeldSession(session, options.hold)
    draws = options.explain and options.decoding and session.metadata.evidence != "none"
    names = (INFER, EXPLAIN) if draws else (INFER,)
    bare: list[Pass] = []
    baseline: list[Pass] = []
    passes: dict[str, list[Pass]] = {name: [] for name in names}
    curves: dict[str, MemoryCurve] = {}
    first = items[: case.batch]
    images = 0
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as scratch, pinned(session, decoded):
        pipeline = _Pipeline(session, case, options, Path(scratch))
        # modules, fonts and the runtime's memory are loaded by the first images
        for name in names:
            pipeline.run(first, name)
        _run_bare(session, batches[:1], _depth(session))
        on_gpu = bool(batches) and options.device != "cpu"
        stages = time_stages_of(session, batches) if on_gpu else {}
        if options.baseline is not None:
            options.baseline.measure(first, case.batch)
        done = itertools.count(1)
        total = options.repeats * (len(names) + bool(batches) + (options.baseline is not None))
        options.progress(0, total)
        for repeat in range(options.repeats):
            for name in names:
                one, curves[name] = pipeline.run(items, name)
                passes[name].append(one)
                options.progress(next(done), total)
            images = passes[INFER][-1].images
            if batches:
                bare.append(_run_bare(session, batches, images // case.batch))
                options.progress(next(done), total)
            if options.baseline is not None:
                baseline.append(options.baseline.measure(items, case.batch))
                options.progress(next(done), total)
            titled = {"session alone": bare, **passes, "plain PyTorch and Pillow": baseline}
            rates = ", ".join(f"{title} {made[-1].rate:.1f}" for title, made in titled.items() if made)
            report(f"repeat {repeat + 1} of {options.repeats}: {rates} images/s")
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
        peak_memory_mb(),
        tuple(baseline),
        stages,
    )


@dataclass(frozen=True)
class _Pipeline:
    """`infer` in this process, in the way that a case says."""

    session: Session
    case: Case
    options: PipelineOptions
    scratch: Path

    def run(self, items: list[Item], name: str) -> tuple[Pass, MemoryCurve]:
        """Time one pass over the items into a run directory that is removed afterwards."""
        out = self.scratch / name
        out.mkdir()
        case = self.case
        inference = InferenceOptions(
            batch=case.batch, fixed_batch=True, workers=case.workers, decode=case.decode, isolate=case.isolate
        )  # fmt: skip
        device = self.options.device
        with MemorySampler(self.options.interval) as memory, monitor_devices(device) as monitor:
            cpu = _process_cpu_seconds()
            options = RunOptions(out, inference, report=ReportOptions() if name == EXPLAIN else None)
            held = _held_seconds(self.session)
            open_decoders = DecoderPool if self.options.decoding else ReplayDecoders
            summary = run(build_requests(items), LocalBackend([self.session], open_decoders), options)
            cpu = _process_cpu_seconds() - cpu
            held = _held_seconds(self.session) - held
        shutil.rmtree(out)
        images = summary.total - summary.statuses["error"]
        uses = [each[_USE]["median"] for each in monitor.conditions.values() if _USE in each]
        if self.options.hold:
            uses = [100 * held / summary.seconds]
        return Pass(images, summary.seconds, cpu, summary.times, next(iter(uses), None)), memory.curve


def _process_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children, such as decode workers after a run."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _held_seconds(session: Session) -> float:
    return session.busy if isinstance(session, HeldSession) else 0.0


def _depth(session: Session) -> int:
    return session.depth if isinstance(session, PipelinedSession) else 1


def _run_bare(session: Session, batches: list[ImageBatch], count: int) -> Pass:
    """Run so many batches, the given ones in turn, with as many in flight as the session takes."""
    cpu, started = time.process_time(), time.perf_counter()
    images = 0
    in_flight: deque[object] = deque()
    for batch in itertools.islice(itertools.cycle(batches), count):
        images += len(batch)
        if not isinstance(session, PipelinedSession):
            session.run(batch)
            continue
        if len(in_flight) == session.depth:
            session.collect(in_flight.popleft())
        in_flight.append(session.submit(batch))
    while in_flight and isinstance(session, PipelinedSession):
        session.collect(in_flight.popleft())
    return Pass(images, time.perf_counter() - started, time.process_time() - cpu)
