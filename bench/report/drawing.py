"""Plots as SVG that is part of its page: text stays text, and the page's style sets every colour.

Matplotlib draws with stand-in colours, which become `currentColor` and custom properties of CSS afterwards, so that one
drawing suits light, dark and paper. Each plot is drawn twice, for a wide page and for a phone: shrinking one drawing to
360 pixels would shrink its letters as well.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from opal_deploy.visualization.palette import BASE_COLORS, BLACK, RGB, WHITE, contrast_ratio, to_hex

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# stand-ins that no drawing has by chance
INK, SOFT, GRID, CARD = "#010101", "#010102", "#010103", "#010104"
_CSS = {INK: "currentColor", SOFT: "var(--soft)", GRID: "var(--line)", CARD: "var(--card)"}

# light and dark cards, as the page's style has them; lines on them need 3:1 (WCAG 1.4.11), which looks dull on dark
LIGHT_CARD, DARK_CARD = (255, 255, 255), (31, 31, 29)
NEEDED, NEEDED_ON_DARK = 3.0, 4.5
# without the yellow, which no white page can show as a line; in an order in which neighbours lie far apart
HUES = tuple(BASE_COLORS[place] for place in (0, 2, 7, 4, 6, 3, 5))
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.5, 1.5)), (0, (7, 1.6, 1.5, 1.6)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")

WIDE, NARROW = 880.0, 340.0
_POINTS = 72.0  # of matplotlib's SVG: one unit of the drawing is one pixel of CSS at full size
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"
_STAND_IN = re.compile(r"#01010[1-4]|#0102[0-9a-f]{2}")
_FAMILY = re.compile(r"font-family:[^;]*;?\s*")

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "lines.linewidth": 2.0,
    "lines.markersize": 7.0,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
}


@dataclass(frozen=True)
class Key:
    """One entry of a plot's legend: its series, and how that is drawn."""

    label: str
    series: int
    drawn: Literal["points", "bar", "line"] = "points"

    @property
    def symbol(self) -> str:
        """The marker of points, else `bar`, `line0`, `line1`, ..."""
        return {"points": marker(self.series), "bar": "bar", "line": f"line{self.series % len(DASHES)}"}[self.drawn]

    @property
    def color(self) -> str:
        """For CSS."""
        return f"var(--s{self.series % len(HUES)})"

    @property
    def opacity(self) -> float:
        """Of areas: see `faded`."""
        return faded(self.series) if self.drawn == "bar" else 1.0


@dataclass(frozen=True)
class Plot:
    """A plot for a page.

    Attributes:
        title: what it shows. description: what somebody who cannot see it must know; the table has the numbers.
        wide, narrow: `<svg>` elements without colours of their own.
        note: how to read it, where that is not plain.
        legend: entries, which the page sets as text, so that long names wrap.
    """

    title: str
    description: str
    wide: str
    narrow: str
    legend: tuple[Key, ...] = ()
    note: str = ""


Paint = Callable[["Canvas", bool], None]


def plot(
    title: str,
    description: str,
    paint: Paint,
    height: Callable[[bool], float],
    legend: Sequence[Key] = (),
    note: str = "",
) -> Plot:
    """Draw twice.

    Args:
        paint: draws on an empty figure; its second argument says whether the drawing is the narrow one.
        height: in pixels, of the wide and of the narrow drawing.
    """
    label = f"{title}. {description}"
    wide, narrow = (_draw(paint, is_narrow, height(is_narrow), label) for is_narrow in (False, True))
    return Plot(title, description, wide, narrow, tuple(legend), note)


def color(series: int) -> str:
    """The stand-in of a series' colour, for matplotlib."""
    return f"#0102{series % len(HUES):02x}"


def marker(series: int) -> str:
    """The marker of a series: shapes and colours repeat at different lengths, so that 56 series differ."""
    return MARKERS[series % len(MARKERS)]


def dash(series: int) -> Any:
    """The dashes of a series that is a line without markers."""
    return DASHES[series % len(DASHES)]


def faded(series: int) -> float:
    """The opacity of a series' area: areas have no markers, so that those with a repeated colour are paler."""
    return 1.0 if series < len(HUES) else 0.5


def properties(dark: bool) -> str:
    """The custom properties of CSS that plots use for their series."""
    card, needed = (DARK_CARD, NEEDED_ON_DARK) if dark else (LIGHT_CARD, NEEDED)
    return " ".join(f"--s{place}: {to_hex(readable(hue, card, needed))};" for place, hue in enumerate(HUES))


def readable(hue: RGB, background: RGB, needed: float) -> RGB:
    """`hue`, moved towards black or white only until its contrast to `background` is what is needed."""
    target = BLACK if contrast_ratio(BLACK, background) > contrast_ratio(WHITE, background) else WHITE
    for step in range(101):
        red, green, blue = (round(h + (t - h) * step / 100) for h, t in zip(hue, target, strict=True))
        if contrast_ratio((red, green, blue), background) >= needed:
            return red, green, blue
    return target


def _draw(paint: Paint, narrow: bool, height: float, label: str) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": f"{label}{narrow}"}), warnings.catch_warnings():
        # letters that the measuring font lacks: the browser's fonts have them
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        width = NARROW if narrow else WIDE
        canvas = Canvas(figsize=(width / _POINTS, height / _POINTS), layout="constrained")
        FigureCanvasSVG(canvas)
        paint(canvas, narrow)
        stream = io.StringIO()
        canvas.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _inline(stream.getvalue(), label, width, height)


def _inline(drawing: str, label: str, width: float, height: float) -> str:
    """Matplotlib's document as an element of a page: named, coloured by the page, with ids of its own."""
    root = ElementTree.fromstring(drawing)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    own = f"p{hashlib.sha256(f'{label}{width}'.encode()).hexdigest()[:10]}-"
    for element in root.iter():
        if (name := element.get("id")) is not None:
            element.set("id", own + name)
        if (target := element.get(_HREF)) is not None:
            del element.attrib[_HREF]
            element.set("href", target.replace("#", f"#{own}"))
        if (clip := element.get("clip-path")) is not None:
            element.set("clip-path", clip.replace("#", f"#{own}"))
        if (style := element.get("style")) is not None:
            element.set("style", _FAMILY.sub("", _STAND_IN.sub(_property, style)))
    root.attrib.clear()
    root.attrib.update({"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": label, "class": "plot"})
    ElementTree.register_namespace("", _SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _property(match: re.Match[str]) -> str:
    found = match.group()
    return _CSS.get(found) or f"var(--s{int(found[-2:], 16)})"


def name_rows(axes: Axes, names: Sequence[str], narrow: bool) -> None:
    """Name the rows 0, 1, ... of a plot whose rows run downwards: beside them, or above them where there is no room."""
    from opal_deploy.bench.tables import shorten

    axes.set_ylim(len(names) - 0.5, -0.75 if narrow else -0.5)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    if not narrow:
        axes.set_yticks(range(len(names)), [shorten(name, 44) for name in names])
        return
    axes.set_yticks([])
    for place, name in enumerate(names):
        axes.text(
            0.0, place - 0.3, shorten(name, 46), transform=axes.get_yaxis_transform(), va="bottom", fontsize=11.5,
            clip_on=False,
        )  # fmt: skip


def label_end(axes: Axes, x: float, y: float, text: str, room: float = 6) -> None:
    """Write to the right of where a bar or a line ends."""
    axes.annotate(text, (x, y), (room, 0), textcoords="offset points", va="center", fontsize=11)


def rows_height(count: int, each: float = 30.0) -> Callable[[bool], float]:
    """The height for `count` named rows and an axis."""
    return lambda narrow: 62.0 + count * (each + 16.0 if narrow else each)
