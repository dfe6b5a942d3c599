"""The server scenario: latency against the rate of arrivals, as it was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opal_deploy.bench.report.charts.series import MOST_SERIES
from opal_deploy.bench.report.drawing import CARD, INK, Key, Plot, color, marker, plot
from opal_deploy.bench.report.tables import Row, labels
from opal_deploy.bench.tables import format_number, is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_RATES, _LATENCY = ("queries_per_second", "rate"), "p99_ms"

# rate, p99 in ms, whether it kept the limit
Trial = tuple[float, float, bool]


def latency_against_rate(rows: Sequence[Row]) -> list[Plot]:
    """The trials in the details of all rows, in plots of a few each."""
    found = [(label, row, trials) for label, row in zip(labels(rows), rows, strict=True) if (trials := _trials(row))]
    groups = [found[start : start + MOST_SERIES] for start in range(0, len(found), MOST_SERIES)]
    return [_plot(group, f", part {place}" if len(groups) > 1 else "") for place, group in enumerate(groups, 1)]


def _trials(row: Row) -> list[Trial]:
    tried = row.measurement.details.get("tried")
    every = [each for each in (tried if isinstance(tried, list) else []) if isinstance(each, Mapping)]
    return sorted(trial for each in every if (trial := _trial(each)) is not None)


def _trial(tried: Mapping[str, Any]) -> Trial | None:
    rate = next((tried[name] for name in _RATES if is_number(tried.get(name))), None)
    latency = tried.get(_LATENCY)
    return (float(rate), float(latency), bool(tried.get("held"))) if rate is not None and is_number(latency) else None


def _plot(found: Sequence[tuple[str, Row, list[Trial]]], part: str) -> Plot:
    limits = sorted({float(limit) for _, row, _ in found if is_number(limit := row.measurement.case.get("limit_ms"))})

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        for limit in limits:
            axes.axhline(limit, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        for place, (_, _, trials) in enumerate(found):
            axes.plot([t[0] for t in trials], [t[1] for t in trials], color=color(place), linewidth=1.2, alpha=0.5)
            for rate, latency, held in trials:
                axes.plot(
                    rate, latency, marker=marker(place), color=color(place), markeredgewidth=1.5,
                    markerfacecolor=color(place) if held else CARD,
                )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("arrivals a second")
        axes.set_ylabel("p99, ms")

    told = "; ".join(
        f"{label}: {', '.join(f'{format_number(rate)}/s {format_number(ms)} ms' for rate, ms, _ in trials)}"
        for label, _, trials in found
    )
    limited = f"The limit: {', '.join(map(format_number, limits))} ms. " if limits else ""
    return plot(
        f"Latency against the rate of arrivals{part}",
        f"{limited}{told}.",
        paint,
        lambda narrow: 290.0 if narrow else 340.0,
        [Key(label, place) for place, (label, _, _) in enumerate(found)],
        "Filled points kept the limit (dashed), hollow ones did not.",
    )
