"""A report as GitHub-flavoured Markdown: the tables and how they were measured, no plots."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from opal_deploy.bench.report.content import Report, Section
from opal_deploy.bench.report.tables import Cell, Column, Table
from opal_deploy.bench.tables import format_value

# what begins markup anywhere in a line; `&`, `<` and `>` become entities, and line ends are visible already
_MARKUP = re.compile(r"([\\`*_\[\]|~$@])")
ARROWS = {"higher": " ↑", "lower": " ↓", None: ""}


def to_markdown(report: Report) -> str:
    """The whole report, ending in a line end."""
    lines = [f"# {escaped(report.title)}", ""]
    for machine in report.machines:
        lines += [f"**Machine {machine.letter}**: {escaped(machine.title)}", ""]
        lines += [f"- {escaped(name)}: {escaped(text)}" for name, text in (*machine.hardware, *machine.software)]
        lines.append("")
    for section in report.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def escaped(text: str) -> str:
    """Text in which Markdown and HTML find nothing to act on."""
    return _MARKUP.sub(r"\\\1", html.escape(format_value(text), quote=False))


def code(text: str) -> str:
    """Text as code, whatever backticks are in it."""
    text = format_value(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    room = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{room}{text}{room}{fence}"


def _section(section: Section) -> list[str]:
    lines = [f"## {escaped(section.heading)}", "", section.lead, ""]
    for table in section.tables:
        if table.title:
            lines += [f"### {escaped(table.title)}", ""]
        if table.common:
            lines += [f"Every row: {_pairs(table.common)}.", ""]
        lines += [*_table(table), ""]
    if section.can_improve:
        lines += ["↑ higher is better, ↓ lower is better.", ""]
    if section.replaced:
        lines += [f"Earlier measurements of the same things, replaced by these: {section.replaced}.", ""]
    for account in section.accounts:
        head = f"Rows {account.rows}" if len(section.rows) > 1 else "Measured"
        lines.append(f"- {head}: {code(account.command) if account.command else 'command not recorded'}")
        if account.timed:
            lines.append(f"  - Timed: {escaped(account.timed)}")
        if account.others:
            lines.append(f"  - {_pairs(account.others)}")
    return [*lines, ""]


def _table(table: Table) -> list[str]:
    return [
        _line(_head(column) for column in table.columns),
        _line("---:" if column.numeric else "---" for column in table.columns),
        *(_line(map(_cell, row)) for row in table.rows),
    ]


def _head(column: Column) -> str:
    unit = f" ({escaped(column.unit)})" if column.unit else ""
    return f"{escaped(column.title)}{unit}{ARROWS[column.better]}"


def _cell(cell: Cell) -> str:
    text = f"**{escaped(cell.text)}**" if cell.alert else escaped(cell.text)
    return f"{text} {cell.note}" if cell.note else text


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{escaped(name)} {escaped(text)}" for name, text in pairs)
