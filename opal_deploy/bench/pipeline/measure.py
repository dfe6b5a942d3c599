"""Time the bare session, `infer` and `infer --explain` on the same images.

The bare session runs on the same images, already decoded, in batches of the same size and as `infer` runs it: with
several batches in flight if the session allows it, from page-locked memory on a GPU. Copies to and from a GPU are timed
separately, because waiting for them slows a session down. Repeats are interleaved, so that a machine that slows down
affects all alike.
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

from opal_deploy.bench.measurement import Figure
from opal_deploy.bench.monitor import MemoryCurve, MemorySampler, monitor_devices, peak_memory_mb, reset_peak_memory
from opal_deploy.bench.options import PipelineOptions
from opal_deploy.bench.pipeline.bottleneck import Bottleneck, Pass, find_bottleneck
from opal_deploy.bench.pipeline.cases import Case, decode_images
from opal_deploy.bench.pipeline.replay import HeldSession, ReplayDecoders, ReplaySession
from opal_deploy.bench.timing import time_stages_of
from opal_deploy.inference.decoding.pool import DecoderPool
from opal_deploy.inference.run.backend import LocalBackend, RunOptions
from opal_deploy.inference.run.report import ReportOptions
from opal_deploy.inference.run.run import run
from opal_deploy.inference.sources.items import Item
from opal_deploy.inference.timing import ThreadRole
from opal_deploy.inference.types import InferenceOptions, build_requests
from opal_deploy.logs import Log
from opal_deploy.runtime.devices import available_cpus
from opal_deploy.runtime.session import ImageBatch, PipelinedSession, Session, pinned

if TYPE_CHECKING:
    from opal_deploy.bench.pipeline.eager_baseline import EagerBaseline

INFER, EXPLAIN, BARE, PLAIN = "infer", "infer_explain", "bare", "plain"
_TITLES = {BARE: "bare session", PLAIN: "plain script"}
# a reading of NVML
_USE = "utilisation_percent"


@dataclass(frozen=True)
class Variant:
    """`infer` (INFER) or `infer --explain` (EXPLAIN).

    Attributes:
        name: INFER or EXPLAIN.
        passes: one per repeat.
        memory: resident memory during the last pass.
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
        given: all images, including unusable ones.
        session: the session's description.
        bare: passes of the bare session; empty without the network.
        variants: `infer`, and `infer --explain` if the model has evidence.
        peak_megabytes: peak resident memory of the process, including decoded batches.
        baseline: passes of a plain PyTorch script; empty if not requested.
        stages: milliseconds per batch of copies to and from a GPU and of computation; empty on the CPU.
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
    session: Session,
    items: list[Item],
    case: Case,
    options: PipelineOptions,
    log: Log,
    *,
    device: str = "cpu",
    baseline: EagerBaseline | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    interval: float = 0.1,
) -> CaseResult:
    """Measure one case.

    Args:
        session: the model's; without the network it only computes the outputs that are replayed.
        items: images, already in the case's size.
        case: what to measure.
        options: how to measure.
        log: gets a line per repeat.
        device: the session's; a GPU's utilisation is sampled during `infer`.
        baseline: a plain PyTorch script with the same model.
        progress: called after each pass over the images with passes done and in total.
        interval: seconds between memory samples.

    Raises:
        UsageError: fewer usable images than a batch.
        StoppedEarly: the device was lost, or the disk is full.
    """
    reset_peak_memory()
    decoded = decode_images(items, session.metadata.input_size, case.batch)
    batches = np.split(decoded, len(decoded) // case.batch)
    if not options.network:
        session, batches = ReplaySession.record(session, batches), []
        if options.hold_ms:
            session = HeldSession(session, options.hold_ms / 1e3)
    draws = options.explain and options.decoding and session.metadata.evidence != "none"
    names = (INFER, EXPLAIN) if draws else (INFER,)
    passes: dict[str, list[Pass]] = {name: [] for name in (BARE, *names, PLAIN)}
    curves: dict[str, MemoryCurve] = {}
    first = items[: case.batch]
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as scratch, pinned(session, decoded):
        pipeline = _Pipeline(session, case, options.decoding, device, Path(scratch), interval)
        # the first images load modules, fonts and the runtime's memory
        for name in names:
            pipeline.run(first, name)
        _run_bare(session, batches[:1], _depth(session))
        stages = time_stages_of(session, batches) if batches and device != "cpu" else {}
        if baseline is not None:
            baseline.measure(first, case.batch)
        done = itertools.count(1)
        total = options.repeats * (len(names) + bool(batches) + (baseline is not None))
        progress(0, total)
        for repeat in range(options.repeats):
            for name in names:
                one, curves[name] = pipeline.run(items, name)
                passes[name].append(one)
                progress(next(done), total)
            if batches:
                passes[BARE].append(_run_bare(session, batches, passes[INFER][-1].images // case.batch))
                progress(next(done), total)
            if baseline is not None:
                passes[PLAIN].append(baseline.measure(items, case.batch))
                progress(next(done), total)
            rates = ", ".join(f"{_TITLES.get(n, n)} {made[-1].rate:.1f}" for n, made in passes.items() if made)
            log(f"repeat {repeat + 1} of {options.repeats}: {rates} images/s")
    threads: dict[ThreadRole, int] = {"decoders": case.workers, "drawers": case.workers, "session": 1, "loop": 1}
    variants = (
        Variant(name, tuple(passes[name]), curves[name], find_bottleneck(passes[name], threads, available_cpus()))
        for name in names
    )
    images, bare, plain = passes[INFER][-1].images, tuple(passes[BARE]), tuple(passes[PLAIN])
    return CaseResult(
        case, images, len(items), session.description, bare, tuple(variants), peak_memory_mb(), plain, stages
    )


@dataclass(frozen=True)
class _Pipeline:
    """`infer` in this process, as a case says."""

    session: Session
    case: Case
    decoding: bool
    device: str
    scratch: Path
    interval: float

    def run(self, items: list[Item], name: str) -> tuple[Pass, MemoryCurve]:
        """Time one pass over the items into a temporary run directory."""
        out = self.scratch / name
        out.mkdir()
        case = self.case
        inference = InferenceOptions(
            batch=case.batch, fixed_batch=True, workers=case.workers, decode=case.decode, isolate=case.isolate
        )  # fmt: skip
        with MemorySampler(self.interval) as memory, monitor_devices(self.device) as monitor:
            cpu = _process_cpu_seconds()
            options = RunOptions(out, inference, report=ReportOptions() if name == EXPLAIN else None)
            held = _held_seconds(self.session)
            open_decoders = DecoderPool if self.decoding else ReplayDecoders
            summary = run(build_requests(items), LocalBackend([self.session], open_decoders), options)
            cpu = _process_cpu_seconds() - cpu
            held = _held_seconds(self.session) - held
        shutil.rmtree(out)
        images = summary.total - summary.statuses["error"]
        uses = [each[_USE]["median"] for each in monitor.conditions.values() if _USE in each]
        if isinstance(self.session, HeldSession):
            uses = [100 * held / summary.seconds]
        return Pass(images, summary.seconds, cpu, summary.times, next(iter(uses), None)), memory.curve


def _process_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children, such as decode workers."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _held_seconds(session: Session) -> float:
    return session.busy if isinstance(session, HeldSession) else 0.0


def _depth(session: Session) -> int:
    return session.depth if isinstance(session, PipelinedSession) else 1


def _run_bare(session: Session, batches: list[ImageBatch], count: int) -> Pass:
    """Run `count` batches, the given ones in turn, with as many in flight as the session takes."""
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
