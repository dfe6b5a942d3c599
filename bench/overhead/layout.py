"""Rows of text as an aligned table, as Markdown or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal

Rows = Sequence[Sequence[str]]


def aligned(header: Sequence[str], rows: Rows, *, left: int = 1) -> str:
    """Columns as wide as they need, the first `left` to the left, numbers to the right; ends with a newline."""
    widths = [max(len(line[place]) for line in (header, *rows)) for place in range(len(header))]
    lines = [
        "  ".join(
            text.ljust(width) if place < left else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, ["-" * width for width in widths], *rows)
    ]
    return "\n".join(lines) + "\n"


def markdown(header: Sequence[str], rows: Rows, *, left: int = 1) -> str:
    """A table of GitHub's Markdown."""
    rule = ["---" if place < left else "---:" for place in range(len(header))]
    return "".join(f"| {' | '.join(_escaped(text) for text in line)} |\n" for line in (header, rule, *rows))


def comma_separated(header: Sequence[str], rows: Rows) -> str:
    """CSV with a header line."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([header, *rows])
    return stream.getvalue()


def fixed(value: int | Decimal, divisor: int, digits: int) -> str:
    """A quotient at so many decimals, exactly: halves go to the even digit, as the paper's do (104550 is 104.6k)."""
    return str((Decimal(value) / divisor).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_EVEN))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
