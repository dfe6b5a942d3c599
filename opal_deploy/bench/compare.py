"""Compare the speed of several models in interleaved rounds, so that drift of the machine affects all alike.

In each round every model runs once, in the order A B C in even rounds and C B A in odd ones, so that a machine that
slows down steadily favours none. A run is one uncounted batch, which refills the caches, and then a fixed number of
batches. A round's ratio is B's images per second divided by A's. The figure is the median of the ratios with its
bootstrap interval.

`load_comparison` prepares the usual comparisons: the cost of the head, runtimes, precisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from opal_deploy.bench.measurement import LINEAR, NOISY, Figure, Measurement, Scalar, provenance
from opal_deploy.bench.monitor import Monitor, monitor_devices
from opal_deploy.bench.options import CompareOptions, Precision, Question
from opal_deploy.bench.targets import RUNTIMES, LoadedTarget, Setup, build_setups, load_file, load_network, load_usable
from opal_deploy.bench.timing import (
    Batches,
    Clock,
    Timing,
    random_batches,
    rotate_inputs,
    time_calls,
    time_repeat,
    warm_up,
)
from opal_deploy.errors import UsageError, require
from opal_deploy.logs import Log
from opal_deploy.statistics import median, paired_ratios, spread

if TYPE_CHECKING:
    from opal_deploy.bench.networks import NamedNetwork

Progress = Callable[[int, int], None]
_Variant = tuple[str, "NamedNetwork", Setup]

METHOD = (
    "rounds in the order A B, then B A, and so on; each run starts with one uncounted batch; ratio within each round; "
    "median over rounds with a 95 % percentile bootstrap interval"
)


@dataclass(frozen=True)
class Comparison:
    """The models of one comparison.

    Attributes:
        reference: name of the first model in the measurement, such as `linear`, `eager`, `fp32`.
    """

    reference: str
    targets: tuple[LoadedTarget, ...]


def prepare_comparisons(files: Sequence[Path], options: CompareOptions, log: Log) -> Iterator[Comparison]:
    """Yield the comparisons that `bench compare` was asked for: the files, or variants of each network.

    Raises:
        UsageError: neither or both were given, a reference does not work here, or nothing can be compared with it.
        MissingExtra: no torch, which --question needs.
    """
    (setup,) = build_setups(options)
    question = options.question
    if question is None:
        if options.model or options.backbone:
            raise UsageError("--model and --backbone need --question head, runtime or precision")
        if len(files) < 2:
            raise UsageError("nothing to compare: give two models, A and B, or --question head, runtime or precision")
        yield Comparison(files[0].name, tuple(load_file(path, setup) for path in files))
        return
    if files:
        raise UsageError(f"{files[0]}: --question compares variants of --model and --backbone; leave the file out")
    if not options.model and not options.backbone:
        raise UsageError(f"--question {question} needs --backbone NAME or --model CHECKPOINT")
    require("torch", "export", "bench compare --question")
    from opal_deploy.bench.networks import build_networks, load_checkpoint_network

    networks = chain(map(load_checkpoint_network, options.model), build_networks(options))
    for network in networks:
        yield load_comparison(question, network, setup, options.batch[0], log)


def measure_comparison(
    comparison: Comparison, batch: int, options: CompareOptions, *, progress: Progress = lambda *_: None
) -> list[Measurement]:
    """Return one measurement per model but the first, with its ratio to the first."""
    with monitor_devices(*(loaded.target.device for loaded in comparison.targets)) as monitor:
        timings = time_interleaved(comparison.targets, batch, options, progress=progress)
    reference, *others = zip(comparison.targets, timings, strict=True)
    return [_build_measurement(comparison, batch, options, monitor, reference, other) for other in others]


def time_interleaved(
    targets: Sequence[LoadedTarget],
    batch: int,
    options: CompareOptions,
    *,
    progress: Progress = lambda *_: None,
    clock: Clock = time.perf_counter_ns,
) -> list[Timing]:
    """Time two or more models in interleaved rounds; each round is a repeat of a model's timing."""
    with ExitStack() as stack:
        runs = [stack.enter_context(rotate_inputs(target, batch, options.buffers)) for target in targets]
        warmed = [warm_up(run, options.warmup, clock=clock) for run in runs]
        counts = [max(1, math.ceil(options.seconds / max(_time_shortest(run, clock), 1e-9))) for run in runs]
        rounds: list[list[tuple[NDArray[np.float64], float]]] = [[] for _ in runs]
        for number in range(options.pairs):
            order = range(len(runs))
            for index in order if number % 2 == 0 else reversed(order):
                # another input than the one that the run starts with
                runs[index].run(-1)
                rounds[index].append(time_repeat(runs[index], 0, counts[index], clock))
            progress(number + 1, options.pairs)
    return [
        Timing(tuple(each for each, _ in timed), tuple(seconds for _, seconds in timed), warm, run.depth)
        for timed, warm, run in zip(rounds, warmed, runs, strict=True)
    ]


def _time_shortest(batches: Batches, clock: Clock) -> float:
    """Return the seconds of one batch, the least of three times."""
    # with several in flight one batch says little: its copies overlap with nothing
    count = batches.depth**2
    return min(time_calls(batches, count, clock=clock) for _ in range(3)) / count


def _build_measurement(
    comparison: Comparison,
    batch: int,
    options: CompareOptions,
    monitor: Monitor,
    reference: tuple[LoadedTarget, Timing],
    candidate: tuple[LoadedTarget, Timing],
) -> Measurement:
    (a, a_timing), (b, b_timing) = timings = reference, candidate
    a_rate, b_rate = (timing.throughput(batch) for _, timing in timings)
    ratios = paired_ratios(b_rate.repeats, a_rate.repeats)
    ratio = median(ratios)
    figures = {
        "ratio": Figure(ratio.value, "ratio", "higher", tuple(map(float, ratios)), ratio.interval),
        "images_per_second": b_rate,
        "reference_images_per_second": a_rate,
    }
    marks = [f"{NOISY}: the rounds' ratios differ by {spread(ratios):.0%}"] if figures["ratio"].is_noisy else []
    case: dict[str, Scalar] = {
        "question": options.question, "reference": comparison.reference, "batch": batch, "threads": b.threads
    }  # fmt: skip
    return Measurement(
        "compare",
        b.target,
        case,
        figures,
        settings={
            "rounds": options.pairs,
            "run_seconds": options.seconds,
            "batches_per_run": [len(timing.repeats[0]) for _, timing in timings],
            "warm_up_iterations": [timing.warm_up.calls for _, timing in timings],
            "in_flight": [timing.depth for _, timing in timings],
            "buffers": options.buffers,
            "method": METHOD,
        },
        timed=b.describe_timing(b_timing.depth),
        marks=(*monitor.marks, *marks),
        conditions=monitor.conditions,
        details={
            "reference": asdict(a.target),
            "reference_timed": a.describe_timing(a_timing.depth),
            "notes": explain_ratio(figures),
        },
        **provenance(),
    )


def explain_ratio(figures: Mapping[str, Figure]) -> list[str]:
    """Return a note for a person if the ratio of the two rates differs from the rounds' median ratio."""
    ratio, rate, reference = (figures[name].value for name in figures)
    if abs(rate / reference - ratio) <= 0.005:
        return []
    return [
        f"the two rates divide to {rate / reference:.4f}: each is a median over all rounds and includes the machine's "
        "drift, which cancels out in the ratio of a round"
    ]


def load_comparison(
    question: Question, network: NamedNetwork, setup: Setup, batch: int, log: Log = lambda _: None
) -> Comparison:
    """Load the variants of a network that a question is about.

    Args:
        question: `head`: OPAL with all its outputs against the linear head on the same backbone, in one runtime;
            `runtime`: PyTorch eager, as exported, against every other runtime that works here; `precision`: fp32
            against every other precision that the runtime has.

    Raises:
        OpalError: the reference does not work here, or no other variant does.
    """
    variants = _list_variants(question, network, setup)
    loaders = [(each[0], partial(_load_and_run, *each, batch, log)) for each in variants]
    reference = loaders[0][1]()
    return Comparison(variants[0][0], (reference, *load_usable(loaders[1:], log)))


def _load_and_run(_: str, network: NamedNetwork, setup: Setup, batch: int, log: Log) -> LoadedTarget:
    """Load a variant and run one batch, which shows whether it works here."""
    log(f"Preparing {network.name}: {setup.runtime}, {setup.precision or 'fp32'}")
    loaded = load_network(network, setup)
    loaded.session.run(random_batches(1, batch, loaded.metadata.input_size)[0])
    return loaded


def _list_variants(question: Question, network: NamedNetwork, setup: Setup) -> list[_Variant]:
    """Return name, network and setup of each variant; the first is the reference."""
    from opal_deploy.bench.networks import describe_backbone, replace_head_with_linear

    if question == "runtime":
        return [(name, network, setup.for_runtime(name)) for name in RUNTIMES]
    if question == "precision":
        return [(name, network, replace(setup, precision=name)) for name in get_args(Precision)]
    if network.config.head.evidence != "exact":
        raise UsageError(f"{network.name}: it has no OPAL head; give a checkpoint that has, or --backbone")
    return [(LINEAR, replace_head_with_linear(network), setup), (describe_backbone(network.config), network, setup)]
