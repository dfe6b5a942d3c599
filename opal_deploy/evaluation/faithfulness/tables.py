"""Faithfulness as text for a terminal and as a plot of the curves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opal_deploy.evaluation.faithfulness.figures import RankingFigures
from opal_deploy.evaluation.faithfulness.measure import Faithfulness
from opal_deploy.evaluation.faithfulness.rankings import RANKINGS
from opal_deploy.statistics.intervals import Mean

# Okabe and Ito: distinct for colour-blind readers; dashes tell the lines apart without any colour
_STYLES: dict[str, dict[str, Any]] = {
    "contribution": {"color": "#000000", "linestyle": "-", "marker": "o"},
    "reverse": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "random": {"color": "#E69F00", "linestyle": "-.", "marker": "^"},
    "runner-up": {"color": "#D55E00", "linestyle": ":", "marker": "v"},
    "another class": {"color": "#009E73", "linestyle": "--", "marker": "D"},
    "grad-cam": {"color": "#CC79A7", "linestyle": "-.", "marker": "x"},
}


def format_lines(found: Faithfulness) -> Iterable[str]:
    """Yield the lines that the terminal shows."""
    yield (
        f"faithfulness on {found.images} of {found.available} images, {found.passes:,} forward passes: the answer's "
        f"cosine while its {found.cells:.1f} different cells (mean; m = {found.prototypes_per_class}) are removed from "
        "the input or put back"
    )
    yield f"random: {found.control}, never the evidence"
    for order, reason in found.unavailable.items():
        yield f"{order}: {reason}"
    rows = [
        [
            "",
            "cells",
            "evidence",
            "deletion",
            "insertion",
            "drop",
            "kept",
            "evidence better by: deletion",
            "insertion",
            "drop",
        ]
    ]
    for figures in found.orders:
        rows.append([f"{figures.fill}: {figures.order}", *_row(figures)])
    yield from _aligned(rows)
    yield "deletion, insertion: area under the cosine's curve; drop of the cosine and answers kept: all cells removed"
    yield "better by: paired by image, with as many cells; positive where the evidence beats the row; 95 % bootstrap"
    rows = [["stability of cells", "same cell", "within one", "same class"]]
    for change in found.stability:
        shares = [_interval(share, scale=100, sign="") for share in (change.exactly, change.nearly)]
        rows.append([change.change, *(f"{share} %" for share in shares), f"{change.answer:.1%}"])
    yield from _aligned(rows)


def _row(figures: RankingFigures) -> list[str]:
    better = figures.better
    return [
        f"{figures.cells:.1f}",
        f"{figures.overlap:.0%}",
        f"{figures.deletion_area.value:.3f}",
        f"{figures.insertion_area.value:.3f}",
        f"{figures.drop.value:.3f}",
        f"{figures.kept:.0%}",
        *([""] * 3 if better is None else map(_interval, (better.deletion, better.insertion, better.drop))),
    ]


def _interval(found: Mean | None, *, scale: float = 1.0, sign: str = "+") -> str:
    if found is None:
        return "-"
    digits = 3 if scale == 1.0 else 1
    value, low, high = (scale * v for v in (found.value, *found.interval))
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def _aligned(rows: list[list[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *numbers]).rstrip()


def draw_curves(found: Faithfulness, title: str, path: Path) -> None:
    """Write a PNG of the curves: deletion above, insertion below, a column per baseline."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    fills = list(dict.fromkeys(figures.fill for figures in found.orders))
    figure = Figure(figsize=(4.2 * len(fills) + 1.5, 7.0), layout="constrained")
    axes = figure.subplots(2, len(fills), squeeze=False, sharex=True, sharey=True)
    for column, fill in enumerate(fills):
        for row, name in enumerate(("deletion", "insertion")):
            axis = axes[row, column]
            for figures in (f for f in found.orders if f.fill == fill):
                curve = getattr(figures, name)
                axis.plot(range(len(curve)), curve, label=figures.order, markersize=4, **_STYLES[figures.order])
            axis.set_title(f"{name}, {fill}")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, column].set_xlabel("cells removed")
        axes[1, column].set_xlabel("cells put back")
    for row in axes:
        row[0].set_ylabel("cosine of the answer's class")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    names = [order for order in RANKINGS if order in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right center")
    # no mathematics: a file may be called $x$
    figure.suptitle(f"{title}: {found.images} images", parse_math=False)
    figure.savefig(path, dpi=130, format="png")
