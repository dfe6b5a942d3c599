"""What is sampled during a run, with stand-ins for a GPU and psutil that play a machine in trouble."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from opal_deploy.bench.monitor import CpuSource, GpuSource, Monitor, SourceUnavailable, monitor_devices
from opal_deploy.runtime.nvml import GpuSensors, NvmlError


class FakeSensors(GpuSensors):
    """A GPU in trouble: `reasons` are played one after the other, the clock falls."""

    def __init__(self, *reasons: list[str] | None, name: str = "NVIDIA H200") -> None:
        self.reasons, self.name, self.clock = list(reasons), name, 1980

    def read(self) -> dict[str, float]:
        self.clock -= 10
        return {"sm_clock_mhz": self.clock, "power_watts": 699.5}

    def read_clock_reasons(self) -> list[str] | None:
        return self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]


def run(sensors: FakeSensors, samples: int = 4) -> Monitor:
    source = GpuSource(sensors, 0)
    monitor = Monitor([source], interval=0.001)
    with monitor:
        while source._samples < samples and sensors.reasons != [None]:
            time.sleep(0.001)
    return monitor


def test_a_throttling_gpu_is_marked_with_the_reason() -> None:
    monitor = run(FakeSensors([], ["hw_thermal_slowdown"], ["hw_thermal_slowdown", "hw_slowdown"], []))

    words = [mark.split(" (")[0] for mark in monitor.marks]
    assert sorted(words) == ["throttled: hw_slowdown", "throttled: hw_thermal_slowdown"]
    assert "throttled: hw_thermal_slowdown (2 of " in " ".join(monitor.marks)
    assert monitor.conditions["cuda:0"]["clock_reasons"] == {"hw_thermal_slowdown": 2, "hw_slowdown": 1}


@pytest.mark.parametrize("harmless", [["gpu_idle"], ["applications_clocks_setting"], ["display_clock_setting"], []])
def test_what_is_no_throttling_is_recorded_and_not_marked(harmless: list[str]) -> None:
    monitor = run(FakeSensors(harmless))

    assert monitor.marks == ()
    assert sum(monitor.conditions["cuda:0"]["clock_reasons"].values()) == (
        monitor.conditions["cuda:0"]["clock_reason_samples"] if harmless else 0
    )


def test_readings_are_summed_up() -> None:
    conditions = run(FakeSensors([])).conditions["cuda:0"]

    assert conditions["power_watts"] == {"min": 699.5, "median": 699.5, "max": 699.5}
    clock = conditions["sm_clock_mhz"]
    assert clock["min"] < clock["median"] < clock["max"] == 1970


def test_a_driver_that_tells_no_reasons_marks_nothing() -> None:
    monitor = run(FakeSensors(None))

    assert monitor.marks == ()
    assert monitor.conditions["cuda:0"]["clock_reason_samples"] == 0


def test_another_gpu_than_cudas_is_not_sampled() -> None:
    with pytest.raises(SourceUnavailable, match="is NVIDIA H200, CUDA's is NVIDIA T4"):
        GpuSource(FakeSensors([]), 0, "NVIDIA T4")


def test_a_gpu_that_nvml_does_not_know_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> GpuSensors:
        raise NvmlError(f"no GPU {index}")

    monkeypatch.setattr("opal_deploy.bench.monitor.GpuSensors", fail)
    with monitor_devices("cuda:9 NVIDIA H200") as monitor:
        pass

    assert monitor.conditions["cuda:9"] == {"not_sampled": "NVML: no GPU 9"}


def test_a_missing_package_is_said_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with monitor_devices("cpu") as monitor:
        pass

    assert "psutil is not installed" in monitor.conditions["cpu"]["not_sampled"]


class StandInPsutil:
    """One processor that counts up: `ours`, `others` and our ended processes' seconds out of each second."""

    def __init__(self, ours: float, others: float, children: float = 0.0) -> None:
        self.ours, self.others, self.children, self.seconds = ours, others, children, 0

    def Process(self) -> Any:
        def cpu_times() -> Any:
            children = self.children * self.seconds
            return SimpleNamespace(user=self.ours * self.seconds, system=0.0, children_user=children)

        return SimpleNamespace(cpu_times=cpu_times, memory_info=lambda: SimpleNamespace(rss=10**8))

    def cpu_times(self, percpu: bool) -> list[Any]:
        self.seconds += 1
        busy = (self.ours + self.others + self.children) * self.seconds
        return [SimpleNamespace(user=busy, system=0.0, idle=self.seconds - busy)] * 64

    def cpu_freq(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(("others", "marked"), [(0.05, False), (0.3, True)])
def test_a_busy_machine_is_marked(monkeypatch: pytest.MonkeyPatch, others: float, marked: bool) -> None:
    monkeypatch.setattr("opal_deploy.bench.monitor.available_cpu_ids", lambda: {0})
    with Monitor([CpuSource(StandInPsutil(0.5, others))]) as monitor:
        pass

    assert monitor.conditions["cpu"]["others_share"] == others
    assert monitor.conditions["cpu"]["own_share"] == 0.5
    assert any(mark.startswith("busy: other processes took 30%") for mark in monitor.marks) is marked


def test_processes_of_our_own_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opal_deploy.bench.monitor.available_cpu_ids", lambda: {0})
    with Monitor([CpuSource(StandInPsutil(0.25, 0.0, children=0.5))]) as monitor:
        pass

    assert (monitor.conditions["cpu"]["others_share"], monitor.conditions["cpu"]["own_share"]) == (0.0, 0.75)
    assert not monitor.marks


def test_the_real_processor_is_sampled() -> None:
    monitor = Monitor([CpuSource(psutil)], interval=0.01)
    with monitor:
        time.sleep(0.05)

    assert monitor.conditions["cpu"]["resident_mb"]["max"] > 10
