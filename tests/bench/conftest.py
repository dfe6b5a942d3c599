"""Models that take a known time on a fake clock."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.measurement import Target
from opal_deploy.bench.models import TimedModel

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
        self.from_locked = 0

    def submit(self, images):
        self.in_flight.append(images)
        address = images.ctypes.data
        self.from_locked += any(start <= address < start + size for start, size in self.locked.items())
        return images

    def collect(self, handle):
        self.waits.append(len(self.in_flight))
        assert self.in_flight.pop(0) is handle
        return self.run(handle)

    def register_buffer(self, address, size):
        self.locked[address] = size
        return True

    def unregister_buffer(self, address):
        del self.locked[address]


@pytest.fixture
def pipelined():
    """A model on a GPU that takes several batches at a time."""
    return TimedModel(PipelinedSession(), Target("c", runtime="tensorrt", device="cuda:0", precision="fp16"), None)


@pytest.fixture(autouse=True)
def _collections_are_quick():
    """Measurements collect garbage before each run, which takes long in a process that holds a thousand tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def clock(monkeypatch):
    """The timer's clock, which passes only while fake models run."""
    fake = FakeClock()
    monkeypatch.setattr("opal_deploy.bench.timing.time", SimpleNamespace(perf_counter_ns=fake))
    return fake


@pytest.fixture
def fake_model(clock):
    """Makes a model that takes so many seconds a call."""

    def make(takes, name="fake"):
        session = FakeSession(takes if callable(takes) else lambda _: takes, clock.spend)
        return TimedModel(session, Target(name, runtime="onnxruntime", device="cpu", precision="fp32"), 1)

    return make
