"""What is sampled during a run, with stand-ins for NVML and psutil that play a machine in trouble."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from opal_deploy.bench.monitor import CpuSource, GpuSource, Monitor, SourceUnavailable, monitor_devices


class StandInNvml:
    """The part of `pynvml` that is called; `reasons` are played one after the other."""

    class NVMLError(Exception):
        pass

    def __init__(self, *reasons: int, name: str = "NVIDIA H200", silent: tuple[str, ...] = ()) -> None:
        self.reasons, self.name, self.silent = list(reasons), name, silent
        self.asked: list[Any] = []
        self.clock = 1980

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.asked.append(index)
        if index > 7:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.name

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        self._speak("clocks")
        self.clock -= 10 if kind == 1 else 0
        return self.clock if kind == 1 else 3201

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._speak("power")
        return 699_500

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 88

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=100)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=5_000_000_000)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        self._speak("reasons")
        return self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]

    def _speak(self, what: str) -> None:
        if what in self.silent:
            raise self.NVMLError("Not Supported")


def run(nvml: StandInNvml, samples: int = 4) -> Monitor:
    source = GpuSource(nvml, 0)
    monitor = Monitor([source], interval=0.001)
    with monitor:
        while source._samples < samples and "reasons" not in nvml.silent:
            time.sleep(0.001)
    return monitor


def test_a_throttling_gpu_is_marked_with_the_reason() -> None:
    monitor = run(StandInNvml(0, 0x40, 0x40 | 0x8, 0))

    words = [mark.split(" (")[0] for mark in monitor.marks]
    assert sorted(words) == ["throttled: hw_slowdown", "throttled: hw_thermal_slowdown"]
    assert "throttled: hw_thermal_slowdown (2 of " in " ".join(monitor.marks)
    assert monitor.conditions["cuda:0"]["clock_reasons"] == {"hw_thermal_slowdown": 2, "hw_slowdown": 1}


@pytest.mark.parametrize("harmless", [0x1, 0x2, 0x100, 0])
def test_what_is_no_throttling_is_recorded_and_not_marked(harmless: int) -> None:
    monitor = run(StandInNvml(harmless))

    assert monitor.marks == ()
    assert sum(monitor.conditions["cuda:0"]["clock_reasons"].values()) == (
        monitor.conditions["cuda:0"]["clock_reason_samples"] if harmless else 0
    )


def test_clocks_power_temperature_and_memory_are_summed_up() -> None:
    found = run(StandInNvml(0)).conditions["cuda:0"]

    assert found["power_watts"] == {"min": 699.5, "median": 699.5, "max": 699.5}
    assert found["sm_clock_mhz"]["min"] < found["sm_clock_mhz"]["median"] < found["sm_clock_mhz"]["max"] == 1970
    assert found["temperature_celsius"]["max"] == 88
    assert found["memory_used_mb"]["max"] == 5000


def test_what_a_gpu_does_not_tell_is_left_out() -> None:
    found = run(StandInNvml(0, silent=("power", "clocks"))).conditions["cuda:0"]

    assert "power_watts" not in found
    assert "temperature_celsius" in found


def test_a_driver_that_tells_no_reasons_marks_nothing() -> None:
    monitor = run(StandInNvml(0x40, silent=("reasons",)))

    assert monitor.marks == ()
    assert monitor.conditions["cuda:0"]["clock_reason_samples"] == 0


@pytest.mark.parametrize(("visible", "asked"), [("3,1", 1), ("GPU-aa,GPU-bb", "GPU-bb"), ("", 1)])
def test_the_gpu_is_the_one_that_cuda_counts(monkeypatch: pytest.MonkeyPatch, visible: str, asked: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = StandInNvml(0)

    GpuSource(nvml, 1)

    assert nvml.asked == [asked]


def test_another_gpu_than_cudas_is_not_sampled() -> None:
    with pytest.raises(SourceUnavailable, match="is NVIDIA H200, CUDA's is NVIDIA T4"):
        GpuSource(StandInNvml(0), 0, "NVIDIA T4")


def test_a_gpu_that_nvml_does_not_know_is_not_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandInNvml(0))
    with monitor_devices("cuda:9 NVIDIA H200") as monitor:
        pass

    assert monitor.conditions["cuda:9"] == {"not_sampled": "NVML: Invalid Argument"}


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
    monkeypatch.setattr("opal_deploy.bench.monitor._usable_cpus", lambda: {0})
    with Monitor([CpuSource(StandInPsutil(0.5, others))]) as monitor:
        pass

    assert monitor.conditions["cpu"]["others_share"] == others
    assert monitor.conditions["cpu"]["own_share"] == 0.5
    assert any(mark.startswith("busy: other processes took 30%") for mark in monitor.marks) is marked


def test_processes_of_our_own_are_not_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opal_deploy.bench.monitor._usable_cpus", lambda: {0})
    with Monitor([CpuSource(StandInPsutil(0.25, 0.0, children=0.5))]) as monitor:
        pass

    assert (monitor.conditions["cpu"]["others_share"], monitor.conditions["cpu"]["own_share"]) == (0.0, 0.75)
    assert not monitor.marks


def test_the_real_processor_is_sampled() -> None:
    monitor = Monitor([CpuSource(psutil)], interval=0.01)
    with monitor:
        time.sleep(0.05)

    assert monitor.conditions["cpu"]["resident_mb"]["max"] > 10
