"""The comparisons that everybody asks for: what the head costs, which runtime is fastest, what precision buys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

from opal_deploy.bench.compare import Contest
from opal_deploy.bench.harness.buffers import random_batches
from opal_deploy.bench.subjects.names import LINEAR, RUNTIMES
from opal_deploy.bench.subjects.network import NamedNetwork, with_linear_head
from opal_deploy.bench.subjects.opening import Opened, Setup, open_network
from opal_deploy.errors import OpalError, UsageError

Question = Literal["head", "runtime", "precision"]
QUESTIONS: tuple[Question, ...] = get_args(Question)
_PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8")

Say = Callable[[str], None]


def ask(
    question: Question, networks: Iterable[NamedNetwork], setup: Setup, batch: int, say: Say = lambda _: None
) -> Iterator[Contest]:
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


def _head(network: NamedNetwork, setup: Setup, batch: int, say: Say) -> Contest:
    config = network.config
    if config.head.evidence != "exact":
        raise UsageError(f"{network.name}: its head does not explain; give a checkpoint with OPAL's, or --backbone")
    linear = with_linear_head(network)
    setups = [(LINEAR, linear, setup), (network.config.backbone, network, setup)]
    return _contest(LINEAR, setups, batch, say)


def _runtime(network: NamedNetwork, setup: Setup, batch: int, say: Say) -> Contest:
    layouts = {"eager": setup.channels_last, "compile": setup.channels_last}
    setups = [
        (name, network, replace(setup, runtime=name, channels_last=layouts.get(name, False))) for name in RUNTIMES
    ]
    return _contest("eager", setups, batch, say)


def _precision(network: NamedNetwork, setup: Setup, batch: int, say: Say) -> Contest:
    setups = [(name, network, replace(setup, precision=name)) for name in _PRECISIONS]
    return _contest("fp32", setups, batch, say)


def _contest(reference: str, setups: Sequence[tuple[str, NamedNetwork, Setup]], batch: int, say: Say) -> Contest:
    opened: list[Opened] = []
    unusable = []
    for name, network, setup in setups:
        say(f"Preparing {network.name}: {setup.runtime}, {setup.precision or 'fp32'}")
        try:
            contender = open_network(network, setup)
            contender.session.run(random_batches(1, batch, contender.metadata.input_size)[0])
        except OpalError as error:
            if not opened:
                raise
            unusable.append(f"{name}: not usable: {error}")
            continue
        opened.append(contender)
    if len(opened) < 2:
        raise UsageError(f"{setups[0][1].name}: nothing to compare {reference} with here: {'; '.join(unusable)}")
    return Contest(reference, tuple(opened), tuple(unusable))
