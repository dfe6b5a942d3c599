"""Numbers, names and tables as text."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

from opal_deploy.visualization.style import escape_unprintable

Rows = Sequence[Sequence[str]]

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# units of counts, which get a prefix from 10,000 on
_COUNTED_UNITS = ("mac", "flop", "param", "byte", "op/s", "ops", "operation", "element")
_ABBREVIATIONS = {
    "gb": "GB", "mb": "MB", "mhz": "MHz", "macs": "MACs", "flops": "FLOPs", "cpu": "CPU", "gpu": "GPU", "gpus": "GPU",
    "cuda": "CUDA", "rss": "RSS",
}  # fmt: skip
_MAX_FACTS = 60
# characters that begin markup in Markdown; `&`, `<` and `>` become entities
_MARKUP = re.compile(r"([\\`*_\[\]|~$@])")


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


def format_table(header: Sequence[str], rows: Rows, *, left: int = 1, markdown: bool = False) -> str:
    """Return a table, ending in a newline.

    Args:
        header: the columns' titles.
        rows: the cells.
        left: number of columns aligned to the left; the others hold numbers.
        markdown: a table of GitHub's Markdown, else one aligned with spaces.
    """
    if markdown:
        rule = ["---" if column < left else "---:" for column in range(len(header))]
        escaped = [[cell.replace("|", "\\|").replace("*", "\\*") for cell in row] for row in (header, rule, *rows)]
        return "".join(f"| {' | '.join(row)} |\n" for row in escaped)
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
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
