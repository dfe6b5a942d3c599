"""`opal-deploy bench report`: measurements as Markdown, one table per kind; numbers, machines and tables as text.

A table of the report has a column for each field in which measurements differ; fields that all rows share are listed
once.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any, get_args

from opal_deploy.bench.measurement import Better, Figure, Kind, Measurement, Target
from opal_deploy.visualization.style import escape_unprintable

# in reading order; those after the precision become columns only if nothing else distinguishes the rows
_TARGET_FIELDS: dict[str, Callable[[Target], Any]] = {
    "name": lambda target: target.name,
    "runtime": lambda target: f"{target.runtime} {target.runtime_version}".strip(),
    "device": lambda target: target.device,
    "precision": lambda target: target.precision,
    "backbone": lambda target: target.backbone,
    "head": lambda target: target.head,
    "layout": lambda target: target.layout,
    "options": lambda target: target.options,
    "input": lambda target: "x".join(map(str, target.input_size or ())),
    "classes": lambda target: target.num_classes,
    "prototypes per class": lambda target: target.prototypes_per_class,
}
_MAIN = ("name", "runtime", "device", "precision")
# their values need no title in a label
_SELF_EXPLAINING = (*_MAIN, "backbone", "head", "layout", "options", "input")
_ARROWS: dict[Better | None, str] = {"higher": " ↑", "lower": " ↓", None: ""}
# with more figures than this, each figure is a row and each measurement a column
_MANY_FIGURES = 10
# facts that an update changes; all others describe the machine itself
_SOFTWARE = ("versions", "python", "system", "driver", "cuda", "governor")

Rows = Sequence[Sequence[str]]

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# units of counts, which get a prefix from 10,000 on
_COUNTED_UNITS = ("mac", "flop", "param", "operation")
_ABBREVIATIONS = {
    "gb": "GB", "mb": "MB", "mhz": "MHz", "macs": "MACs", "flops": "FLOPs", "cpu": "CPU", "gpu": "GPU", "gpus": "GPU",
    "cuda": "CUDA", "rss": "RSS",
}  # fmt: skip
_MAX_FACTS = 60
# characters that begin markup in Markdown; `&`, `<` and `>` become entities
_MARKUP = re.compile(r"([\\`*_\[\]|~$@])")


@dataclass(frozen=True)
class Field:
    """A field of target or case, one text per measurement; a main field becomes a column wherever it differs."""

    title: str
    texts: tuple[str, ...]
    is_main: bool

    @property
    def differs(self) -> bool:
        """Whether any two measurements differ in it."""
        return len(set(self.texts)) > 1


def build_report(measurements: Iterable[Measurement]) -> str:
    """Return the report; of several measurements of the same thing on the same machine the last counts.

    Returns:
        Markdown that ends in a newline; empty without measurements.
    """
    every = list(measurements)
    machines = {machine_key(m.machine): m.machine for m in every if m.machine}
    numbers = {key: number for number, key in enumerate(machines, 1)}
    last = {(m.key, machine_key(m.machine)): m for m in every}
    if len(machines) > 1:
        # the machine distinguishes measurements too
        last = {keys: replace(m, case={**m.case, "machine": numbers.get(keys[1])}) for keys, m in last.items()}
    lines: list[str] = []
    for key, machine in machines.items():
        lines += [f"**Machine {numbers[key]}**: {escape_markdown(machine_title(machine))}", ""]
        facts = {**hardware_facts(machine), **software_facts(machine)}
        lines += [_format_pairs(facts.items()), ""]
    for kind in get_args(Kind):
        if rows := [m for m in last.values() if m.kind == kind]:
            lines += [f"## {kind}", "", *_build_section(rows), ""]
    return "\n".join(lines[:-1]) + "\n" if lines else ""


def label_measurements(measurements: Sequence[Measurement]) -> list[str]:
    """Return for each measurement of one kind its target's name and the fields that distinguish it from the others."""
    fields = _list_fields(measurements)
    kept = _add_distinguishing([field for field in fields if field.title == "name"], fields)
    return [
        ", ".join(
            field.texts[index] if field.title in _SELF_EXPLAINING else f"{field.title} {field.texts[index]}"
            for field in kept
            if field.texts[index] != "–"
        )
        for index in range(len(measurements))
    ]


def _list_fields(measurements: Sequence[Measurement]) -> list[Field]:
    fields = [
        Field(title, tuple(format_value(get(m.target) or None) for m in measurements), title in _MAIN)
        for title, get in _TARGET_FIELDS.items()
    ]
    for name in dict.fromkeys(key for m in measurements for key in m.case):
        fields.append(Field(humanize(name), tuple(format_value(m.case.get(name)) for m in measurements), True))
    return fields


def _add_distinguishing(kept: list[Field], candidates: Iterable[Field]) -> list[Field]:
    """Add each candidate that distinguishes measurements which the fields before it do not."""

    def count_distinct(fields: Sequence[Field]) -> int:
        return len(set(zip(*(field.texts for field in fields), strict=True)))

    for candidate in candidates:
        if count_distinct([*kept, candidate]) > count_distinct(kept):
            kept = [*kept, candidate]
    return kept


def _build_section(rows: Sequence[Measurement]) -> Iterator[str]:
    fields = _list_fields(rows)
    shown = [field for field in fields if field.title == "name" or (field.differs and field.is_main)]
    shown = _add_distinguishing(shown, [field for field in fields if field.differs])
    shown = [field for field in fields if field in shown]
    common = [(f.title, f.texts[0]) for f in fields if f not in shown and not f.differs and f.texts[0] != "–"]
    if common:
        yield from (f"All rows: {_format_pairs(common)}.", "")
    columns = [("#", [str(number) for number in range(1, len(rows) + 1)]), *((f.title, [*f.texts]) for f in shown)]
    names = list(dict.fromkeys(name for m in rows for name in m.figures))
    columns += [_build_figure_column(name, [m.figures.get(name) for m in rows]) for name in names]
    if any(m.marks for m in rows):
        columns.append(("marks", ["; ".join(m.marks) for m in rows]))
    table = [[title, *cells] for title, cells in columns]
    if len(names) <= _MANY_FIGURES:
        table = [list(row) for row in zip(*table, strict=True)]
    escaped = [f"| {' | '.join(map(escape_markdown, row))} |" for row in table]
    yield from (escaped[0], "|" + "---|" * len(table[0]), *escaped[1:], "")
    commands: dict[tuple[str, str], list[str]] = {}
    for number, m in enumerate(rows, 1):
        commands.setdefault((m.command, m.timed), []).append(str(number))
    for (command, timed), numbers in commands.items():
        yield f"- {', '.join(numbers)}: {escape_markdown(command or 'command not recorded')}"
        if timed:
            yield f"  Timed: {escape_markdown(timed)}."


def _build_figure_column(name: str, figures: Sequence[Figure | None]) -> tuple[str, list[str]]:
    """Return a column's title with unit and direction, and its cells with their uncertainty."""
    units = {figure.unit for figure in figures if figure}
    directions = {figure.better for figure in figures if figure}
    unit = units.pop() if len(units) == 1 else ""
    title = humanize(name, unit) + (f" ({format_value(unit)})" if unit not in ("", "ratio") else "")
    cells = []
    for figure in figures:
        if figure is None:
            cells.append("–")
            continue
        own_unit = "" if figure.unit in (unit, "ratio") else f" {figure.unit}"
        cells.append(f"{format_number(figure.value, figure.unit)}{own_unit}{_format_uncertainty(figure)}")
    return title + (_ARROWS[directions.pop()] if len(directions) == 1 else ""), cells


def _format_uncertainty(figure: Figure) -> str:
    if figure.interval is not None:
        low, high = (format_number(end, figure.unit) for end in figure.interval)
        return f" ({low} to {high})"
    return "" if figure.spread is None else f" (spread {figure.spread:.1%})"


def _format_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{escape_markdown(name)} {escape_markdown(text)}" for name, text in pairs)


def machine_key(machine: Mapping[str, Any]) -> str:
    """Return a text that is equal for the same machine with the same software."""
    return json.dumps(machine, sort_keys=True)


def machine_title(machine: Mapping[str, Any]) -> str:
    """Return one line for a person: the GPUs if there are any, and the processor."""
    gpus = machine["gpus"] if isinstance(machine.get("gpus"), list) else []
    names = [format_value(gpu.get("name", "GPU")) for gpu in gpus if isinstance(gpu, Mapping)]
    parts = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    if machine.get("processor"):
        cores = machine.get("usable_cores") or machine.get("cores")
        parts.append(format_value(machine["processor"]) + (f", {format_value(cores)} cores" if cores else ""))
    return "; ".join(parts) or "a machine that was not recorded"


def hardware_facts(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts about the machine itself, by name."""
    return dict(flatten_facts({key: value for key, value in machine.items() if key not in _SOFTWARE}))


def software_facts(machine: Mapping[str, Any]) -> dict[str, str]:
    """Return versions and settings, by name."""
    return dict(flatten_facts({key: machine[key] for key in _SOFTWARE if key in machine}))


def format_number(value: float, unit: str = "") -> str:
    """Return four significant digits, with a prefix for large counts: `4.134 G`, `42,121`, `0.9913`, `1.2e-05`."""
    if abs(value) >= 1e4 and any(word in unit.lower() for word in _COUNTED_UNITS):
        size, prefix = next((size, prefix) for size, prefix in _PREFIXES if abs(value) >= size * 0.99995)
        return f"{_round(value / size)} {prefix}"
    return _round(value)


def format_fixed(value: int | Decimal, divisor: int, digits: int) -> str:
    """Return an exact quotient with `digits` decimals, halves rounded to even as in the paper."""
    return str((Decimal(value) / divisor).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN))


def format_value(value: Any) -> str:
    """Return any value as one line, with characters that do not print made visible."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) < 1e15:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return format_number(value)
    return escape_unprintable(" ".join(str(value).split()) if isinstance(value, str) else str(value))


def humanize(name: str, unit: str = "") -> str:
    """Return a field's name in words, without its unit: `peak_memory` -> `peak memory`, `p50_ms` -> `p50`."""
    suffix = "_percent" if unit == "%" else f"_{unit}"
    text = format_value(name.removesuffix(suffix).replace("_", " ").replace(".", ", "))
    return " ".join(_ABBREVIATIONS.get(word, word) for word in text.split(" "))


def flatten_facts(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return a tree of values as at most 60 (name, text) pairs, without empty values."""
    facts: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{humanize(str(key))}"
        if isinstance(value, Mapping):
            facts += flatten_facts(value, f"{name}: ")
        elif isinstance(value, list | tuple) and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value, 1):
                facts += flatten_facts(item, f"{name}: " if len(value) == 1 else f"{name} {number}: ")
        elif value is not None and value != "":
            facts.append((name, format_value(value)))
    return facts[:_MAX_FACTS]


def format_table(header: Sequence[str], rows: Rows, *, markdown: bool = False) -> str:
    """Return a table, ending in a newline; its first column is aligned to the left, the others hold numbers.

    Args:
        markdown: a table of GitHub's Markdown, else one aligned with spaces.
    """
    if markdown:
        rule = ["---", *["---:"] * (len(header) - 1)]
        escaped = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in (header, rule, *rows)]
        return "".join(f"| {' | '.join(row)} |\n" for row in escaped)
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines) + "\n"


def escape_markdown(text: str) -> str:
    """Return any text as one line without markup for Markdown and HTML."""
    return _MARKUP.sub(r"\\\1", html.escape(format_value(text), quote=False))


def _round(value: float) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 999.95:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2g}"
    text = f"{value:.4g}"
    return text if "e" not in text else f"{value:.4f}"
