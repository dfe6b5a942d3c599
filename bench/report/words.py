"""How a report writes numbers and names: one way for tables, plots, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from opal_deploy.visualization.text import escape_unprintable

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# counted things: written with a prefix from 10,000 on; everything else is written out
_COUNTS = ("mac", "flop", "param", "byte", "op/s", "ops", "operation", "element")
_MOST_FACTS = 60
_SPELLED = {
    "gb": "GB", "mb": "MB", "mhz": "MHz", "macs": "MACs", "flops": "FLOPs", "cpu": "CPU", "gpu": "GPU", "gpus": "GPU",
    "cuda": "CUDA", "rss": "RSS",
}  # fmt: skip


def number(value: float, unit: str = "") -> str:
    """Four significant digits, thousands apart; counts with a prefix: `4.134 G`, `42,121`, `0.9913`, `1.2e-05`."""
    if abs(value) >= 1e4 and any(word in unit.lower() for word in _COUNTS):
        size, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= s * 0.99995))
        return f"{_digits(value / size)} {prefix}"
    return _digits(value)


def exact(value: float) -> str:
    """Every digit that the line of JSON has."""
    value = float(value)
    return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else repr(value)


def percent(share: float) -> str:
    """A share as per cent, to the digit that matters: `0.4 %`, `12 %`."""
    return f"{share * 100:.1f} %" if abs(share) < 0.0995 else f"{share * 100:.0f} %"


def words(name: str, unit: str = "") -> str:
    """A name for a person: `images_per_second` -> `images per second`; of a figure in ms: `p50_ms` -> `p50`."""
    suffix = "_percent" if unit == "%" else f"_{unit}"
    text = shown(name.removesuffix(suffix).replace("_", " ").replace(".", ", "))
    return " ".join(_SPELLED.get(word, word) for word in text.split(" "))


def shown(value: Any) -> str:
    """Any value in one line, with everything that does not print made visible."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) < 1e15:
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return number(value)
    return escape_unprintable(" ".join(str(value).split()) if isinstance(value, str) else str(value))


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters: the middle goes, since names differ at both ends."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 3
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


def ranges(numbers: Iterable[int]) -> str:
    """Row numbers as a person writes them: `1–4, 7`."""
    out: list[list[int]] = []
    for value in sorted(numbers):
        if out and value == out[-1][-1] + 1:
            out[-1] = [out[-1][0], value]
        else:
            out.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in out)


def facts(values: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """A tree of values as (name, text) pairs; long lists are only counted, and what is empty is left out.

    A summary with `min` and `max` becomes one text, as does a short list of plain values.
    """
    out: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{path}{words(str(key))}"
        if value is None or value in ("", [], {}, ()):
            continue
        if isinstance(value, Mapping) and {"min", "max"} <= set(value) and all(map(is_number, value.values())):
            middle = f", median {shown(value['median'])}" if "median" in value else ""
            low, high = shown(value["min"]), shown(value["max"])
            out.append((name, low if low == high else f"{low} to {high}{middle}"))
        elif isinstance(value, Mapping):
            out += facts(value, f"{name}: ")
        elif isinstance(value, list | tuple) and len(value) <= 8 and all(isinstance(v, Mapping) for v in value):
            for place, item in enumerate(value, 1):
                out += facts(item, f"{name}: " if len(value) == 1 else f"{name} {place}: ")
        elif isinstance(value, list | tuple):
            plain = not any(isinstance(item, list | tuple | Mapping) for item in value)
            short = plain and len(value) <= 12
            out.append((name, ", ".join(map(shown, value)) if short else f"{len(value)} values"))
        else:
            out.append((name, shown(value)))
    return out[:_MOST_FACTS]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(value: float) -> str:
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 999.95:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2g}"
    text = f"{value:.4g}"
    return text if "e" not in text else f"{value:.4f}"
