"""A report as one page of HTML that fetches nothing and runs nothing."""

from __future__ import annotations

from importlib.resources import files

import jinja2

from opal_deploy.bench.report.charts import draw_charts
from opal_deploy.bench.report.content import Report
from opal_deploy.bench.report.drawing import css_colors, marker_definitions

# scripts, frames, forms and every fetch are refused by the browser, whatever a model's name tries to be
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(report: Report) -> str:
    """Return the whole page."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.from_string(files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        parts=[(section, draw_charts(section.kind, section.rows)) for section in report.sections],
        policy=_CONTENT_POLICY,
        light=css_colors(dark=False),
        dark=css_colors(dark=True),
        markers=marker_definitions(),
    )
