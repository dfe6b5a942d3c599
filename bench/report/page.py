"""A report as a page of HTML that fetches and runs nothing, and as GitHub's Markdown without charts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from opal_deploy.bench.report.charts import draw_charts
from opal_deploy.bench.report.content import ARROWS, Cell, Column, Report, Section, Table
from opal_deploy.bench.report.drawing import css_colors, marker_definitions
from opal_deploy.bench.tables import code_span, escape_markdown, markdown_table

# scripts, frames, forms and every fetch are refused by the browser, whatever a model's name tries to be
_CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(report: Report) -> str:
    """Return the whole page."""
    import jinja2

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


def to_markdown(report: Report) -> str:
    """Return the whole report, ending in a newline."""
    lines = [f"# {escape_markdown(report.title)}", ""]
    for machine in report.machines:
        lines += [f"**Machine {machine.letter}**: {escape_markdown(machine.title)}", ""]
        lines += [f"- {escape_markdown(name)}: {escape_markdown(text)}" for name, text in machine.facts]
        lines.append("")
    for section in report.sections:
        lines += _format_section(section)
    return "\n".join(lines).rstrip() + "\n"


def _format_section(section: Section) -> list[str]:
    lines = [f"## {escape_markdown(section.heading)}", "", section.lead, ""]
    for table in section.tables:
        if table.title:
            lines += [f"### {escape_markdown(table.title)}", ""]
        if table.common:
            lines += [f"Every row: {_format_pairs(table.common)}.", ""]
        lines.append(_format_table(table))
    if section.can_improve:
        lines += ["↑ higher is better, ↓ lower is better.", ""]
    if section.replaced:
        lines += [f"Earlier measurements of the same things, replaced by these: {section.replaced}.", ""]
    for entry in section.provenance:
        head = f"Rows {entry.rows}" if len(section.rows) > 1 else "Measured"
        lines.append(f"- {head}: {code_span(entry.command) if entry.command else 'command not recorded'}")
        if entry.timed:
            lines.append(f"  - Timed: {escape_markdown(entry.timed)}")
        if entry.others:
            lines.append(f"  - {_format_pairs(entry.others)}")
    return [*lines, ""]


def _format_table(table: Table) -> str:
    header = [_format_head(column) for column in table.columns]
    rows = [[_format_cell(cell) for cell in row] for row in table.rows]
    return markdown_table(header, rows, [column.numeric for column in table.columns])


def _format_head(column: Column) -> str:
    unit = f" ({escape_markdown(column.unit)})" if column.unit else ""
    return f"{escape_markdown(column.title)}{unit}{ARROWS[column.better]}"


def _format_cell(cell: Cell) -> str:
    text = f"**{escape_markdown(cell.text)}**" if cell.alert else escape_markdown(cell.text)
    return f"{text} {cell.note}" if cell.note else text


def _format_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{escape_markdown(name)} {escape_markdown(text)}" for name, text in pairs)
