"""Measurements as text: one as lines for a terminal, several as Markdown (`bench report`), one table per kind.

A table of the report has a column for each field in which measurements differ; fields that all rows share are listed
once.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from opal_deploy.bench.measurement import Better, Figure, Kind, Measurement, Target
from opal_deploy.visualization.style import escape_unprintable

# always columns where they differ; other fields of a target only where nothing else distinguishes the rows
_MAIN_FIELDS = ("name", "runtime", "device", "precision")
# their values need no title in a label
_SELF_EXPLAINING = (*_MAIN_FIELDS, "backbone", "head", "layout", "options", "input")
# the text of a missing value
_NOTHING = "–"
_ARROWS: dict[Better | None, str] = {"higher": " ↑", "lower": " ↓", None: ""}
# with more figures than this, each figure is a row and each measurement a column
_MANY_FIGURES = 10
# facts that an update changes; all others describe the machine itself
_SOFTWARE = ("versions", "python", "system", "driver", "cuda", "governor")

# lines of a profile that are not of the head
_MANY_NODES = 12

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# units of counts, which get a prefix from 10,000 on
_COUNTED_UNITS = ("mac", "flop", "param", "operation")
_ABBREVIATIONS = {
    "gb": "GB", "mb": "MB", "mhz": "MHz", "macs": "MACs", "flops": "FLOPs", "cpu": "CPU", "gpu": "GPU", "gpus": "GPU",
    "cuda": "CUDA", "rss": "RSS",
}  # fmt: skip
# characters that begin markup in Markdown; `&`, `<` and `>` become entities
_MARKUP = re.compile(r"([\\`*_\[\]|~$@])")


def build_report(measurements: Iterable[Measurement]) -> str:
    """Return the report; of several measurements of the same thing on the same machine the last counts.

    Returns:
        Markdown that ends in a newline; empty without measurements.
    """
    last = {(m.key, json.dumps(m.machine, sort_keys=True)): m for m in measurements}
    machines = {machine: m.machine for (_, machine), m in last.items() if m.machine}
    numbers = {key: number for number, key in enumerate(machines, 1)}
    if len(machines) > 1:
        # the machine distinguishes measurements too
        last = {keys: replace(m, case={**m.case, "machine": numbers.get(keys[1])}) for keys, m in last.items()}
    lines: list[str] = []
    for key, machine in machines.items():
        facts = {**hardware_facts(machine), **software_facts(machine)}
        lines += [f"**Machine {numbers[key]}**: {_format_pairs(facts.items())}", ""]
    for kind in get_args(Kind):
        if rows := [m for m in last.values() if m.kind == kind]:
            lines += [f"## {kind}", "", *_build_section(rows), ""]
    return "\n".join(lines[:-1]) + "\n" if lines else ""


def label_measurements(measurements: Sequence[Measurement]) -> list[str]:
    """Return for each measurement of one kind its target's name and the fields in which it differs from the others."""
    shown, _ = _list_columns(measurements)
    titles = ["" if title in _SELF_EXPLAINING else f"{title} " for title in shown]
    return [
        ", ".join(f"{title}{text}" for title, text in zip(titles, row, strict=True) if text != _NOTHING)
        for row in zip(*shown.values(), strict=True)
    ]


def _list_columns(measurements: Sequence[Measurement]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the columns of fields that distinguish measurements, by title, and the fields that all share."""
    targets = [_list_fields(m.target) for m in measurements]
    cases = [{humanize(name): value for name, value in m.case.items()} for m in measurements]
    columns = {
        title: [format_value(row.get(title)) for row in rows]
        for rows in (targets, cases)
        for title in dict.fromkeys(title for row in rows for title in row)
    }
    minor = targets[0].keys() - _MAIN_FIELDS
    shown = {t: texts for t, texts in columns.items() if t == "name" or (t not in minor and len(set(texts)) > 1)}
    for title in (title for title in columns if title in minor):
        known = list(zip(*shown.values(), strict=True))
        if len(set(zip(known, columns[title], strict=True))) > len(set(known)):
            shown[title] = columns[title]
    common = {title: texts[0] for title, texts in columns.items() if title not in shown and len(set(texts)) == 1}
    return shown, {title: text for title, text in common.items() if text != _NOTHING}


def _list_fields(target: Target) -> dict[str, Any]:
    """Return the fields of a target by title, in reading order; None for one without a value."""
    fields = {
        "name": target.name, "runtime": f"{target.runtime} {target.runtime_version}".strip(), "device": target.device,
        "precision": target.precision, "backbone": target.backbone, "head": target.head, "layout": target.layout,
        "options": target.options, "input": "x".join(map(str, target.input_size or ())),
        "classes": target.num_classes, "prototypes per class": target.prototypes_per_class,
    }  # fmt: skip
    return {title: value or None for title, value in fields.items()}


def _build_section(rows: Sequence[Measurement]) -> Iterator[str]:
    shown, common = _list_columns(rows)
    if common:
        yield from (f"All rows: {_format_pairs(common.items())}.", "")
    columns = [("#", [str(number) for number in range(1, len(rows) + 1)]), *shown.items()]
    names = list(dict.fromkeys(name for m in rows for name in m.figures))
    columns += [_build_figure_column(name, [m.figures.get(name) for m in rows]) for name in names]
    if any(m.marks for m in rows):
        columns.append(("marks", ["; ".join(m.marks) for m in rows]))
    table = [[title, *cells] for title, cells in columns]
    if len(names) <= _MANY_FIGURES:
        table = [list(row) for row in zip(*table, strict=True)]
    yield format_table(table[0], table[1:], markdown=True)
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
    cells = [_NOTHING if figure is None else format_figure(figure, unit) for figure in figures]
    return title + (_ARROWS[directions.pop()] if len(directions) == 1 else ""), cells


def format_measurement(measurement: Measurement) -> str:
    """Return lines for a person: model, case and figures, then notes, profile and marks."""
    case = (f"{humanize(name)} {format_value(value)}" for name, value in measurement.case.items() if value is not None)
    title = f"  {', '.join([format_value(measurement.target.name), *case])}"
    figures = [(humanize(name, each.unit), format_figure(each)) for name, each in measurement.figures.items()]
    lines = [f"{title}: {', '.join(map(' '.join, figures)) or 'failed'}"]
    if len(figures) > _MANY_FIGURES:
        lines = [f"{title}:", format_table(("figure", "value"), figures)]
    lines += [f"    {format_value(note)}" for note in measurement.details.get("notes", ())]
    if profile := measurement.details.get("profile"):
        nodes = sorted(profile["nodes"], key=lambda node: -float(node["share"]))
        shown = [node for place, node in enumerate(nodes) if place < _MANY_NODES or "head" in node["part"]]
        texts = (node | {"share": f"{node['share']:.1%}"} for node in shown)
        rows = [[format_value(text) for text in node.values()] for node in texts]
        lines += [
            f"    profile of {profile['runs']} batches by {profile['source']}, {len(shown)} of {len(nodes)} nodes:",
            format_table([humanize(name) for name in nodes[0]], rows),
        ]
    return "\n".join(
        [*(line.rstrip("\n") for line in lines), *(f"    {format_value(mark)}" for mark in measurement.marks)]
    )


def format_figure(figure: Figure, unit: str = "") -> str:
    """Return a figure with its uncertainty, and its unit unless that is `unit`."""
    own_unit = "" if figure.unit in (unit, "", "ratio") else f" {format_value(figure.unit)}"
    text = f"{format_number(figure.value, figure.unit)}{own_unit}"
    if figure.interval is not None:
        low, high = (format_number(end, figure.unit) for end in figure.interval)
        return f"{text} ({low} to {high})"
    return text if figure.spread is None else f"{text} (spread {figure.spread:.1%})"


def _format_pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{escape_markdown(name)} {escape_markdown(text)}" for name, text in pairs)


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


def format_value(value: Any) -> str:
    """Return any value as one line, with characters that do not print made visible."""
    if value is None:
        return _NOTHING
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


def flatten_facts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a tree of values as (name, text), without empty values."""
    for key, value in values.items():
        name = f"{prefix}{humanize(str(key))}"
        if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value, 1)}
        if isinstance(value, Mapping):
            yield from flatten_facts(value, f"{name}: ")
        elif value is not None and value != "":
            yield name, format_value(value)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, markdown: bool = False) -> str:
    """Return a table that ends in a newline: of Markdown, or aligned with spaces, the first column to the left."""
    if markdown:
        lines = [f"| {' | '.join(map(escape_markdown, row))} |" for row in (header, *rows)]
        return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]]) + "\n"
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    padded = [
        [f"{cell:>{width}}" if number else f"{cell:<{width}}" for cell in column]
        for number, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    lines = ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]]) + "\n"


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
