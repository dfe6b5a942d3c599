"""Which of several is faster, and by how much: measured in turns, so that what changes with time changes for all.

In each round every contender runs once, in the order A B C in even rounds and C B A in odd ones: a machine that slows
down steadily then favours nobody. A turn is one batch that does not count, to fill the caches again, and then a fixed
number of batches, chosen beforehand so that a turn takes about `turn_seconds`. The ratio of a round is B's images per
second by A's of the same round. The median of those ratios is told with its bootstrap interval.

The comparisons that everybody asks for: what the head costs, which runtime is fastest, what precision buys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from opal_deploy.bench.batch_timing import rotate_inputs
from opal_deploy.bench.machine import provenance
from opal_deploy.bench.measurement import LINEAR, NOISY, NOISY_SPREAD, Figure, Measurement
from opal_deploy.bench.monitor import monitor_devices
from opal_deploy.bench.targets.loading import RUNTIMES, LoadedTarget, Setup, load_network
from opal_deploy.bench.targets.networks import NamedNetwork, replace_head_with_linear
from opal_deploy.bench.timing import Clock, random_batches, time_calls, warm_up
from opal_deploy.errors import OpalError, UsageError
from opal_deploy.statistics.intervals import median, paired_ratios, spread

RUN_SECONDS = 0.3
METHOD = (
    "turns: A B, then B A, and so on; each turn one batch that does not count, then the batches that do; ratio of the "
    "two in one round; median over rounds with a 95 % percentile bootstrap interval"
)


@dataclass(frozen=True)
class ComparisonOptions:
    """How contenders are compared.

    Attributes:
        batch: images a call.
        rounds: pairs of turns.
        turn_seconds: least length of a turn.
        warm_up_seconds: of each contender, before the first round.
        buffers: batches of noise that the calls rotate over.
        seed: of the noise.
    """

    batch: int = 1
    rounds: int = 30
    turn_seconds: float = RUN_SECONDS
    warm_up_seconds: float = 1.0
    buffers: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """What runs in turns: the first is what all others are compared with.

    Attributes:
        reference: how the first is called in the record, such as `linear`, `eager`, `fp32`.
        contenders: at least two.
        unusable: what else was asked for, and why it cannot run here.
    """

    reference: str
    contenders: tuple[LoadedTarget, ...]
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetRates:
    """What came out for one contender: images a second in each round, batches a turn, calls thrown away before."""

    rates: tuple[float, ...]
    batches: int
    warm_up_calls: int


Advance = Callable[[int, int], None]


def time_interleaved(
    contenders: Sequence[LoadedTarget],
    plan: ComparisonOptions,
    *,
    advance: Advance = lambda *_: None,
    clock: Clock = time.perf_counter_ns,
) -> list[TargetRates]:
    """Let them run in turns.

    Args:
        contenders: two or more.
        plan: how.
        advance: told how many rounds of how many are done.
        clock: nanoseconds.
    """
    calls = [rotate_inputs(contender, plan.batch, plan.buffers, plan.seed) for contender in contenders]
    warmed = [warm_up(call, plan.warm_up_seconds, clock=clock) for call in calls]
    counts = []
    for call in calls:
        one = min(time_calls(call, 1, clock=clock) for _ in range(3))
        counts.append(max(1, math.ceil(plan.turn_seconds / max(one, 1e-9))))
    rates: list[list[float]] = [[] for _ in contenders]
    for number in range(plan.rounds):
        order = range(len(contenders))
        for index in order if number % 2 == 0 else reversed(order):
            # not the input that the turn begins with
            calls[index](-1)
            seconds = time_calls(calls[index], counts[index], clock=clock)
            rates[index].append(plan.batch * counts[index] / seconds)
        advance(number + 1, plan.rounds)
    return [
        TargetRates(tuple(found), count, warm.calls) for found, count, warm in zip(rates, counts, warmed, strict=True)
    ]


def measure_comparison(
    contest: Comparison, plan: ComparisonOptions, question: str | None = None, *, advance: Advance = lambda *_: None
) -> list[Measurement]:
    """Run a contest: one line a contender but the first, which all are compared with."""
    with monitor_devices(*(contender.target.device for contender in contest.contenders)) as monitor:
        turns = time_interleaved(contest.contenders, plan, advance=advance)
    reference, *others = zip(contest.contenders, turns, strict=True)
    return [
        replace(found, conditions=monitor.conditions, marks=(*monitor.marks, *found.marks))
        for found in (_measurement(contest, plan, question, reference, other) for other in others)
    ]


def _measurement(
    contest: Comparison,
    plan: ComparisonOptions,
    question: str | None,
    reference: tuple[LoadedTarget, TargetRates],
    candidate: tuple[LoadedTarget, TargetRates],
) -> Measurement:
    (a, a_turns), (b, b_turns) = reference, candidate
    ratios = paired_ratios(b_turns.rates, a_turns.rates)
    middle = median(ratios)
    marks = []
    if spread(ratios) > NOISY_SPREAD:
        marks.append(f"{NOISY}: the rounds' ratios differ by {spread(ratios):.0%}")
    return Measurement(
        kind="compare",
        target=b.target,
        case={"question": question, "reference": contest.reference, "batch": plan.batch, "threads": b.threads},
        figures={
            "ratio": Figure(middle.value, "ratio", "higher", tuple(map(float, ratios)), middle.interval),
            "images_per_second": Figure.of_repeats(b_turns.rates, "images/s", "higher"),
            "reference_images_per_second": Figure.of_repeats(a_turns.rates, "images/s", "higher"),
        },
        settings={
            "rounds": plan.rounds,
            "turn_seconds": plan.turn_seconds,
            "batches_per_turn": [a_turns.batches, b_turns.batches],
            "warm_up_iterations": [a_turns.warm_up_calls, b_turns.warm_up_calls],
            "buffers": plan.buffers,
            "method": METHOD,
        },
        timed=b.timed,
        marks=tuple(marks),
        details={"reference": asdict(a.target), "reference_timed": a.timed},
        **provenance(),
    )


Question = Literal["head", "runtime", "precision"]
QUESTIONS: tuple[Question, ...] = get_args(Question)
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")

Report = Callable[[str], None]


def build_comparisons(
    question: Question, networks: Iterable[NamedNetwork], setup: Setup, batch: int, say: Report = lambda _: None
) -> Iterator[Comparison]:
    """A contest a network, opened when its turn comes.

    Args:
        question: `head`: OPAL with all its outputs against the linear head on the same backbone, in one runtime;
            `runtime`: PyTorch eager, as it is exported, against every other that works here; `precision`: fp32
            against every other that the runtime has.
        networks: to ask it of.
        setup: what the question leaves open.
        batch: that will be run: whether something works is found out with it.
        say: told what is being prepared.

    Raises:
        UsageError: the reference does not work here, or nothing else does.
    """
    for network in networks:
        yield {"head": _head, "runtime": _runtime, "precision": _precision}[question](network, setup, batch, say)


def _head(network: NamedNetwork, setup: Setup, batch: int, say: Report) -> Comparison:
    config = network.config
    if config.head.evidence != "exact":
        raise UsageError(f"{network.name}: its head does not explain; give a checkpoint with OPAL's, or --backbone")
    linear = replace_head_with_linear(network)
    setups = [(LINEAR, linear, setup), (network.config.backbone, network, setup)]
    return _contest(LINEAR, setups, batch, say)


def _runtime(network: NamedNetwork, setup: Setup, batch: int, say: Report) -> Comparison:
    layouts = {"eager": setup.channels_last, "compile": setup.channels_last}
    setups = [
        (name, network, replace(setup, runtime=name, channels_last=layouts.get(name, False))) for name in RUNTIMES
    ]
    return _contest("eager", setups, batch, say)


def _precision(network: NamedNetwork, setup: Setup, batch: int, say: Report) -> Comparison:
    setups = [(name, network, replace(setup, precision=name)) for name in _PRECISIONS]
    return _contest("fp32", setups, batch, say)


def _contest(reference: str, setups: Sequence[tuple[str, NamedNetwork, Setup]], batch: int, say: Report) -> Comparison:
    opened: list[LoadedTarget] = []
    unusable = []
    for name, network, setup in setups:
        say(f"Preparing {network.name}: {setup.runtime}, {setup.precision or 'fp32'}")
        try:
            contender = load_network(network, setup)
            contender.session.run(random_batches(1, batch, contender.metadata.input_size)[0])
        except OpalError as error:
            if not opened:
                raise
            unusable.append(f"{name}: not usable: {error}")
            continue
        opened.append(contender)
    if len(opened) < 2:
        raise UsageError(f"{setups[0][1].name}: nothing to compare {reference} with here: {'; '.join(unusable)}")
    return Comparison(reference, tuple(opened), tuple(unusable))
