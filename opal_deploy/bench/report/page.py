"""A report as a page of HTML that fetches and runs nothing, and as GitHub's Markdown without charts."""

from __future__ import annotations

from importlib.resources import files

from opal_deploy.bench.report.charts import draw_charts
from opal_deploy.bench.report.content import Pairs, Report, Table, TableCell
from opal_deploy.bench.tables import code_span, escape_markdown, markdown_table


def to_html(report: Report) -> str:
    """Return the whole page."""
    import jinja2

    template = files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    parts = [(section, draw_charts(section.kind, section.measurements)) for section in report.sections]
    return environment.from_string(template).render(report=report, parts=parts) + "\n"


def to_markdown(report: Report) -> str:
    """Return the whole report, ending in a newline."""
    lines = [f"# {escape_markdown(report.title)}", ""]
    for letter, title, facts in report.machines:
        lines += [f"**Machine {letter}**: {escape_markdown(title)}", ""]
        lines += [*(f"- {escape_markdown(name)}: {escape_markdown(text)}" for name, text in facts), ""]
    for section in report.sections:
        lines += [f"## {section.heading}", "", section.lead, ""]
        for table in section.tables:
            lines += [f"### {escape_markdown(table.title)}", ""] if table.title else []
            lines += [f"Every row: {_format_pairs(table.common)}.", ""] if table.common else []
            lines.append(_format_table(table))
        for note in section.notes:
            lines += [note, ""]
        for entry in section.provenance:
            command = code_span(entry.command) if entry.command else "command not recorded"
            lines.append(f"- Rows {entry.rows}: {command}")
            lines += [f"  - Timed: {escape_markdown(entry.timed)}"] if entry.timed else []
            lines += [f"  - {_format_pairs(entry.others)}"] if entry.others else []
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _format_table(table: Table) -> str:
    header = [escape_markdown(title) for title, _ in table.columns]
    rows = [[_format_cell(cell) for cell in row] for row in table.rows]
    return markdown_table(header, rows, [numeric for _, numeric in table.columns])


def _format_cell(cell: TableCell) -> str:
    text = f"**{escape_markdown(cell.text)}**" if cell.alert else escape_markdown(cell.text)
    return f"{text} {cell.note}".rstrip()


def _format_pairs(pairs: Pairs) -> str:
    return "; ".join(f"{escape_markdown(name)} {escape_markdown(text)}" for name, text in pairs)
