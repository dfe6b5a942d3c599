"""Which of several is faster, and by how much: measured in turns, so that what changes with time changes for all.

In each round every contender runs once, in the order A B C in even rounds and C B A in odd ones: a machine that slows
down steadily then favours nobody. A turn is one batch that does not count, to fill the caches again, and then a fixed
number of batches, chosen beforehand so that a turn takes about `turn_seconds`. The ratio of a round is B's images per
second by A's of the same round. The median of those ratios is told with its bootstrap interval.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from opal_deploy.bench.batch_timing import rotating
from opal_deploy.bench.harness.machine import provenance
from opal_deploy.bench.harness.monitor import watch
from opal_deploy.bench.harness.timing import Clock, time_calls, warm_up
from opal_deploy.bench.record import NOISY, NOISY_SPREAD, Figure, Measurement
from opal_deploy.bench.subjects.opening import Opened
from opal_deploy.statistics.samples import median, paired_ratios, spread

TURN_SECONDS = 0.3
METHOD = (
    "turns: A B, then B A, and so on; each turn one batch that does not count, then the batches that do; ratio of the "
    "two in one round; median over rounds with a 95 % percentile bootstrap interval"
)


@dataclass(frozen=True)
class Plan:
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
    turn_seconds: float = TURN_SECONDS
    warm_up_seconds: float = 1.0
    buffers: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Contest:
    """What runs in turns: the first is what all others are compared with.

    Attributes:
        reference: how the first is called in the record, such as `linear`, `eager`, `fp32`.
        contenders: at least two.
        unusable: what else was asked for, and why it cannot run here.
    """

    reference: str
    contenders: tuple[Opened, ...]
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turns:
    """What came out for one contender: images a second in each round, batches a turn, calls thrown away before."""

    rates: tuple[float, ...]
    batches: int
    warm_up_calls: int


Advance = Callable[[int, int], None]


def take_turns(
    contenders: Sequence[Opened],
    plan: Plan,
    *,
    advance: Advance = lambda *_: None,
    clock: Clock = time.perf_counter_ns,
) -> list[Turns]:
    """Let them run in turns.

    Args:
        contenders: two or more.
        plan: how.
        advance: told how many rounds of how many are done.
        clock: nanoseconds.
    """
    calls = [rotating(contender, plan.batch, plan.buffers, plan.seed) for contender in contenders]
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
    return [Turns(tuple(found), count, warm.calls) for found, count, warm in zip(rates, counts, warmed, strict=True)]


def measurements(
    contest: Contest, plan: Plan, question: str | None = None, *, advance: Advance = lambda *_: None
) -> list[Measurement]:
    """Run a contest: one line a contender but the first, which all are compared with."""
    with watch(*(contender.subject.device for contender in contest.contenders)) as monitor:
        turns = take_turns(contest.contenders, plan, advance=advance)
    reference, *others = zip(contest.contenders, turns, strict=True)
    return [
        replace(found, conditions=monitor.conditions, marks=(*monitor.marks, *found.marks))
        for found in (_measurement(contest, plan, question, reference, other) for other in others)
    ]


def _measurement(
    contest: Contest,
    plan: Plan,
    question: str | None,
    reference: tuple[Opened, Turns],
    candidate: tuple[Opened, Turns],
) -> Measurement:
    (a, a_turns), (b, b_turns) = reference, candidate
    ratios = paired_ratios(b_turns.rates, a_turns.rates)
    middle = median(ratios)
    marks = []
    if spread(ratios) > NOISY_SPREAD:
        marks.append(f"{NOISY}: the rounds' ratios differ by {spread(ratios):.0%}")
    return Measurement(
        kind="compare",
        subject=b.subject,
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
        details={"reference": asdict(a.subject), "reference_timed": a.timed},
        **provenance(),
    )
