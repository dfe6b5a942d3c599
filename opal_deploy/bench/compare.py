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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from opal_deploy.bench.measurement import LINEAR, NOISY, Figure, Measurement, Scalar, provenance
from opal_deploy.bench.monitor import Monitor, monitor_devices
from opal_deploy.bench.options import CompareOptions, Precision, Question
from opal_deploy.bench.targets import RUNTIMES, LoadedTarget, Setup, build_setups, load_file, load_network
from opal_deploy.bench.timing import Batches, Clock, random_batches, rotate_inputs, time_calls, warm_up
from opal_deploy.errors import OpalError, UsageError, require
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
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetRates:
    """Rates of one model: images per second of each run, and the batches of a run, of the warm-up and in flight."""

    rates: tuple[float, ...]
    batches: int
    warm_up_calls: int
    in_flight: int


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
        rates = time_interleaved(comparison.targets, batch, options, progress=progress)
    reference, *others = zip(comparison.targets, rates, strict=True)
    return [_build_measurement(comparison, batch, options, monitor, reference, other) for other in others]


def time_interleaved(
    targets: Sequence[LoadedTarget],
    batch: int,
    options: CompareOptions,
    *,
    progress: Progress = lambda *_: None,
    clock: Clock = time.perf_counter_ns,
) -> list[TargetRates]:
    """Time two or more models in interleaved rounds."""
    with ExitStack() as stack:
        runs = [stack.enter_context(rotate_inputs(target, batch, options.buffers)) for target in targets]
        warmed = [warm_up(run, options.warmup, clock=clock) for run in runs]
        shortest = [_time_shortest(run, clock) for run in runs]
        counts = [max(1, math.ceil(options.seconds / max(seconds, 1e-9))) for seconds in shortest]
        rates: list[list[float]] = [[] for _ in runs]
        for number in range(options.pairs):
            order = range(len(runs))
            for index in order if number % 2 == 0 else reversed(order):
                # another input than the one that the run starts with
                runs[index].run(-1)
                seconds = time_calls(runs[index], counts[index], clock=clock)
                rates[index].append(batch * counts[index] / seconds)
            progress(number + 1, options.pairs)
    return [
        TargetRates(tuple(of_target), count, warm.calls, run.depth)
        for of_target, count, warm, run in zip(rates, counts, warmed, runs, strict=True)
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
    reference: tuple[LoadedTarget, TargetRates],
    candidate: tuple[LoadedTarget, TargetRates],
) -> Measurement:
    (a, a_rates), (b, b_rates) = reference, candidate
    ratios = paired_ratios(b_rates.rates, a_rates.rates)
    ratio = median(ratios)
    figures = {
        "ratio": Figure(ratio.value, "ratio", "higher", tuple(map(float, ratios)), ratio.interval),
        "images_per_second": Figure.of_repeats(b_rates.rates, "images/s", "higher"),
        "reference_images_per_second": Figure.of_repeats(a_rates.rates, "images/s", "higher"),
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
            "batches_per_run": [a_rates.batches, b_rates.batches],
            "warm_up_iterations": [a_rates.warm_up_calls, b_rates.warm_up_calls],
            "in_flight": [a_rates.in_flight, b_rates.in_flight],
            "buffers": options.buffers,
            "method": METHOD,
        },
        timed=b.describe_timing(b_rates.in_flight),
        marks=(*monitor.marks, *marks),
        conditions=monitor.conditions,
        details={
            "reference": asdict(a.target),
            "reference_timed": a.describe_timing(a_rates.in_flight),
            "notes": explain_ratio(figures),
        },
        **provenance(),
    )


def explain_ratio(figures: Mapping[str, Figure]) -> list[str]:
    """Return a note for a person if the two rates divide to another ratio than the rounds' median."""
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
        UsageError: the reference does not work here, or no other variant does.
    """
    (reference, *_), *_ = variants = _list_variants(question, network, setup)
    targets: list[LoadedTarget] = []
    unusable = []
    for name, variant, its_setup in variants:
        log(f"Preparing {variant.name}: {its_setup.runtime}, {its_setup.precision or 'fp32'}")
        try:
            loaded = load_network(variant, its_setup)
            loaded.session.run(random_batches(1, batch, loaded.metadata.input_size)[0])
        except OpalError as error:
            if not targets:
                raise
            unusable.append(f"{name}: not usable: {error}")
            continue
        targets.append(loaded)
    if len(targets) < 2:
        raise UsageError(f"{network.name}: nothing to compare {reference} with here: {'; '.join(unusable)}")
    return Comparison(reference, tuple(targets), tuple(unusable))


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
