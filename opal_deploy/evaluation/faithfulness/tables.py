"""Faithfulness as text for a terminal and as a plot of the curves."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opal_deploy.evaluation.faithfulness.figures import RankingFigures
from opal_deploy.evaluation.faithfulness.measure import Faithfulness
from opal_deploy.evaluation.faithfulness.rankings import RANKINGS
from opal_deploy.statistics import Mean

# Okabe and Ito: distinct for colour-blind readers; dashes tell the lines apart without any colour
_STYLES: dict[str, dict[str, Any]] = {
    "contribution": {"color": "#000000", "linestyle": "-", "marker": "o"},
    "reverse": {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    "random": {"color": "#E69F00", "linestyle": "-.", "marker": "^"},
    "runner-up": {"color": "#D55E00", "linestyle": ":", "marker": "v"},
    "another class": {"color": "#009E73", "linestyle": "--", "marker": "D"},
    "grad-cam": {"color": "#CC79A7", "linestyle": "-.", "marker": "x"},
}


def format_lines(measured: Faithfulness) -> Iterable[str]:
    """Yield the lines that the terminal shows."""
    yield (
        f"faithfulness on {measured.images} of {measured.available} images, {measured.forward_passes:,} forward "
        f"passes: the predicted class's cosine while its {measured.different_cells:.1f} different cells (mean; m = "
        f"{measured.prototypes_per_class}) are removed from the input or put back"
    )
    yield f"random: {measured.random_control}, never the evidence"
    for ranking, reason in measured.unavailable.items():
        yield f"{ranking}: {reason}"
    rows = [["", "cells", "evidence", "deletion", "insertion", "drop", "kept"]]
    rows[0] += ["evidence better by: deletion", "insertion", "drop"]
    for figures in measured.rankings:
        rows.append([f"{figures.baseline}: {figures.ranking}", *_row(figures)])
    yield from _align(rows)
    yield "deletion, insertion: area under the cosine's curve; drop of the cosine and classes kept: all cells removed"
    yield "better by: paired by image, with as many cells; positive where the evidence beats the row; 95 % bootstrap"
    rows = [["stability of cells", "same cell", "within one", "same class"]]
    for change in measured.stability:
        shares = [_interval(share, scale=100, sign="") for share in (change.same_cell, change.within_one_cell)]
        rows.append([change.change, *(f"{share} %" for share in shares), f"{change.same_class:.1%}"])
    yield from _align(rows)


def _row(figures: RankingFigures) -> list[str]:
    advantage = figures.advantage
    return [
        f"{figures.cells:.1f}",
        f"{figures.evidence_share:.0%}",
        f"{figures.deletion_area.value:.3f}",
        f"{figures.insertion_area.value:.3f}",
        f"{figures.drop.value:.3f}",
        f"{figures.class_kept:.0%}",
        *([""] * 3 if advantage is None else map(_interval, (advantage.deletion, advantage.insertion, advantage.drop))),
    ]


def _interval(mean: Mean | None, *, scale: float = 1.0, sign: str = "+") -> str:
    if mean is None:
        return "-"
    digits = 3 if scale == 1.0 else 1
    value, low, high = (scale * v for v in (mean.value, *mean.interval))
    return f"{value:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def _align(rows: list[list[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *numbers]).rstrip()


def draw_curves(measured: Faithfulness, title: str, path: Path) -> None:
    """Write a PNG of the curves: deletion above, insertion below, a column per baseline."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    baselines = list(dict.fromkeys(figures.baseline for figures in measured.rankings))
    figure = Figure(figsize=(4.2 * len(baselines) + 1.5, 7.0), layout="constrained")
    axes = figure.subplots(2, len(baselines), squeeze=False, sharex=True, sharey=True)
    for column, baseline in enumerate(baselines):
        for row, name in enumerate(("deletion", "insertion")):
            axis = axes[row, column]
            for figures in (f for f in measured.rankings if f.baseline == baseline):
                curve = getattr(figures, name)
                axis.plot(range(len(curve)), curve, label=figures.ranking, markersize=4, **_STYLES[figures.ranking])
            axis.set_title(f"{name}, {baseline}")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, column].set_xlabel("cells removed")
        axes[1, column].set_xlabel("cells put back")
    for row in axes:
        row[0].set_ylabel("cosine of the predicted class")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    names = [ranking for ranking in RANKINGS if ranking in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right center")
    # no mathematics: a file may be called $x$
    figure.suptitle(f"{title}: {measured.images} images", parse_math=False)
    figure.savefig(path, dpi=130, format="png")
