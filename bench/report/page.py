"""A report as one page of HTML that fetches nothing and runs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from opal_deploy.bench.report.charts import plots_of
from opal_deploy.bench.report.content import Report, Section
from opal_deploy.bench.report.drawing import Plot, properties

# scripts, frames, forms and every fetch are refused by the browser, whatever a model's name tries to be
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_TEMPLATE = "report.html.jinja"
# the legend's symbols, drawn around 0 as matplotlib's markers are
_SYMBOLS = {
    "o": "M0-4.6A4.6 4.6 0 1 1 0 4.6 4.6 4.6 0 1 1 0-4.6Z",
    "s": "M-4.2-4.2H4.2V4.2H-4.2Z",
    "^": "M0-4.9 4.8 4.2H-4.8Z",
    "D": "M0-5.6 5.6 0 0 5.6-5.6 0Z",
    "v": "M0 4.9 4.8-4.2H-4.8Z",
    "P": "M-1.7-5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5V-1.7H-1.7Z",
    "X": "M-5-2.6-2.6-5 0-2.4 2.6-5 5-2.6 2.4 0 5 2.6 2.6 5 0 2.4-2.6 5-5 2.6-2.4 0Z",
    "p": "M0-5 4.8-1.5 2.9 4.1H-2.9L-4.8-1.5Z",
    "line0": "M-6-1.4H6V1.4H-6Z",
    "line1": "M-6-1.4H-1V1.4H-6ZM1-1.4H6V1.4H1Z",
    "line2": "M-6-1.4H-3.5V1.4H-6ZM-1.2-1.4H1.2V1.4H-1.2ZM3.5-1.4H6V1.4H3.5Z",
    "line3": "M-6-1.4H1V1.4H-6ZM3.5-1.4H6V1.4H3.5Z",
    "bar": "M-5.5-5.5H5.5V5.5H-5.5Z",
}


@dataclass(frozen=True)
class Illustrated:
    """A section and its plots."""

    section: Section
    plots: tuple[Plot, ...]


def to_html(report: Report) -> str:
    """The whole page; needs jinja2 and matplotlib."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string(files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    parts = [Illustrated(section, tuple(plots_of(section.kind, section.rows))) for section in report.sections]
    return template.render(
        report=report,
        parts=parts,
        policy=CONTENT_POLICY,
        light=properties(dark=False),
        dark=properties(dark=True),
        symbols=_SYMBOLS,
    )
