"""Samples of a machine in trouble, played by fakes of a GPU and of psutil, and the curve of resident memory."""

import json
import mmap
import sys
import time
from types import SimpleNamespace

import pytest

from opal_deploy.bench.monitor import (
    MAX_POINTS,
    CpuSource,
    GpuSource,
    MemoryCurve,
    MemorySampler,
    Monitor,
    monitor_devices,
    peak_memory_mb,
    reset_peak_memory,
)
from opal_deploy.runtime.devices import GpuSensors, NvmlError


class FakeSensors(GpuSensors):
    """A GPU in trouble: `reasons` are played one after the other, the clock falls."""

    def __init__(self, *reasons, name="NVIDIA H200"):
        self.reasons, self.name, self.clock = list(reasons), name, 1980

    def read(self):
        self.clock -= 10
        return {"sm_clock_mhz": self.clock, "power_watts": 699.5}

    def read_clock_reasons(self):
        return self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]


def run(sensors):
    """Monitor a GPU for four samples."""
    with Monitor([GpuSource(sensors, 0)], interval=60) as monitor:
        for _ in range(3):
            monitor.sample()
    return monitor


def test_a_throttling_gpu_is_marked_with_the_reason_and_its_readings_are_summarised():
    monitor = run(FakeSensors([], ["hw_thermal_slowdown"], ["hw_thermal_slowdown", "hw_slowdown"], []))
    assert set(monitor.marks) == {
        "throttled: hw_slowdown (1 of 4 samples)", "throttled: hw_thermal_slowdown (2 of 4 samples)"
    }  # fmt: skip
    assert monitor.conditions["cuda:0"] == {
        "clock_reasons": {"hw_thermal_slowdown": 2, "hw_slowdown": 1},
        "clock_reason_samples": 4,
        "power_watts": {"min": 699.5, "median": 699.5, "max": 699.5},
        "sm_clock_mhz": {"min": 1940, "median": 1955, "max": 1970},
    }


@pytest.mark.parametrize(
    "reasons", [["gpu_idle"], ["applications_clocks_setting"], ["display_clock_setting"], [], None], ids=str
)
def test_harmless_reasons_are_counted_and_not_marked(reasons):
    monitor = run(FakeSensors(reasons))
    conditions, samples = monitor.conditions["cuda:0"], 0 if reasons is None else 4
    assert (monitor.marks, conditions["clock_reason_samples"]) == ((), samples)
    assert conditions["clock_reasons"] == dict.fromkeys(reasons or (), samples)


def test_missing_sources_are_recorded_with_the_reason(monkeypatch):
    def fail(index):
        raise NvmlError(f"no GPU {index}")

    monkeypatch.setattr("opal_deploy.bench.monitor.GpuSensors", fail)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with monitor_devices("cpu", "cuda:9 NVIDIA H200") as monitor:
        pass
    assert monitor.conditions["cuda:9"] == {"not_sampled": "NVML: no GPU 9"}
    assert "psutil is not installed" in monitor.conditions["cpu"]["not_sampled"]
    with pytest.raises(NvmlError, match="is NVIDIA H200, CUDA's is NVIDIA T4"):
        GpuSource(FakeSensors([]), 0, "NVIDIA T4")


class FakePsutil:
    """One CPU: the seconds of this process, of others and of ended children out of each second."""

    def __init__(self, own, others, children=0.0):
        self.own, self.others, self.children, self.seconds = own, others, children, 0

    def Process(self):
        def cpu_times():
            own, children = self.own * self.seconds, self.children * self.seconds
            return SimpleNamespace(user=own, system=0.0, children_user=children)

        return SimpleNamespace(cpu_times=cpu_times, memory_info=lambda: SimpleNamespace(rss=10**8))

    def cpu_times(self, percpu):
        self.seconds += 1
        busy = (self.own + self.others + self.children) * self.seconds
        return [SimpleNamespace(user=busy, system=0.0, idle=self.seconds - busy)] * 64

    def cpu_freq(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("psutil_module", "own_share", "others_share", "marked"),
    [
        (FakePsutil(0.5, 0.05), 0.5, 0.05, False),
        (FakePsutil(0.5, 0.3), 0.5, 0.3, True),
        (FakePsutil(0.25, 0.0, children=0.5), 0.75, 0.0, False),
    ],
    ids=["quiet", "busy", "own children"],
)
def test_cpu_time_of_other_processes_is_marked(monkeypatch, psutil_module, own_share, others_share, marked):
    monkeypatch.setattr("opal_deploy.bench.monitor.available_cpu_ids", lambda: {0})
    with Monitor([CpuSource(psutil_module)]) as monitor:
        pass
    conditions = monitor.conditions["cpu"]
    assert (conditions["own_share"], conditions["others_share"]) == (own_share, others_share)
    assert bool(monitor.marks) is marked
    assert all(mark.startswith("busy: other processes took 30%") for mark in monitor.marks)


def curve(*megabytes):
    return MemoryCurve(tuple(0.5 * index for index in range(len(megabytes))), megabytes)


@pytest.mark.parametrize(
    ("megabytes", "rise", "text"),
    [
        ((*range(100, 200, 10), *([200.0] * 30)), 0, "flat: "),
        ([200 + 3.0 * index for index in range(41)], 90.0, "GROWING: +90.0 MB"),
        ([1000 + 8.0 * index / 40 for index in range(41)], 6.0, "flat: +6.0 MB"),
        ([1000 + 40.0 * index / 40 for index in range(41)], 30.0, "flat: +30.0 MB"),
        ([100, 200, 300], None, "too short for a trend"),
    ],
    ids=["loaded at the start", "a leak", "under 10 MB", "under 5 %", "few samples"],
)
def test_growth_is_judged_after_the_first_quarter(megabytes, rise, text):
    memory = curve(*megabytes)
    assert memory.rise == (None if rise is None else pytest.approx(rise, abs=1e-9))
    assert memory.grows is ("GROWING" in text)
    assert text in memory.describe()


@pytest.mark.parametrize("count", [1, 60, 61, 1000])
def test_a_curve_is_thinned_and_keeps_both_ends(count):
    memory = curve(*map(float, range(count)))
    document = json.loads(json.dumps(memory.to_dict()))
    assert len(document["seconds"]) == len(document["megabytes"]) == min(count, MAX_POINTS)
    assert (document["megabytes"][0], document["megabytes"][-1]) == (0, count - 1)
    assert [document[name] for name in ("samples", "start", "end", "peak")] == [count, 0, count - 1, count - 1]


def test_memory_that_a_process_takes_and_frees_is_seen():
    with MemorySampler(0.005) as sampler:
        time.sleep(0.05)
        # mapped, so that it goes back to the system when it is freed; written to, so that it is resident
        block = mmap.mmap(-1, 80_000_000)
        block[::4096] = b"x" * len(range(0, 80_000_000, 4096))
        time.sleep(0.1)
        block.close()
        time.sleep(0.05)
    memory = sampler.curve
    assert len(memory.seconds) > 10
    assert list(memory.seconds) == sorted(memory.seconds)
    assert max(memory.megabytes) - memory.megabytes[0] > 60
    assert max(memory.megabytes) - memory.megabytes[-1] > 60


def test_the_peak_can_be_reset():
    block = bytearray(200 << 20)
    for page in range(0, len(block), 4096):
        block[page] = 1
    high = peak_memory_mb()
    del block
    reset_peak_memory()
    # where the system cannot reset it, it stays
    assert peak_memory_mb() < high - 100 or peak_memory_mb() == high
