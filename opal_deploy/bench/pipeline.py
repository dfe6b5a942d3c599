"""Time the bare session, `infer` and `infer --explain` on the same images, interleaved.

The bare session runs on the same images, already decoded, in batches of the same size and as `infer` runs it: with
several batches in flight if the session allows it, from page-locked memory on a GPU.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.bench import timing
from opal_deploy.bench.measurement import Figure, Measurement
from opal_deploy.bench.models import TimedModel
from opal_deploy.bench.options import PipelineOptions
from opal_deploy.bench.timing import Progress, Run
from opal_deploy.errors import UsageError
from opal_deploy.predict.prepare import InferenceOptions, prepare
from opal_deploy.preprocess.decode import Decoding
from opal_deploy.run.infer import write_records, write_tables_and_report
from opal_deploy.run.options import Interrupt
from opal_deploy.run.setup import RunOptions
from opal_deploy.run.summary import Summary
from opal_deploy.runtime.devices import default_workers
from opal_deploy.runtime.session import ImageBatch, Session, pinned
from opal_deploy.sources.image import InputImage
from opal_deploy.timing import STAGES, StageTimer, WaitReason
from opal_deploy.visualization.report import ReportOptions

INFER, EXPLAIN = "infer", "infer_explain"
TIMED = (
    "bare: the session on decoded batches, in flight and page-locked as in infer; infer and infer_explain: from the "
    "first file to the last record on disk, with the start of decode processes; files cached, model loaded and warm"
)
# more than a processor's caches hold, but little memory
_DECODED_IMAGES = 1024


def measure_pipeline(
    model: TimedModel, items: list[InputImage], options: PipelineOptions, progress: Progress = lambda done, total: None
) -> Measurement:
    """Measure the bare session, `infer` and `infer --explain`.

    Raises UsageError for fewer usable images than a batch.
    """
    session, workers = model.session, options.workers or default_workers()
    decoded = decode_images(items, session.metadata.form, options.batch)
    batches = np.split(decoded, len(decoded) // options.batch)
    names = [INFER, EXPLAIN] if options.explain and session.metadata.evidence != "none" else [INFER]
    passes: dict[str, list[Summary]] = {name: [] for name in names}
    bare: list[float] = []
    before = timing.read_gpus([model.target.device])
    with tempfile.TemporaryDirectory(prefix="opal-bench-") as scratch, pinned(session, decoded):
        run, folder = Run(session, batches), Path(scratch)
        # the first images load modules, fonts and the runtime's memory
        for name in names:
            _infer(session, items[: options.batch], folder / name, options, workers, explain=name == EXPLAIN)
        run.time_repeat(0, run.depth)
        for repeat in range(options.repeats):
            for name in names:
                passes[name].append(_infer(session, items, folder / name, options, workers, explain=name == EXPLAIN))
            latencies, seconds = run.time_repeat(0, _count(passes[INFER][-1]) // options.batch)
            bare.append(len(latencies) * options.batch / seconds)
            progress(repeat + 1, options.repeats)
    after = timing.read_gpus([model.target.device])
    figures = _build_figures(bare, passes)
    count = _count(passes[INFER][-1])
    return Measurement(
        "pipeline",
        model.target,
        {
            "images": count, "batch": options.batch, "workers": workers, "threads": model.threads,
            "decode": options.decode, "isolate": options.isolate,
        },
        figures,
        settings={"repeats": options.repeats, "order": "interleaved"},
        timed=TIMED,
        marks=(*timing.find_throttling(after), *figures[INFER].marks),
        conditions={"before": before, "after": after} if before else {},
        details={"notes": [f"{count} of {len(items)} images; {session.description}"], "given": len(items)},
    )  # fmt: skip


def _build_figures(bare: Sequence[float], passes: Mapping[str, Sequence[Summary]]) -> dict[str, Figure]:
    figures = {"bare": Figure.of_repeats(bare, "images/s", "higher")}
    for name, made in passes.items():
        rates = [_count(one) / one.seconds for one in made]
        figures[name] = Figure.of_repeats(rates, "images/s", "higher")
        # ratios of consecutive passes, so that a slower machine cancels out
        figures[f"{name}_share"] = Figure.of_repeats(np.divide(rates, bare), "ratio", "higher")
    for name, made in passes.items():
        for stage in STAGES:
            # wall time includes waiting for a core or the interpreter lock, so less is not always better
            if walls := [1e3 * row.wall / _count(one) for one in made if (row := one.times.sum_stage(stage))]:
                figures[f"{name}.{stage}.wall"] = Figure.of_repeats(walls, "ms/image")
        for reason in get_args(WaitReason):
            shares = [100 * dict(one.times.waits).get(reason, 0.0) / one.seconds for one in made]
            figures[f"{name}.{reason}.waited"] = Figure.of_repeats(shares, "%")
    return figures


def _count(summary: Summary) -> int:
    return summary.total - summary.statuses["error"]


def decode_images(items: list[InputImage], form: InputForm, batch: int) -> ImageBatch:
    """Decode usable images to uint8 [N, H0, W0, 3] in whole batches, at most about 1,000; UsageError without one."""
    prepared = (prepare(request, form, InferenceOptions()) for request in items)
    usable = (entry.pixels for entry in prepared if entry.pixels is not None)
    pixels = list(itertools.islice(usable, max(_DECODED_IMAGES // batch, 1) * batch))
    if len(pixels) < batch:
        raise UsageError(f"{len(pixels)} usable images for a batch of {batch}; give more, or a smaller --batch")
    return np.stack(pixels[: len(pixels) // batch * batch])


def _infer(
    session: Session, items: list[InputImage], out: Path, options: PipelineOptions, workers: int, *, explain: bool
) -> Summary:
    """Run `infer` over the items, in this process, into a temporary run directory."""
    out.mkdir()
    inference = InferenceOptions(
        batch=options.batch, fixed_batch=True, workers=workers, decode=Decoding(options.decode),
        isolate=options.isolate, keep_images=explain,
    )  # fmt: skip
    run_options = RunOptions(out, inference, report=ReportOptions() if explain else None)
    summary, timer, started = Summary(), StageTimer(), time.perf_counter()
    thumbnails = write_records(iter(items), [session], run_options, summary=summary, interrupt=Interrupt(), timer=timer)
    write_tables_and_report(run_options, summary, thumbnails)
    summary.end(timer, started)
    shutil.rmtree(out)
    return summary
