"""One measurement as one line of JSON, and several as one table.

A line states what was measured, how, on which machine and under which conditions, without names of hosts or users.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from opal_deploy.artifact.files import check_output
from opal_deploy.errors import UsageError
from opal_deploy.runtime.devices import available_cpus, read_driver
from opal_deploy.runtime.diagnostics import installed_version
from opal_deploy.visualization.style import escape_unprintable

Kind = Literal["overhead", "latency", "throughput", "compare", "pipeline"]
Better = Literal["higher", "lower"]
Scalar = str | bool | int | float | None

# distributions whose versions affect the figures
_DISTRIBUTIONS = (
    "opal-deploy", "onnxruntime", "onnxruntime-gpu", "openvino", "torch", "torchvision", "tensorrt-cu13",
    "tensorrt-rtx-cu13", "cuda-bindings", "numpy", "pillow",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One number: a count, or the median of `repeats`, with its 95 % confidence interval if one was computed."""

    value: float
    unit: str
    better: Better | None = None
    repeats: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None

    @staticmethod
    def of_repeats(repeats: Iterable[float], unit: str, better: Better | None = None) -> Figure:
        """Return the median of at least one repeat as a figure."""
        values = tuple(map(float, repeats))
        return Figure(statistics.median(values), unit, better, values)

    @property
    def spread(self) -> float | None:
        """(max - min) / |median| of the repeats; None with fewer than two repeats or a median of 0."""
        middle = statistics.median(self.repeats) if len(self.repeats) > 1 else 0
        return (max(self.repeats) - min(self.repeats)) / abs(middle) if middle else None

    @property
    def marks(self) -> tuple[str, ...]:
        """`noisy` with the spread of the repeats, if that exceeds 10 %."""
        return (f"noisy: the repeats differ by {self.spread:.0%}",) if (self.spread or 0) > 0.10 else ()

    def __str__(self) -> str:
        """Return the value with its unit, and its interval or spread: `12.5 ms (spread 3.1%)`."""
        text = f"{_format_number(self.value)} {self.unit}".removesuffix(" ratio")
        if self.interval is not None:
            return f"{text} ({' to '.join(map(_format_number, self.interval))})"
        return text if self.spread is None else f"{text} (spread {self.spread:.1%})"


@functools.cache
def describe_machine() -> dict[str, Any]:
    """Return processor, cores, GPUs, driver and versions."""
    processor = platform.processor() or "unknown"
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as stream:
        processor = next(line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    facts: dict[str, Any] = {
        "processor": processor, "cores": os.cpu_count(), "usable_cores": available_cpus(),
        "system": platform.platform(), "python": platform.python_version(),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := installed_version(name)) is not None},
    }  # fmt: skip
    driver = read_driver()
    if driver.gpus:
        facts |= {"gpus": [asdict(gpu) for gpu in driver.gpus], "driver": driver.version, "cuda": driver.cuda}
    return facts


def format_command_line(arguments: Sequence[str]) -> str:
    """Return the command as it could be typed again, without folders, which may name people and machines."""
    return shlex.join(["opal-deploy", *(re.sub(r"(^|=)[^=]*/(?=[^/])", r"\1", word) for word in arguments[1:])])


def head_name(head: Mapping[str, Any]) -> str:
    """Return `opal`, `linear` or `plain`, from a head's configuration, or `variant` for one of an ablation."""
    if head.get("plain"):
        return "plain"
    parts = [bool(head.get(part)) for part in ("projection", "cws", "anchors")]
    if all(parts) and head.get("pooling") == "max" and head.get("distance", "l2") == "l2":
        return "opal"
    return "linear" if not any(parts) and head.get("pooling") == "avg" else "variant"


@dataclass(frozen=True)
class Target:
    """The measured model, and what it ran in; `tools/results/README.md` describes the fields."""

    name: str
    backbone: str = ""
    head: str = ""
    runtime: str = ""
    session: str = ""
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
    """One measurement; `tools/results/README.md` describes the fields."""

    kind: Kind
    target: Target
    case: dict[str, Scalar]
    figures: dict[str, Figure]
    settings: dict[str, Any] = field(default_factory=dict)
    timed: str = ""
    marks: tuple[str, ...] = ()
    conditions: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=describe_machine)
    command: str = field(default_factory=lambda: format_command_line(sys.argv))
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    schema: int = 1

    def to_line(self) -> str:
        """Return one line of JSON; raise ValueError for a figure that is NaN or infinite: a bug of the benchmark."""
        return json.dumps(asdict(self), ensure_ascii=True, allow_nan=False)


def append_measurement(path: Path, measurement: Measurement) -> None:
    """Append one line to a .jsonl file; UsageError if it cannot be written, or is another file."""
    check_output("--out", path, [".jsonl"], overwrite=True)
    line = measurement.to_line()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{line}\n")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None


def format_measurements(measurements: Sequence[Measurement]) -> str:
    """Return one table, and the notes and marks; measurements are rows, but columns where they have more figures."""
    cases = dict.fromkeys(name for m in measurements for name in m.case)
    figures = dict.fromkeys(name for m in measurements for name in m.figures)
    rows = [["model", "runtime", "precision", *cases, *figures]]
    notes = []
    for m in measurements:
        columns = [*(m.case.get(name) for name in cases), *(m.figures.get(name) for name in figures)]
        cells = [m.target.name, f"{m.target.runtime} {m.target.options}".strip(), m.target.precision, *columns]
        rows.append([escape_unprintable(str("-" if cell is None else cell)) for cell in cells])
        notes += [f"{m.target.name}: {note}" for note in (*m.details.get("notes", ()), *m.marks)]
    if len(figures) > len(measurements):
        rows = [list(row) for row in zip(*rows, strict=True)]
    return "\n".join([format_table(rows[0], rows[1:]), *map(escape_unprintable, dict.fromkeys(notes))])


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text, as wide as it has to be; columns but the first are aligned to the right."""
    # a heavy import, for people only
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for number, title in enumerate(header):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(width=10_000, markup=False, highlight=False, emoji=False, color_system=None)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines() if line.strip())


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
