"""Models that take a known time on a fake clock."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.compare import time_interleaved
from opal_deploy.bench.measurement import Target
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.bench.timing import time_repeats
from opal_deploy.runtime.session import BatchTimes

METADATA = Metadata(("a", "b"), 1, {"distance": "l2", "epsilon": 1e-8}, "none", "none", (1, 1), (8, 8))


@dataclass
class FakeClock:
    """Nanoseconds that pass only in `spend`; `slower` makes each spell that much longer than the last."""

    now: int = 0
    slower: float = 1.0
    _factor: float = field(default=1.0, init=False)

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += math.ceil(seconds * self._factor * 1e9)
        self._factor *= self.slower


@dataclass(eq=False)
class FakeSession:
    """A session that takes `takes(N)` seconds a call, spent by `spend`."""

    takes: Callable[[int], float]
    spend: Callable[[float], None]
    batches: list[int] = field(default_factory=list)
    metadata: Metadata = METADATA
    device: str = "cpu"
    description: str = "a fake"

    def run(self, images):
        self.batches.append(len(images))
        self.spend(self.takes(len(images)))
        return Outputs(np.zeros((len(images), 2), np.float32))


class PipelinedSession(FakeSession):
    """Takes three batches at a time, and page-locked memory.

    `waits` has the number in flight whenever one is waited for, `from_locked` counts batches in page-locked memory.
    """

    depth = 3

    def __init__(self):
        super().__init__(lambda _: 0, lambda _: None, device="cuda:0")
        self.in_flight, self.waits, self.locked = [], [], {}
        self.from_locked = self.alone = 0

    def submit(self, images):
        self.in_flight.append(images)
        address = images.ctypes.data
        self.from_locked += any(start <= address < start + size for start, size in self.locked.items())
        return images

    def collect(self, handle):
        self.waits.append(len(self.in_flight))
        assert self.in_flight.pop(0) is handle
        return super().run(handle)

    def run(self, images):
        self.alone += 1
        return super().run(images)

    def run_staged(self, images):
        return super().run(images), BatchTimes(0.002, 0.003, 0.001)

    def register_buffer(self, address, size):
        self.locked[address] = size
        return True

    def unregister_buffer(self, address):
        del self.locked[address]


@pytest.fixture
def pipelined():
    """A model on a GPU that takes several batches at a time, and its session."""
    session = PipelinedSession()
    return LoadedTarget(session, Target("c", runtime="tensorrt", device="cuda:0", precision="fp16"), None), session


@pytest.fixture(autouse=True)
def _collections_are_quick():
    """Measurements collect garbage before each run, which takes long in a process that holds a thousand tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fake_clock():
    return FakeClock


@pytest.fixture
def fake_time(monkeypatch):
    """A clock for all timers, which passes only while fake models run."""
    clock = FakeClock()
    for timer in (time_repeats, time_interleaved):
        monkeypatch.setitem(timer.__kwdefaults__, "clock", clock)
    return clock


@pytest.fixture
def fake_target():
    """Makes a model that takes so many seconds a call."""

    def make(takes, spend, name="fake"):
        session = FakeSession(takes if callable(takes) else lambda _: takes, spend)
        return LoadedTarget(session, Target(name, runtime="onnxruntime", device="cpu", precision="fp32"), 1)

    return make
