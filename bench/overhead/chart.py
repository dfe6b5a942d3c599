"""The overhead as a picture: what each head adds to its backbone, in % of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_deploy.bench.overhead.operations import head_title
from opal_deploy.bench.overhead.table import OverheadTable, Row
from opal_deploy.errors import UsageError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, from dark to light, so that they differ in grey too
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#5B5B5B", "#F0E442")
_PANELS = (
    ("params", "Parameters"),
    ("paper", "Operations, paper's convention"),
)
SUFFIXES = (".svg", ".png")


def check_chart(path: Path | None) -> None:
    """Before any work is done for it.

    Raises:
        UsageError: a chart cannot be written in the format that its name asks for, or into no folder.
        MissingExtra: matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--chart {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--chart {path}: no such folder; make it first")
    require("matplotlib", "bench", "--chart")


def save(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib's.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        # text stays text: it can be searched, and read to somebody
        import matplotlib

        with matplotlib.rc_context({"svg.fonttype": "none"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise UsageError(f"--chart {path}: cannot be written ({error.strerror or error}); choose another") from None


def draw(table: OverheadTable, path: Path, titles: Mapping[str, str]) -> None:
    """Bars for every backbone and number of classes, a mark in each for the linear head.

    Raises:
        UsageError: it cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    backbones = list(dict.fromkeys(row.backbone.name for row in table.rows))
    datasets = list(dict.fromkeys(row.dataset for row in table.rows))
    figure = Figure(figsize=(max(6.4, 1.5 + 1.15 * len(backbones)), 7.2), layout="constrained")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, (what, title) in zip(panels, _PANELS, strict=True):
        _panel(axes, table, what, backbones, datasets)
        axes.set_title(title, loc="left", fontsize=11)
    panels[-1].set_xticks(range(len(backbones)), [_two_lines(titles.get(name, name)) for name in backbones])
    head = head_title(table.head)
    handles: list[Any] = [
        Patch(facecolor=_color(place), label=titles.get(name, name)) for place, name in enumerate(datasets)
    ]
    handles.append(Line2D([], [], color="black", linewidth=2, label="linear head"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    height, width = table.input_size
    figure.suptitle(
        f"What the {head} head adds to its backbone (m = {table.head.prototypes_per_class}, {height}x{width})",
        fontsize=12,
    )
    save(figure, path)


def _panel(axes: Axes, table: OverheadTable, what: str, backbones: list[str], datasets: list[str]) -> None:
    wide = min(0.3, 0.8 / len(datasets))
    for row in table.rows:
        place = datasets.index(row.dataset)
        x = backbones.index(row.backbone.name) + (place - (len(datasets) - 1) / 2) * wide
        axes.bar(x, _share(row, "opal", what), 0.92 * wide, color=_color(place), zorder=2)
        linear = _share(row, "linear", what)
        axes.plot(
            (x - 0.46 * wide, x + 0.46 * wide),
            (linear, linear),
            color="black",
            linewidth=2,
            solid_capstyle="butt",
            zorder=3,
        )
    most = max(_share(row, "linear", what) for row in table.rows)
    axes.set_title(f"linear head: at most {most:.2g} %", loc="right", fontsize=9)
    axes.set_ylabel("% of the backbone")
    axes.set_xlim(-0.5, len(backbones) - 0.5)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#dddddd", zorder=0)
    axes.tick_params(axis="x", length=0, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _two_lines(title: str) -> str:
    """ResNet-50, EfficientNet-V2 S and convnext_tiny on two lines each."""
    place = max(title.rfind(mark) for mark in " -_")
    return title if place < 0 else f"{title[: place + 1].rstrip()}\n{title[place + 1 :]}"


def _share(row: Row, head: str, what: str) -> float:
    return row.percent(head, what)


def _color(place: int) -> str:
    return _COLORS[place % len(_COLORS)]
