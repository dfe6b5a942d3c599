"""One measurement is one JSON line of one schema; `bench report` and `bench diff` read nothing else.

A line says what was measured (`kind`, `subject`, `case`), how (`settings`, `timed`, `command`), on what (`machine`),
under which conditions (`conditions`, `marks`), and what came out (`figures`, `details`).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from opal_deploy.errors import UsageError

SCHEMA = 1
Kind = Literal["overhead", "roofline", "ceiling", "latency", "throughput", "server", "compare", "pipeline"]
Better = Literal["higher", "lower"]
Scalar = str | int | float | bool | None

# a spread over this is marked: the machine was not quiet
NOISY_SPREAD = 0.10
NOISY, THROTTLED = "noisy", "throttled"

_EXPECTED = "give files that `opal-deploy bench` wrote with --out"


@dataclass(frozen=True)
class Figure:
    """One number with what it takes to defend it.

    Attributes:
        value: in `unit`; the median where there are repeats.
        unit: such as `images/s`, `ms`, `MACs`, `%`, `MB`, `ratio`.
        better: which direction is an improvement; None where neither is.
        repeats: what `value` sums up, in the order measured; empty for what was counted.
        interval: 95 % confidence interval of `value`, where one was computed.
    """

    value: float
    unit: str
    better: Better | None = None
    repeats: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None

    @staticmethod
    def of_repeats(repeats: Iterable[float], unit: str, better: Better | None = None) -> Figure:
        """The median of several repeats, at least one."""
        values = tuple(float(value) for value in repeats)
        return Figure(statistics.median(values), unit, better, values)

    @property
    def spread(self) -> float | None:
        """(largest - smallest) / median of the repeats; None with fewer than two."""
        if len(self.repeats) < 2 or not (middle := statistics.median(self.repeats)):
            return None
        return (max(self.repeats) - min(self.repeats)) / abs(middle)

    @property
    def is_noisy(self) -> bool:
        """Whether the repeats differ by more than NOISY_SPREAD."""
        return self.spread is not None and self.spread > NOISY_SPREAD


@dataclass(frozen=True)
class Target:
    """What was measured.

    Attributes:
        name: for a person: the file's name, or what a command built (`resnet50 + OPAL`).
        backbone: torchvision's name. head: `opal`, `linear`, or the name of an ablation.
        runtime: software that ran it: `onnxruntime`, `torch eager`, `torch compile`, `tensorrt`, `tensorrt-rtx`.
        runtime_version: of it.
        device: `cpu`, or `cuda:0 NVIDIA H200`.
        precision: fp32, tf32, fp16, bf16, int8.
        layout: of the pictures and of the convolutions: `uint8 NHWC; convolutions NCHW`.
        input_size: (H0, W0).
        num_classes, prototypes_per_class: C, m.
        sha256: of the artifact; None for what a command built with random weights.
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


@dataclass(frozen=True)
class Measurement:
    """One line.

    Attributes:
        kind: which command's.
        subject: what was measured; None for a measurement of the machine itself.
        case: what tells this line from others of the same kind and subject: batch, threads, scenario, workers.
        figures: by name, in the order a person would read them.
        settings: how it was measured: seconds, warm-up iterations, buffers.
        timed: what is inside the timed region, in words; empty for what was counted.
        marks: `noisy`, `throttled`, and other doubts, each one word or `word: reason`.
        conditions: what was sampled during the run: clocks, power, temperature, throttle reasons.
        machine: processor, GPU, driver, versions; see `bench.machine`.
        details: what belongs to this kind alone.
        command: that gives it again. when: ISO 8601, UTC.
    """

    kind: Kind
    subject: Target | None
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
        """Equal for two measurements of the same thing, whenever and with whatever versions they were taken."""
        what = asdict(self.subject) if self.subject is not None else {}
        for changing in ("runtime_version", "sha256"):
            what.pop(changing, None)
        return json.dumps([self.kind, what, self.case], sort_keys=True)

    def to_line(self) -> str:
        """One line of JSON without its end; `from_line` reads it back to an equal object.

        Raises:
            ValueError: a figure is not finite: a bug of the command that measured it.
        """
        return json.dumps(asdict(self), ensure_ascii=True, allow_nan=False)

    @staticmethod
    def from_line(line: str, origin: str = "measurement") -> Measurement:
        """Parse and check one line; `origin` names it in errors.

        Raises:
            UsageError: not JSON, another schema, or a field missing or of the wrong shape.
        """
        try:
            raw = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{origin}: not a line of JSON ({error}); give files that `opal-deploy bench` wrote"
            ) from None
        if not isinstance(raw, dict):
            raise UsageError(f"{origin}: {type(raw).__name__} found, an object expected; {_EXPECTED}")
        found = raw.get("schema")
        if isinstance(found, bool) or found != SCHEMA:
            raise UsageError(f"{origin}: schema {found!r} found, {SCHEMA} expected; {_EXPECTED}")
        try:
            return _measurement(raw)
        except ValueError as error:
            raise UsageError(f"{origin}: not a measurement of schema {SCHEMA}: {error}; measure again") from None


def read(paths: Iterable[Path]) -> Iterator[Measurement]:
    """Every measurement of JSON lines files, in order; of a folder, that of its `*.jsonl`; empty lines are passed over.

    Raises:
        UsageError: a file cannot be read, or a line is not a measurement; it names file and line.
    """
    for path in itertools.chain.from_iterable(map(_files, paths)):
        try:
            # not splitlines: it also ends lines at characters that may stand in a text of JSON
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"{path}: cannot be read ({reason}); {_EXPECTED}") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Measurement.from_line(line, f"{path}:{number}")


def append(path: Path, measurement: Measurement) -> None:
    """Add one line to a file, which need not exist.

    Raises:
        UsageError: it cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(measurement.to_line() + "\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if not (found := sorted(path.glob("*.jsonl"))):
        raise UsageError(f"{path}: a folder without *.jsonl; {_EXPECTED}")
    return found


def _measurement(raw: dict[str, Any]) -> Measurement:
    values = _known(Measurement, raw, "")
    if values["kind"] not in get_args(Kind):
        raise ValueError(f"kind is {values['kind']!r}, expected one of {', '.join(get_args(Kind))}")
    for name in ("case", "figures", "settings", "conditions", "machine", "details"):
        _expect(isinstance(values.get(name, {}), dict), name, "an object")
    for name in ("timed", "command", "when"):
        _expect(isinstance(values.get(name, ""), str), name, "a text")
    for name, value in values["case"].items():
        _expect(value is None or isinstance(value, Scalar), f"case.{name}", "a text, a number, true, false or null")
    marks = values.get("marks", [])
    _expect(isinstance(marks, list) and all(isinstance(mark, str) for mark in marks), "marks", "a list of texts")
    values["marks"] = tuple(marks)
    if values["subject"] is not None:
        _expect(isinstance(values["subject"], dict), "subject", "an object or null")
        values["subject"] = _subject(values["subject"])
    values["figures"] = {name: _figure(f"figures.{name}", figure) for name, figure in values["figures"].items()}
    return Measurement(**values)


def _subject(raw: dict[str, Any]) -> Target:
    values = _known(Target, raw, "subject.")
    for name in ("name", "backbone", "head", "runtime", "runtime_version", "device", "precision", "layout"):
        _expect(isinstance(values.get(name, ""), str), f"subject.{name}", "a text")
    for name in ("num_classes", "prototypes_per_class"):
        _expect(values.get(name) is None or _is_count(values[name]), f"subject.{name}", "a whole number or null")
    _expect(isinstance(values.get("sha256"), str | None), "subject.sha256", "a text or null")
    if (size := values.get("input_size")) is not None:
        fits = isinstance(size, list) and len(size) == 2 and all(map(_is_count, size))
        _expect(fits, "subject.input_size", "[H0, W0] or null")
        values["input_size"] = (size[0], size[1])
    return Target(**values)


def _figure(name: str, raw: Any) -> Figure:
    _expect(isinstance(raw, dict), name, "an object")
    values = _known(Figure, raw, f"{name}.")
    values["value"] = _number(values["value"], f"{name}.value")
    _expect(isinstance(values["unit"], str), f"{name}.unit", "a text")
    _expect(values.get("better") in (None, *get_args(Better)), f"{name}.better", "higher, lower or null")
    repeats = values.get("repeats", [])
    _expect(isinstance(repeats, list), f"{name}.repeats", "a list of numbers")
    values["repeats"] = tuple(_number(value, f"{name}.repeats") for value in repeats)
    if (interval := values.get("interval")) is not None:
        _expect(isinstance(interval, list) and len(interval) == 2, f"{name}.interval", "two numbers or null")
        low, high = (_number(value, f"{name}.interval") for value in interval)
        _expect(low <= high, f"{name}.interval", "[low, high]")
        values["interval"] = (low, high)
    return Figure(**values)


def _known(kind: type[Any], raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of `kind`; unknown ones come from a newer writer of the same schema and are not ours to judge."""
    for f in fields(kind):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in raw:
            raise ValueError(f"{where}{f.name} is missing")
    return {f.name: raw[f.name] for f in fields(kind) if f.name in raw}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any, name: str) -> float:
    _expect(isinstance(value, int | float) and not isinstance(value, bool), name, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    _expect(math.isfinite(number), name, "a finite number")
    return number


def _expect(holds: bool, name: str, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is not {expected}")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def _finite(text: str) -> float:
    """1e999 is JSON, and infinity in floating point."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is too large a number")
    return number
