"""Sessions that take a known time, on a clock of their own or by sleeping."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.measurement import Target
from opal_deploy.bench.targets.loading import LoadedTarget
from opal_deploy.runtime.session import ImageBatch

METADATA = Metadata(("a", "b"), 1, {"distance": "l2", "epsilon": 1e-8}, "none", "none", (1, 1), (8, 8))


@dataclass
class FakeClock:
    """Nanoseconds that pass only when somebody lets them; `slower` makes each spell that much longer than the last."""

    now: int = 0
    slower: float = 1.0
    _factor: float = field(default=1.0, init=False)

    def __call__(self) -> int:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += math.ceil(seconds * self._factor * 1e9)
        self._factor *= self.slower


@dataclass
class StandIn:
    """A session that answers after `takes(N)` seconds, spent by `spend`."""

    takes: Callable[[int], float]
    spend: Callable[[float], None] = time.sleep
    batches: list[int] = field(default_factory=list)
    metadata: Metadata = METADATA
    description: str = "a stand-in"

    def run(self, images: ImageBatch) -> Outputs:
        self.batches.append(len(images))
        self.spend(self.takes(len(images)))
        return Outputs(np.zeros((len(images), 2), np.float32))


MakeOpened = Callable[..., LoadedTarget]


@pytest.fixture(autouse=True, scope="module")
def _collections_are_quick() -> Iterator[None]:
    """Measurements collect garbage before each turn, which takes long in a process that holds a thousand tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fake_clock() -> Callable[..., FakeClock]:
    return FakeClock


@pytest.fixture
def opened() -> MakeOpened:
    """Makes a model that takes so many seconds a call; options are the stand-in's and the subject's name."""

    def make(
        takes: float | Callable[[int], float], spend: Callable[[float], None] = time.sleep, name: str = "stand-in"
    ) -> LoadedTarget:
        session = StandIn(takes if callable(takes) else lambda _: takes, spend)
        return LoadedTarget(session, Target(name, runtime="onnxruntime", device="cpu", precision="fp32"), 1)

    return make
