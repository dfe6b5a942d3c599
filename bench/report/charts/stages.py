"""The pipeline: its throughput beside the bare session's, and its time by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from opal_deploy.bench.report.charts.dots import MOST_ROWS, dots
from opal_deploy.bench.report.charts.series import titled
from opal_deploy.bench.report.drawing import CARD, Key, Plot, color, faded, label_end, name_rows, plot, rows_height
from opal_deploy.bench.report.tables import Row, labels
from opal_deploy.bench.tables import format_number, humanize

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_UNIT = "ms/image"
_SUFFIX = ".wall"


def rates(rows: Sequence[Row]) -> list[Plot]:
    """Everything in images a second, a row a case."""
    found = [row for row in rows if _rates(row)]
    out = []
    for start in range(0, len(found), MOST_ROWS):
        group = found[start : start + MOST_ROWS]
        values = [_rates(row) for row in group]
        series = list(dict.fromkeys(name for each in values for name in each))
        part = f"from row {group[0].number}" if len(found) > MOST_ROWS else ""
        out.append(dots(titled("Throughput of the whole pipeline", part), labels(group), values, series, "images/s"))
    return out


def stages(rows: Sequence[Row]) -> list[Plot]:
    """Stacked bars of wall time per image: figures named `variant.stage.wall`."""
    bars: list[tuple[str, dict[str, float]]] = []
    for row, label in zip(rows, labels(rows), strict=True):
        for variant, parts in _parts(row).items():
            bars.append((", ".join(text for text in (label, humanize(variant)) if text), parts))
    groups = [bars[start : start + MOST_ROWS] for start in range(0, len(bars), MOST_ROWS)]
    return [_plot(group, f"part {place}" if len(groups) > 1 else "") for place, group in enumerate(groups, 1)]


def _rates(row: Row) -> dict[str, float]:
    return {humanize(name): f.value for name, f in row.measurement.figures.items() if f.unit == "images/s"}


def _parts(row: Row) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    for name, figure in row.measurement.figures.items():
        if figure.unit == _UNIT and name.endswith(_SUFFIX) and name.count(".") == 2:
            variant, stage, _ = name.split(".")
            out.setdefault(variant, {})[stage] = figure.value
    return out


def _plot(bars: Sequence[tuple[str, dict[str, float]]], part: str) -> Plot:
    names = list(dict.fromkeys(stage for _, parts in bars for stage in parts))
    totals = [sum(parts.values()) for _, parts in bars]

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        starts = [0.0] * len(bars)
        for series, name in enumerate(names):
            widths = [parts.get(name, 0.0) for _, parts in bars]
            axes.barh(
                range(len(bars)), widths, left=starts, height=0.36 if narrow else 0.6, color=color(series),
                alpha=faded(series), edgecolor=CARD, linewidth=0.8,
            )  # fmt: skip
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for place, total in enumerate(totals):
            label_end(axes, total, place, format_number(total))
        name_rows(axes, [label for label, _ in bars], narrow)
        axes.set_xlim(0, (max(totals) or 1.0) * (1.18 if narrow else 1.08))
        axes.set_xlabel("milliseconds an image, all threads")

    told = "; ".join(
        f"{label}: {', '.join(f'{name} {format_number(value)}' for name, value in parts.items())} ms"
        for label, parts in bars
    )
    keys = [Key(humanize(name), series, "bar") for series, name in enumerate(names)]
    return plot(titled("Time by stage", part), f"{told}.", paint, rows_height(len(bars)), keys)
