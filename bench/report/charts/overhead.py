"""What a head adds to its backbone, in per cent of it: bars for each backbone, a point for each number of classes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from opal_deploy.bench.measurement import Measurement
from opal_deploy.bench.report.drawing import CARD, Key, Plot, color, label_end, marker, name_rows, plot, rows_height
from opal_deploy.bench.report.tables import Row
from opal_deploy.bench.tables import format_number, format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

_SHARE = re.compile(r"(?P<head>[a-z0-9]+)_(?P<quantity>.+?)(?:_percent)?$")
_TITLES = {
    "params": "Parameters of the head",
    "macs_paper": "Operations of the head, in the paper's convention",
    "macs": "Multiply-accumulates of the head",
    "flops": "True FLOPs of the head",
}
# of several conventions of the same thing one plot is enough: the table has all
_INSTEAD = {"flops": "macs_paper", "macs": "macs_paper"}


def overhead(rows: Sequence[Row]) -> list[Plot]:
    """A plot for each quantity that rows have as a share, in %, of a backbone."""
    # quantity -> head -> backbone -> shares, one for each number of classes
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        for head, quantity, share in _shares(row.measurement):
            name = _backbone(row.measurement)
            found.setdefault(quantity, {}).setdefault(head, {}).setdefault(name, []).append(share)
    return [_plot(quantity, heads) for quantity, heads in found.items() if _INSTEAD.get(quantity) not in found]


def _shares(measurement: Measurement) -> list[tuple[str, str, float]]:
    matches = ((_SHARE.match(name), f.value) for name, f in measurement.figures.items() if f.unit == "%")
    return [(match["head"], match["quantity"], value) for match, value in matches if match]


def _backbone(measurement: Measurement) -> str:
    subject = measurement.target
    return format_value((subject.backbone or subject.name) if subject else "")


def _plot(quantity: str, heads: dict[str, dict[str, list[float]]]) -> Plot:
    names = list(dict.fromkeys(name for shares in heads.values() for name in shares))
    height = 0.62 / len(heads)

    def paint(canvas: Canvas, narrow: bool) -> None:
        axes = canvas.subplots()
        for index, shares in enumerate(heads.values()):
            for place, name in enumerate(names):
                values = shares.get(name, [])
                if not values:
                    continue
                middle = place + (index - (len(heads) - 1) / 2) * height + (0.08 if narrow else 0.0)
                axes.barh(middle, max(values), height=height * 0.86, color=color(index), alpha=0.4)
                axes.scatter(
                    values, [middle] * len(values), s=34, marker=marker(index), color=color(index), edgecolors=CARD,
                    linewidths=0.7, zorder=3,
                )  # fmt: skip
                label_end(axes, max(values), middle, f"{format_number(float(f'{max(values):.3g}'))} %")
        name_rows(axes, names, narrow)
        most = max(value for shares in heads.values() for values in shares.values() for value in values)
        axes.set_xlim(0, most * (1.25 if narrow else 1.12) or 1.0)
        axes.set_xlabel("% of the backbone")

    told = "; ".join(
        f"{name}: {', '.join(f'{head} {_range(shares[name])}' for head, shares in heads.items() if name in shares)}"
        for name in names
    )
    title = _TITLES.get(quantity, format_value(quantity.replace("_", " ")))
    return plot(
        title,
        f"In % of the backbone. {told}.",
        paint,
        rows_height(len(names), 40.0),
        [Key(head, index) for index, head in enumerate(heads)],
        "A point for each number of classes; the bar and its figure are those of the largest.",
    )


def _range(values: list[float]) -> str:
    low, high = format_number(min(values)), format_number(max(values))
    return f"{low} %" if low == high else f"{low} to {high} %"
