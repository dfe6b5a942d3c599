"""Compare the speed of several models in interleaved rounds, so that drift of the machine affects all alike.

In each round every model runs once, in the order A B C in even rounds and C B A in odd ones, so that a machine that
slows down steadily favours none. A run is one batch that does not count, to fill the caches again, and then a fixed
number of batches that takes about `run_seconds`. The ratio of a round is B's images per second divided by A's of the
same round. The figure is the median of those ratios with its bootstrap interval.

`build_comparisons` prepares the usual comparisons: the cost of the head, the runtimes, the precisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from opal_deploy.bench.batch_timing import rotate_inputs
from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import LINEAR, NOISY, NOISY_SPREAD, Figure, Measurement
from opal_deploy.bench.monitor import monitor_devices
from opal_deploy.bench.targets.loading import (
    PYTORCH_RUNTIMES,
    RECORDED,
    RUNTIMES,
    LoadedTarget,
    Runtime,
    Setup,
    load_network,
)
from opal_deploy.bench.timing import Call, Clock, random_batches, time_calls, warm_up
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.runtime.cuda_options import CudaOptions
from opal_deploy.statistics import median, paired_ratios, spread

if TYPE_CHECKING:
    from opal_deploy.bench.targets.networks import NamedNetwork

Question = Literal["head", "runtime", "precision"]
Report = Callable[[str], None]
Advance = Callable[[int, int], None]
# name, network and setup; the first is the reference
_Variants = Sequence[tuple[str, "NamedNetwork", Setup]]

RUN_SECONDS = 0.3
METHOD = (
    "turns: A B, then B A, and so on; each turn one batch that does not count, then the batches that do; ratio of the "
    "two in one round; median over rounds with a 95 % percentile bootstrap interval"
)
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")


@dataclass(frozen=True)
class ComparisonOptions:
    """The options of a comparison.

    Attributes:
        batch: images a call.
        rounds: rounds in which each model runs once.
        run_seconds: least length of a model's run in a round.
        warm_up_seconds: of each model, before the first round.
        buffers: batches of noise that the calls rotate over.
        seed: of the noise.
    """

    batch: int = 1
    rounds: int = 30
    run_seconds: float = RUN_SECONDS
    warm_up_seconds: float = 1.0
    buffers: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """The models of one comparison.

    Attributes:
        reference: name of the first model in the measurement, such as `linear`, `eager`, `fp32`.
        targets: at least two; all others are compared with the first.
        unusable: requested variants that cannot run here, each with the reason.
    """

    reference: str
    targets: tuple[LoadedTarget, ...]
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetRates:
    """Rates of one model.

    Attributes:
        rates: images per second in each round.
        batches: calls a run.
        warm_up_calls: calls discarded before the first round.
    """

    rates: tuple[float, ...]
    batches: int
    warm_up_calls: int


def measure_comparison(
    comparison: Comparison,
    options: ComparisonOptions,
    question: str | None = None,
    *,
    advance: Advance = lambda *_: None,
) -> list[Measurement]:
    """Return one measurement for each model but the first, with its ratio to the first."""
    with monitor_devices(*(loaded.target.device for loaded in comparison.targets)) as monitor:
        rates = time_interleaved(comparison.targets, options, advance=advance)
    reference, *others = zip(comparison.targets, rates, strict=True)
    return [
        replace(measurement, conditions=monitor.conditions, marks=(*monitor.marks, *measurement.marks))
        for measurement in (_build_measurement(comparison, options, question, reference, other) for other in others)
    ]


def time_interleaved(
    targets: Sequence[LoadedTarget],
    options: ComparisonOptions,
    *,
    advance: Advance = lambda *_: None,
    clock: Clock = time.perf_counter_ns,
) -> list[TargetRates]:
    """Time models in interleaved rounds.

    Args:
        targets: two or more.
        options: rounds and their length.
        advance: gets the number of finished rounds and of all rounds.
        clock: in nanoseconds.
    """
    with ExitStack() as stack:
        calls = [
            stack.enter_context(rotate_inputs(target, options.batch, options.buffers, options.seed))
            for target in targets
        ]
        return _time_interleaved(calls, options, advance, clock)


def _time_interleaved(
    calls: Sequence[Call], options: ComparisonOptions, advance: Advance, clock: Clock
) -> list[TargetRates]:
    warmed = [warm_up(call, options.warm_up_seconds, clock=clock) for call in calls]
    counts = []
    for call in calls:
        seconds = min(time_calls(call, 1, clock=clock) for _ in range(3))
        counts.append(max(1, math.ceil(options.run_seconds / max(seconds, 1e-9))))
    rates: list[list[float]] = [[] for _ in calls]
    for number in range(options.rounds):
        order = range(len(calls))
        for index in order if number % 2 == 0 else reversed(order):
            # another input than the one that the run starts with
            calls[index](-1)
            seconds = time_calls(calls[index], counts[index], clock=clock)
            rates[index].append(options.batch * counts[index] / seconds)
        advance(number + 1, options.rounds)
    return [
        TargetRates(tuple(of_target), count, warm.calls)
        for of_target, count, warm in zip(rates, counts, warmed, strict=True)
    ]


def _build_measurement(
    comparison: Comparison,
    options: ComparisonOptions,
    question: str | None,
    reference: tuple[LoadedTarget, TargetRates],
    candidate: tuple[LoadedTarget, TargetRates],
) -> Measurement:
    (a, a_rates), (b, b_rates) = reference, candidate
    ratios = paired_ratios(b_rates.rates, a_rates.rates)
    ratio = median(ratios)
    marks = []
    if spread(ratios) > NOISY_SPREAD:
        marks.append(f"{NOISY}: the rounds' ratios differ by {spread(ratios):.0%}")
    return Measurement(
        kind="compare",
        target=b.target,
        case={"question": question, "reference": comparison.reference, "batch": options.batch, "threads": b.threads},
        figures={
            "ratio": Figure(ratio.value, "ratio", "higher", tuple(map(float, ratios)), ratio.interval),
            "images_per_second": Figure.of_repeats(b_rates.rates, "images/s", "higher"),
            "reference_images_per_second": Figure.of_repeats(a_rates.rates, "images/s", "higher"),
        },
        settings={
            "rounds": options.rounds,
            "turn_seconds": options.run_seconds,
            "batches_per_turn": [a_rates.batches, b_rates.batches],
            "warm_up_iterations": [a_rates.warm_up_calls, b_rates.warm_up_calls],
            "buffers": options.buffers,
            "method": METHOD,
        },
        timed=b.timed,
        marks=tuple(marks),
        details={"reference": asdict(a.target), "reference_timed": a.timed},
        **provenance(),
    )


def build_comparisons(
    question: Question, networks: Iterable[NamedNetwork], setup: Setup, batch: int, report: Report = lambda _: None
) -> Iterator[Comparison]:
    """Yield one comparison a network; its models are loaded when it is due.

    Args:
        question: `head`: OPAL with all its outputs against the linear head on the same backbone, in one runtime;
            `runtime`: PyTorch eager, as exported, against every other runtime that works here; `precision`: fp32
            against every other precision that the runtime has.
        networks: the networks to compare variants of.
        setup: everything that the question does not vary.
        batch: images of the call that shows whether a variant works here.
        report: prints a line when a variant is being prepared.

    Raises:
        UsageError: the reference does not work here, or no other variant does.
    """
    for network in networks:
        variants = {"head": _head_variants, "runtime": _runtime_variants, "precision": _precision_variants}[question]
        yield _load_comparison(variants(network, setup), batch, report)


def _head_variants(network: NamedNetwork, setup: Setup) -> _Variants:
    from opal_deploy.bench.targets.networks import describe_backbone, replace_head_with_linear

    if network.config.head.evidence != "exact":
        raise UsageError(f"{network.name}: its head does not explain; give a checkpoint with OPAL's, or --backbone")
    return [(LINEAR, replace_head_with_linear(network), setup), (describe_backbone(network.config), network, setup)]


def _runtime_variants(network: NamedNetwork, setup: Setup) -> _Variants:
    def applied(name: Runtime) -> Setup:
        channels_last = setup.channels_last and name in PYTORCH_RUNTIMES
        return replace(
            setup,
            runtime=name,
            channels_last=channels_last,
            cuda_options=setup.cuda_options if name == "onnxruntime" else CudaOptions(),
            cuda_graphs=setup.cuda_graphs and name in RECORDED,
        )

    return [(name, network, applied(name)) for name in RUNTIMES]


def _precision_variants(network: NamedNetwork, setup: Setup) -> _Variants:
    return [(name, network, replace(setup, precision=name)) for name in _PRECISIONS]


def _load_comparison(variants: _Variants, batch: int, report: Report) -> Comparison:
    reference = variants[0][0]
    targets: list[LoadedTarget] = []
    unusable = []
    for name, network, setup in variants:
        report(f"Preparing {network.name}: {setup.runtime}, {setup.precision or 'fp32'}")
        try:
            loaded = load_network(network, setup)
            loaded.session.run(random_batches(1, batch, loaded.metadata.input_size)[0])
        except OpalError as error:
            if not targets:
                raise
            unusable.append(f"{name}: not usable: {error}")
            continue
        targets.append(loaded)
    if len(targets) < 2:
        raise UsageError(f"{variants[0][1].name}: nothing to compare {reference} with here: {'; '.join(unusable)}")
    return Comparison(reference, tuple(targets), tuple(unusable))
