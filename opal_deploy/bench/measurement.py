"""The schema of all benchmarks: one measurement is one line of JSON, which `bench report` and `bench diff` read.

A line states what was measured (`kind`, `target`, `case`), how (`settings`, `timed`, `command`), on which machine
(`machine`), under which conditions (`conditions`, `marks`), and the results (`figures`, `details`). `provenance` fills
in machine, command and time, without names of hosts or users.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from opal_deploy.artifact.documents import check_document
from opal_deploy.artifact.files import read_text
from opal_deploy.artifact.output_file import check_output
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.model.config import HeadKind
from opal_deploy.runtime.devices import available_cpus, read_driver

SCHEMA = 1
Kind = Literal["overhead", "latency", "throughput", "compare", "pipeline"]
Better = Literal["higher", "lower"]
Scalar = str | bool | int | float | None
OPAL: HeadKind = "opal"
LINEAR: HeadKind = "linear"
PLAIN: HeadKind = "plain"

# repeats with a larger spread are marked as noisy
NOISY_SPREAD = 0.10
NOISY, THROTTLED = "noisy", "throttled"
_EXPECTED = "give files that `opal-deploy bench` wrote with --out"
# distributions whose versions affect the figures
_DISTRIBUTIONS = (
    "opal-deploy", "onnxruntime", "onnxruntime-gpu", "torch", "torchvision", "tensorrt-cu13", "tensorrt-rtx-cu13",
    "cuda-bindings", "numpy", "pillow",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One number with its unit, repeats and confidence interval.

    Attributes:
        value: in `unit`; the median of the repeats, if there are any.
        unit: such as `images/s`, `ms`, `MACs`, `%`, `MB`, `ratio`.
        better: the direction of an improvement; None if neither is.
        repeats: the values that `value` summarises, in measured order; empty for a count.
        interval: 95 % confidence interval of `value`, if one was computed.
    """

    value: float
    unit: str
    better: Better | None = None
    repeats: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None

    @staticmethod
    def of_repeats(repeats: Iterable[float], unit: str, better: Better | None = None) -> Figure:
        """Return the median of at least one repeat as a figure."""
        values = tuple(float(value) for value in repeats)
        return Figure(statistics.median(values), unit, better, values)

    @property
    def spread(self) -> float | None:
        """(max - min) / |median| of the repeats; None with fewer than two repeats or a median of 0."""
        if len(self.repeats) < 2 or not (middle := statistics.median(self.repeats)):
            return None
        return (max(self.repeats) - min(self.repeats)) / abs(middle)

    @property
    def is_noisy(self) -> bool:
        """Whether the spread of the repeats exceeds NOISY_SPREAD."""
        return self.spread is not None and self.spread > NOISY_SPREAD


@dataclass(frozen=True)
class Target:
    """The measured model, and the runtime, device and precision that it ran in.

    Attributes:
        name: the file's name, or the name of a network that a command built (`resnet50 + opal`).
        backbone: torchvision's name.
        head: `opal`, `linear`, `plain`, or the name of an ablation; see `head_name`.
        runtime: `onnxruntime`, `torch eager`, `torch compile`, `tensorrt` or `tensorrt-rtx`.
        device: `cpu`, or `cuda:0 NVIDIA H200`.
        precision: fp32, tf32, fp16, bf16 or int8.
        layout: memory layout of the images and of the convolutions: `uint8 NHWC; convolutions NCHW`.
        input_size: (H0, W0) in pixels.
        num_classes: C.
        prototypes_per_class: m.
        sha256: digest of the model file; None for a network with random weights.
        options: the runtime's options that differ from its defaults: `prefer_nhwc=1`, `CUDA graphs`.
    """

    name: str
    backbone: str = ""
    head: str = ""
    runtime: str = ""
    runtime_version: str = ""
    device: str = ""
    precision: str = ""
    layout: str = ""
    input_size: tuple[int, int] | None = None
    num_classes: int | None = None
    prototypes_per_class: int | None = None
    sha256: str | None = None
    options: str = ""


@dataclass(frozen=True)
class Measurement:
    """One measurement: one line of JSON.

    Attributes:
        kind: the benchmark that wrote the line.
        target: the measured model.
        case: values that distinguish the line from others of the same kind and target: batch, threads, workers.
        figures: results by name, in reading order.
        settings: how it was measured: seconds, warm-up iterations, buffers.
        timed: description of the timed region; empty for a count.
        marks: reasons for doubt, each one word or `word: reason`: `noisy`, `throttled`, `busy`, `blocking`, `failed`.
        conditions: samples taken during the run: clocks, power, temperature, throttle reasons.
        machine: processor, GPU, driver, versions; see `describe_machine`.
        command: the command line that repeats the measurement.
        when: ISO 8601, UTC.
    """

    kind: Kind
    target: Target
    case: dict[str, Scalar]
    figures: dict[str, Figure]
    settings: dict[str, Any] = field(default_factory=dict)
    timed: str = ""
    marks: tuple[str, ...] = ()
    conditions: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    when: str = ""
    schema: int = SCHEMA

    @property
    def key(self) -> str:
        """A text that two measurements of the same thing share, whatever their time and versions."""
        target = asdict(self.target)
        for changing in ("runtime_version", "sha256"):
            target.pop(changing, None)
        return json.dumps([self.kind, target, self.case], sort_keys=True)

    def to_line(self) -> str:
        """Return one line of JSON without its line end; `from_line` reads it back to an equal object.

        Raises:
            ValueError: a figure is NaN or infinite: a bug of the benchmark.
        """
        return json.dumps(asdict(self), ensure_ascii=True, allow_nan=False)

    @staticmethod
    def from_line(line: str, origin: str = "measurement") -> Measurement:
        """Parse and check one line.

        Raises:
            UsageError: not JSON, another schema, or a field missing or of the wrong type.
        """
        try:
            raw = json.loads(line)
            # refuses NaN, and infinities such as 1e999
            json.dumps(raw, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{origin}: not a line of JSON ({error}); {_EXPECTED}") from None
        if (schema := raw.get("schema") if isinstance(raw, dict) else None) != SCHEMA:
            raise UsageError(f"{origin}: schema {schema!r} found, {SCHEMA} expected; {_EXPECTED}")
        try:
            return check_document(raw, Measurement, "line")
        except ArtifactError as error:
            raise UsageError(f"{origin}: not a measurement: {error}; measure again") from None


def head_name(head: Mapping[str, Any]) -> str:
    """Return `opal`, `linear`, `plain`, or the active parts, from a head's configuration."""
    if head.get("plain"):
        return PLAIN
    parts = [part for part in ("projection", "cws", "anchors") if head.get(part)]
    pooling = head.get("pooling")
    if len(parts) == 3 and pooling == "max":
        distance = head.get("distance", "l2")
        return OPAL if distance == "l2" else f"{OPAL} {distance}"
    if not parts and pooling == "avg":
        return LINEAR
    return "+".join([*parts, str(pooling)])


def read_measurements(paths: Iterable[Path]) -> Iterator[Measurement]:
    """Yield the measurements of JSON lines files in order; a folder stands for its `*.jsonl`. Empty lines are skipped.

    Raises:
        UsageError: a file cannot be read, or a line is not a measurement; the error names file and line.
    """
    for path in itertools.chain.from_iterable(map(_list_files, paths)):
        try:
            # not splitlines: it also splits at characters that JSON allows inside a string
            lines = read_text(path).split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"{path}: cannot be read ({reason}); {_EXPECTED}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Measurement.from_line(line, f"{path}:{number}")


def append_measurement(path: Path, measurement: Measurement) -> None:
    """Append one line to a file; the file and its folder need not exist.

    Raises:
        UsageError: the file cannot be written, or is not a .jsonl file.
    """
    check_output("--out", path, [".jsonl"], overwrite=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(measurement.to_line() + "\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None


def _list_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if not (files := sorted(path.glob("*.jsonl"))):
        raise UsageError(f"{path}: a folder without *.jsonl; {_EXPECTED}")
    return files


@functools.cache
def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, GPUs, driver and versions."""
    driver = read_driver()
    facts: dict[str, Any] = {
        "processor": _read_processor(),
        "cores": os.cpu_count(),
        "usable_cores": available_cpus(),
        "governor": _read_governor(),
        "memory_gb": _read_memory(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {},
    }
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts["versions"][name] = metadata.version(name)
    if driver.gpus:
        facts["gpus"] = [
            {
                "name": gpu.name,
                "memory_gb": None if gpu.memory is None else round(gpu.memory / 1e9, 1),
                "compute_capability": ".".join(map(str, gpu.compute_capability)),
            }
            for gpu in driver.gpus
        ]
        facts["driver"] = driver.version
        facts["cuda"] = None if driver.cuda is None else ".".join(map(str, driver.cuda))
    return facts


def provenance() -> dict[str, Any]:
    """Return the fields of a `Measurement` that every benchmark fills alike: `machine`, `command`, `when`."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"machine": describe_machine(), "command": format_command_line(sys.argv), "when": now}


def format_command_line(arguments: Sequence[str]) -> str:
    """Return the command as it could be typed again, with file names instead of this machine's paths."""
    return shlex.join(["opal-deploy", *(_without_folder(argument) for argument in arguments[1:])])


def _without_folder(argument: str) -> str:
    option, equals, value = argument.partition("=")
    if equals and option.startswith("-"):
        return f"{option}={_without_folder(value)}"
    path = Path(argument)
    has_location = path.is_absolute() or argument.startswith("~") or ".." in path.parts
    return path.name if len(path.parts) > 1 and (has_location or os.path.exists(path)) else argument


def _read_processor() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as stream:
        return next(line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    return platform.processor() or "unknown"


def _read_governor() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip() or None
    return None


def _read_memory() -> float | None:
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    return None
