"""The schema of all benchmarks: one measurement is one line of JSON, which `bench report` and `bench diff` read.

A line says what was measured (`kind`, `subject`, `case`), how (`settings`, `timed`, `command`), on which machine
(`machine`), under which conditions (`conditions`, `marks`), and the results (`figures`, `details`).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadKind

SCHEMA = 1
Kind = Literal["overhead", "roofline", "ceiling", "latency", "throughput", "server", "compare", "pipeline"]
Better = Literal["higher", "lower"]
Scalar = str | int | float | bool | None
OPAL: HeadKind = "opal"
LINEAR: HeadKind = "linear"
PLAIN: HeadKind = "plain"

# repeats with a larger spread are marked as noisy
NOISY_SPREAD = 0.10
NOISY, THROTTLED = "noisy", "throttled"

# JSON keys of version 1 that differ from the field's name
_JSON_KEYS = {"target": "subject"}
_EXPECTED = "give files that `opal-deploy bench` wrote with --out"


@dataclass(frozen=True)
class Figure:
    """One number with its unit, repeats and confidence interval.

    Attributes:
        value: in `unit`; the median where there are repeats.
        unit: such as `images/s`, `ms`, `MACs`, `%`, `MB`, `ratio`.
        better: the direction of an improvement; None where neither is.
        repeats: the values that `value` summarises, in the order measured; empty for a count.
        interval: 95 % confidence interval of `value`, where one was computed.
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
    """The model that was measured, and the runtime, device and precision that it ran in.

    Attributes:
        name: the file's name, or the name of a network that a command built (`resnet50 + opal`).
        backbone: torchvision's name.
        head: `opal`, `linear`, `plain`, or the name of an ablation; see `head_name`.
        runtime: `onnxruntime`, `torch eager`, `torch compile`, `tensorrt` or `tensorrt-rtx`.
        runtime_version: version of the runtime.
        device: `cpu`, or `cuda:0 NVIDIA H200`.
        precision: fp32, tf32, fp16, bf16 or int8.
        layout: memory layout of the images and of the convolutions: `uint8 NHWC; convolutions NCHW`.
        input_size: (H0, W0) in pixels.
        num_classes: C.
        prototypes_per_class: m.
        sha256: digest of the model's file; None for a network with random weights.
        options: of the runtime, where they are not its defaults: `prefer_nhwc=1`, `CUDA graphs`.
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
        target: the model that was measured; None for a measurement of the machine itself. Its JSON key is `subject`.
        case: values that tell the line from others of the same kind and target: batch, threads, scenario, workers.
        figures: results by name, in the order a person would read them.
        settings: how it was measured: seconds, warm-up iterations, buffers.
        timed: description of the timed region; empty for a count.
        marks: `noisy`, `throttled` and other reasons for doubt, each one word or `word: reason`.
        conditions: samples taken during the run: clocks, power, temperature, throttle reasons.
        machine: processor, GPU, driver, versions; see `bench.machine`.
        details: values that only this kind has.
        command: the command line that repeats the measurement.
        when: ISO 8601, UTC.
    """

    kind: Kind
    target: Target | None
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
        """A text that is equal for two measurements of the same thing, whenever and with whatever versions."""
        target = asdict(self.target) if self.target is not None else {}
        for changing in ("runtime_version", "sha256"):
            target.pop(changing, None)
        return json.dumps([self.kind, target, self.case], sort_keys=True)

    def to_line(self) -> str:
        """Return one line of JSON without its line end; `from_line` reads it back to an equal object.

        Raises:
            ValueError: a figure is NaN or infinite: a bug of the benchmark.
        """
        document = {_JSON_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps(document, ensure_ascii=True, allow_nan=False)

    @staticmethod
    def from_line(line: str, origin: str = "measurement") -> Measurement:
        """Parse and check one line.

        Args:
            line: JSON.
            origin: names the line in errors.

        Raises:
            UsageError: not JSON, another schema, or a field missing or of the wrong shape.
        """
        try:
            raw = json.loads(line, parse_constant=_reject_constant, parse_float=_parse_finite)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{origin}: not a line of JSON ({error}); give files that `opal-deploy bench` wrote"
            ) from None
        if not isinstance(raw, dict):
            raise UsageError(f"{origin}: {type(raw).__name__} found, an object expected; {_EXPECTED}")
        schema = raw.get("schema")
        if isinstance(schema, bool) or schema != SCHEMA:
            raise UsageError(f"{origin}: schema {schema!r} found, {SCHEMA} expected; {_EXPECTED}")
        try:
            return _parse_measurement(raw)
        except ValueError as error:
            raise UsageError(f"{origin}: not a measurement of schema {SCHEMA}: {error}; measure again") from None


def head_name(head: Mapping[str, Any]) -> str:
    """Return `opal`, `linear`, `plain`, or the parts that are on, from a head's configuration."""
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
    """Yield the measurements of JSON lines files, in order; a folder stands for its `*.jsonl`; empty lines are skipped.

    Raises:
        UsageError: a file cannot be read, or a line is not a measurement; the error names file and line.
    """
    for path in itertools.chain.from_iterable(map(_list_files, paths)):
        try:
            # not splitlines: it also splits at characters that JSON allows inside a string
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"{path}: cannot be read ({reason}); {_EXPECTED}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Measurement.from_line(line, f"{path}:{number}")


def append_measurement(path: Path, measurement: Measurement) -> None:
    """Append one line to a file; the file and its folder need not exist.

    Raises:
        UsageError: the file cannot be written.
    """
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


def _parse_measurement(raw: dict[str, Any]) -> Measurement:
    values = _read_fields(Measurement, raw, "")
    if values["kind"] not in get_args(Kind):
        raise ValueError(f"kind is {values['kind']!r}, expected one of {', '.join(get_args(Kind))}")
    for name in ("case", "figures", "settings", "conditions", "machine", "details"):
        _require(isinstance(values.get(name, {}), dict), name, "an object")
    for name in ("timed", "command", "when"):
        _require(isinstance(values.get(name, ""), str), name, "a text")
    for name, value in values["case"].items():
        _require(value is None or isinstance(value, Scalar), f"case.{name}", "a text, a number, true, false or null")
    marks = values.get("marks", [])
    _require(isinstance(marks, list) and all(isinstance(mark, str) for mark in marks), "marks", "a list of texts")
    values["marks"] = tuple(marks)
    if values["target"] is not None:
        _require(isinstance(values["target"], dict), "subject", "an object or null")
        values["target"] = _parse_target(values["target"])
    values["figures"] = {name: _parse_figure(f"figures.{name}", figure) for name, figure in values["figures"].items()}
    return Measurement(**values)


def _parse_target(raw: dict[str, Any]) -> Target:
    values = _read_fields(Target, raw, "subject.")
    for name in ("name", "backbone", "head", "runtime", "runtime_version", "device", "precision", "layout", "options"):
        _require(isinstance(values.get(name, ""), str), f"subject.{name}", "a text")
    for name in ("num_classes", "prototypes_per_class"):
        _require(values.get(name) is None or _is_count(values[name]), f"subject.{name}", "a whole number or null")
    _require(isinstance(values.get("sha256"), str | None), "subject.sha256", "a text or null")
    if (size := values.get("input_size")) is not None:
        fits = isinstance(size, list) and len(size) == 2 and all(map(_is_count, size))
        _require(fits, "subject.input_size", "[H0, W0] or null")
        values["input_size"] = (size[0], size[1])
    return Target(**values)


def _parse_figure(name: str, raw: Any) -> Figure:
    _require(isinstance(raw, dict), name, "an object")
    values = _read_fields(Figure, raw, f"{name}.")
    values["value"] = _parse_number(values["value"], f"{name}.value")
    _require(isinstance(values["unit"], str), f"{name}.unit", "a text")
    _require(values.get("better") in (None, *get_args(Better)), f"{name}.better", "higher, lower or null")
    repeats = values.get("repeats", [])
    _require(isinstance(repeats, list), f"{name}.repeats", "a list of numbers")
    values["repeats"] = tuple(_parse_number(value, f"{name}.repeats") for value in repeats)
    if (interval := values.get("interval")) is not None:
        _require(isinstance(interval, list) and len(interval) == 2, f"{name}.interval", "two numbers or null")
        low, high = (_parse_number(value, f"{name}.interval") for value in interval)
        _require(low <= high, f"{name}.interval", "[low, high]")
        values["interval"] = (low, high)
    return Figure(**values)


def _read_fields(kind: type[Any], raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of `kind`; unknown keys come from a newer writer of the same schema and are ignored."""
    values = {}
    for f in fields(kind):
        key = _JSON_KEYS.get(f.name, f.name)
        if key in raw:
            values[f.name] = raw[key]
        elif f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where}{key} is missing")
    return values


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_number(value: Any, name: str) -> float:
    _require(isinstance(value, int | float) and not isinstance(value, bool), name, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    _require(math.isfinite(number), name, "a finite number")
    return number


def _require(holds: bool, name: str, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is not {expected}")


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def _parse_finite(text: str) -> float:
    # 1e999 is valid JSON, and infinity in floating point
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
