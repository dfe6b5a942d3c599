"""What `infer` loses against the bare session: reading, decoding, evidence, overlays and writing, all overlapped.

The bare session answers the same pictures, already decoded, in the same batches. Repeats are interleaved, so that a
machine that slows down slows all three alike.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from opal_deploy.bench.measure import Rate, machine, peak_megabytes
from opal_deploy.errors import UsageError
from opal_deploy.pipeline.discover import Item
from opal_deploy.pipeline.engine import EngineOptions
from opal_deploy.pipeline.infer import Job, requests, run
from opal_deploy.pipeline.prepare import prepare
from opal_deploy.runtime.session import ImageBatch, Session


@dataclass(frozen=True)
class PipelineResult:
    """Rates of the three, ratios to the bare session, and the process's peak memory in MB."""

    bare: Rate
    plain: Rate
    overlays: Rate
    images: int
    batch: int
    peak_megabytes: float
    session: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "images": self.images, "batch": self.batch, "session": self.session,
            "rates": [rate.to_dict() for rate in (self.bare, self.plain, self.overlays)],
            "ratio_without_overlays": self.plain.median / self.bare.median,
            "ratio_with_overlays": self.overlays.median / self.bare.median,
            "peak_megabytes": self.peak_megabytes,
            "timed": "bare: session.run on decoded batches; infer: from the first file to the last record on disk, "
            "model already loaded",
            "machine": machine(),
        }  # fmt: skip


def measure(
    session: Session, items: list[Item], options: EngineOptions, *, repeats: int, say: Callable[[str], None]
) -> PipelineResult:
    """Time the bare session, `infer`, and `infer --explain` on the same pictures.

    Raises:
        UsageError: fewer usable pictures than a batch.
    """
    batches = _decoded(session, items, options)
    images = sum(len(batch) for batch in batches)
    rates: dict[str, list[float]] = {"bare": [], "plain": [], "overlays": []}
    session.run(batches[0])
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            rates["bare"].append(images / _seconds(lambda: [session.run(batch) for batch in batches]))
            for name, explain in (("plain", False), ("overlays", True)):
                out = Path(scratch) / f"{name}-{repeat}"
                out.mkdir()
                job = Job(out, explain, engine=replace(options, keep_pictures=explain))
                rates[name].append(len(items) / _seconds(lambda job=job: run(iter(items), [session], job)))  # type: ignore[misc]
                shutil.rmtree(out)
            say(f"repeat {repeat + 1}: " + ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items()))
    return PipelineResult(
        Rate("session alone", tuple(rates["bare"])),
        Rate("infer", tuple(rates["plain"])),
        Rate("infer --explain", tuple(rates["overlays"])),
        len(items),
        options.batch,
        peak_megabytes(),
        session.description,
    )


def _decoded(session: Session, items: list[Item], options: EngineOptions) -> list[ImageBatch]:
    size = session.metadata.input_size
    prepared = (prepare(r, size, options.max_pixels, keep_picture=False) for r in requests(items, None))
    pixels = [entry.pixels for entry in prepared if entry.pixels is not None]
    if len(pixels) < options.batch:
        raise UsageError(f"{len(pixels)} usable pictures; give at least one batch of {options.batch}")
    source = iter(pixels)
    batches = []
    while group := list(itertools.islice(source, options.batch)):
        batches.append(np.stack(group))
    return batches


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
