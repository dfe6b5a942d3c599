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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.bottleneck import Bottleneck, Pass, find_bottleneck
from opal_deploy.bench.measurement import NOISY, Figure, Measurement, Scalar, provenance
from opal_deploy.bench.monitor import (
    MemoryCurve,
    MemorySampler,
    Monitor,
    monitor_devices,
    peak_memory_mb,
    reset_peak_memory,
)
from opal_deploy.bench.options import PipelineOptions
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.bench.timing import in_turn, run_batches, time_stages
from opal_deploy.errors import UsageError
from opal_deploy.logs import Log
from opal_deploy.predict.prepare import prepare
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.run.drawing import ReportOptions
from opal_deploy.run.infer import write_records, write_tables_and_report
from opal_deploy.run.interrupt import Interrupt
from opal_deploy.run.setup import RunOptions
from opal_deploy.run.summary import Summary
from opal_deploy.runtime.devices import available_cpus, default_workers
from opal_deploy.runtime.session import ImageBatch, PipelinedSession, Session, check_batch, pinned
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import STAGES, StageTimer, ThreadRole

INFER, EXPLAIN = "infer", "infer_explain"
TIMED = (
    "bare: the session on decoded batches, on a GPU in page-locked memory with several batches in flight; infer and "
    "infer_explain: from the first file to the last record on disk, including the start of decode processes; files in "
    "the system's cache, model loaded and warm"
)
# a reading of NVML
_USE = "utilisation_percent"
# more than a processor's caches hold, but little memory
_DECODED_IMAGES = 1024


@dataclass(frozen=True)
class Variant:
    """`infer` (INFER) or `infer --explain` (EXPLAIN)."""

    name: str
    passes: tuple[Pass, ...]
    memory: MemoryCurve
    bottleneck: Bottleneck


@dataclass(frozen=True)
class PipelineResult:
    """The passes over the images."""

    images: int
    given: int
    workers: int
    session: str
    bare: tuple[Pass, ...]
    variants: tuple[Variant, ...]
    peak_megabytes: float
    stages: dict[str, Figure] = field(default_factory=dict)


class ReplaySession:
    """A session that replays precomputed outputs, in order and again from the first.

    Attributes:
        metadata: the model's, so that records and overlays take the same work.
    """

    device = "cpu"

    def __init__(self, metadata: Metadata, outputs: Outputs, origin: str) -> None:
        self.metadata = metadata
        self.description = f"no network: outputs precomputed by {origin}"
        self._count = len(outputs)
        self._next = 0
        # twice, so that a batch that wraps around is a view too
        self._outputs = Outputs.concatenate([outputs, outputs])

    @staticmethod
    def record(session: Session, batches: Iterable[ImageBatch]) -> ReplaySession:
        """Return a session that replays the outputs of `session` for `batches`."""
        outputs = Outputs.concatenate([session.run(batch) for batch in batches])
        return ReplaySession(session.metadata, outputs, session.description)

    def run(self, images: ImageBatch) -> Outputs:
        """Return the next outputs as views, as `Session.run` does.

        Raises:
            ValueError: the batch is larger than the number of precomputed outputs.
        """
        check_batch(images, self.metadata)
        if len(images) > self._count:
            raise ValueError(f"a batch of {len(images)}, but only {self._count} outputs were precomputed")
        start = self._next
        self._next = (start + len(images)) % self._count
        return self._outputs.rows(start, start + len(images))


def measure_pipeline(
    session: Session,
    items: list[InputImage],
    options: PipelineOptions,
    log: Log,
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
    interval: float = 0.1,
) -> PipelineResult:
    """Measure the bare session, `infer` and `infer --explain`.

    Args:
        session: the model's; without the network it only computes the outputs that are replayed.
        device: the session's; a GPU's utilisation is sampled during `infer`.

    Raises:
        UsageError: fewer usable images than a batch.
        StoppedEarly: the device was lost, or the disk is full.
    """
    reset_peak_memory()
    workers = options.workers or default_workers()
    decoded = decode_images(items, session.metadata.input_size, options.batch)
    batches = np.split(decoded, len(decoded) // options.batch)
    if not options.network:
        session, batches = ReplaySession.record(session, batches), []
    names = (INFER, EXPLAIN) if options.explain and session.metadata.evidence != "none" else (INFER,)
    bare: list[Pass] = []
    passes: dict[str, list[Pass]] = {name: [] for name in names}
    curves: dict[str, MemoryCurve] = {}
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as scratch, pinned(session, decoded):
        pipeline = _Pipeline(session, options, workers, device, Path(scratch), interval)
        # the first images load modules, fonts and the runtime's memory
        for name in names:
            pipeline.run(items[: options.batch], name)
        if batches:
            _run_bare(session, batches[:1], session.depth if isinstance(session, PipelinedSession) else 1)
        stages = time_stages(session, batches) if batches and device != "cpu" else {}
        done, total = itertools.count(1), options.repeats * (len(names) + bool(batches))
        progress(0, total)
        for repeat in range(options.repeats):
            for name in names:
                one, curves[name] = pipeline.run(items, name)
                passes[name].append(one)
                progress(next(done), total)
            if batches:
                bare.append(_run_bare(session, batches, passes[INFER][-1].images // options.batch))
                progress(next(done), total)
            titled = {"bare session": bare, **passes}
            rates = ", ".join(f"{title} {made[-1].rate:.1f}" for title, made in titled.items() if made)
            log(f"repeat {repeat + 1} of {options.repeats}: {rates} images/s")
    threads: dict[ThreadRole, int] = {"decoders": workers, "drawers": workers, "session": 1, "loop": 1}
    return PipelineResult(
        passes[INFER][-1].images,
        len(items),
        workers,
        session.description,
        tuple(bare),
        tuple(
            Variant(name, tuple(made), curves[name], find_bottleneck(made, threads, available_cpus()))
            for name, made in passes.items()
        ),
        peak_memory_mb(),
        stages,
    )


def build_measurement(
    result: PipelineResult, loaded: LoadedTarget, monitor: Monitor, options: PipelineOptions
) -> Measurement:
    """Return the measurement; `monitor` sampled the machine during it."""
    figures = _build_figures(result)
    marks = [NOISY] if any(figures[name].is_noisy for name in ("bare", INFER, EXPLAIN) if name in figures) else []
    marks += [f"growing memory: {variant.name}" for variant in result.variants if variant.memory.grows]
    case: dict[str, Scalar] = {
        "images": result.images, "batch": options.batch, "workers": result.workers, "threads": loaded.threads,
        "network": options.network, "decode": options.decode, "isolate": options.isolate,
    }  # fmt: skip
    notes = [f"{result.images} of {result.given} images; {result.session}"]
    for variant in result.variants:
        notes += [f"{variant.name}: {each.describe()}" for each in (variant.bottleneck, variant.memory)]
    details: dict[str, Any] = {
        "notes": notes,
        "session": result.session,
        "given": result.given,
        "bound": {variant.name: asdict(variant.bottleneck) for variant in result.variants},
        "memory": {variant.name: variant.memory.to_dict() for variant in result.variants},
    }
    return Measurement(
        "pipeline",
        loaded.target,
        case,
        figures,
        settings={"repeats": options.repeats, "order": "interleaved"},
        timed=TIMED,
        marks=(*marks, *monitor.marks),
        conditions=monitor.conditions,
        details=details,
        **provenance(),
    )


def _build_figures(result: PipelineResult) -> dict[str, Figure]:
    named = {"bare": result.bare, **{variant.name: variant.passes for variant in result.variants}}
    named = {name: passes for name, passes in named.items() if passes}
    variants = {name: passes for name, passes in named.items() if name != "bare"}
    figures = {
        name: Figure.of_repeats((one.rate for one in passes), "images/s", "higher") for name, passes in named.items()
    }
    for name, passes in variants.items():
        if result.bare:
            # ratios of consecutive passes, so that a slower machine cancels out
            shares = (one.rate / bare.rate for one, bare in zip(passes, result.bare, strict=True))
            figures[f"{name}_share"] = Figure.of_repeats(shares, "ratio", "higher")
        if use := [one.gpu_use for one in passes if one.gpu_use is not None]:
            figures[f"{name}.gpu_use"] = Figure.of_repeats(use, "%", "higher")
    figures |= {**result.stages, "peak_memory": Figure(result.peak_megabytes, "MB", "lower")}
    for name, passes in named.items():
        used = (1000 * one.cpu_seconds / one.images for one in passes)
        figures[f"{name}.cpu"] = Figure.of_repeats(used, "ms/image", "lower")
    for name, passes in variants.items():
        for stage in (stage for stage in STAGES if any(one.times.sum_stage(stage) for one in passes)):
            wall, cpu = ([one.milliseconds(stage, kind) for one in passes] for kind in ("wall", "cpu"))
            # wall time includes waiting for a core or the interpreter lock, so less is not always better
            figures[f"{name}.{stage}.wall"] = Figure.of_repeats(wall, "ms/image")
            figures[f"{name}.{stage}.cpu"] = Figure.of_repeats(cpu, "ms/image", "lower")
    return figures


def decode_images(items: list[InputImage], input_size: tuple[int, int], batch: int) -> ImageBatch:
    """Decode usable images to the session's input, uint8 [N, H0, W0, 3], in whole batches; at most about 1,000.

    Raises:
        UsageError: fewer usable images than a batch.
    """
    prepared = (prepare(request, input_size, InferenceOptions()) for request in items)
    usable = (entry.pixels for entry in prepared if entry.pixels is not None)
    pixels = list(itertools.islice(usable, max(_DECODED_IMAGES // batch, 1) * batch))
    if len(pixels) < batch:
        raise UsageError(f"{len(pixels)} usable images for a batch of {batch}; give more, or a smaller --batch")
    return np.stack(pixels[: len(pixels) // batch * batch])


@dataclass(frozen=True)
class _Pipeline:
    """`infer` in this process."""

    session: Session
    options: PipelineOptions
    workers: int
    device: str
    scratch: Path
    interval: float

    def run(self, items: list[InputImage], name: str) -> tuple[Pass, MemoryCurve]:
        """Time one pass over the items into a temporary run directory."""
        out = self.scratch / name
        out.mkdir()
        inference = InferenceOptions(
            batch=self.options.batch, fixed_batch=True, workers=self.workers, decode=Decoding(self.options.decode),
            isolate=self.options.isolate, keep_images=name == EXPLAIN,
        )  # fmt: skip
        with MemorySampler(self.interval) as memory, monitor_devices(self.device) as monitor:
            cpu = _process_cpu_seconds()
            options = RunOptions(out, inference, report=ReportOptions() if name == EXPLAIN else None)
            summary, timer, started = Summary(), StageTimer(), time.perf_counter()
            thumbnails = write_records(
                iter(items), [self.session], options, summary=summary, interrupt=Interrupt(), timer=timer
            )
            write_tables_and_report(options, summary, thumbnails)
            summary.end(timer, started)
            cpu = _process_cpu_seconds() - cpu
        shutil.rmtree(out)
        images = summary.total - summary.statuses["error"]
        uses = [each[_USE]["median"] for each in monitor.conditions.values() if _USE in each]
        return Pass(images, summary.seconds, cpu, summary.times, next(iter(uses), None)), memory.curve


def _process_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children, such as decode workers."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _run_bare(session: Session, batches: list[ImageBatch], count: int) -> Pass:
    """Run `count` batches, the given ones in turn, with as many in flight as the session takes."""
    cpu, started = time.process_time(), time.perf_counter()
    for _ in run_batches(in_turn(session, batches), lambda begun, _: begun == count, time.perf_counter_ns):
        pass
    images = sum(len(batches[number % len(batches)]) for number in range(count))
    return Pass(images, time.perf_counter() - started, time.process_time() - cpu)
