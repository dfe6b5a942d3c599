"""MkDocs hooks: pages generated from the code, so that they cannot drift from it."""

from __future__ import annotations

import json
import re
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from opal_deploy.cli import app
from opal_deploy.records.schema import json_schema
from opal_deploy.runtime.gates import GATES, WIDEST


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated: the commands, the fields of a record, the limits of the gates."""
    pages = {
        "reference/cli.md": _commands(),
        "reference/records.md": _fill(files, "reference/records.md", "fields", _fields()),
        "precision.md": _fill(files, "precision.md", "gates", _gates()),
    }
    for path, text in pages.items():
        existing = files.get_file_from_path(path)
        if existing is not None:
            files.remove(existing)
        files.append(File.generated(config, path, content=text))
    return files


def _commands() -> str:
    """Every command with its options, as `--help` has them."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="opal-deploy")
    text = get_docs_for_click(obj=command, ctx=context, name="opal-deploy", title="Commands")
    head, heading, bench = text.partition("## `opal-deploy bench`")
    text = _with_summaries(head, command) + heading + _with_summaries(bench, command.commands["bench"])
    # placeholders such as DATA/<class>/*.jpg are no HTML
    return re.sub(r"<(?=[a-z]+>/)", "&lt;", text)


def _with_summaries(text: str, group: Any) -> str:
    """Complete the summaries in the list of a group's commands, which the generator cuts off."""
    for name, command in group.commands.items():
        line = f"* `{name}`: " + (command.help or "").partition("\n")[0].strip()
        text = re.sub(rf"^\* `{name}`: .*$", lambda _, line=line: line, text, flags=re.MULTILINE)
    return text


def _fill(files: Files, path: str, name: str, text: str) -> str:
    """The hand-written page with `text` in place of `{{ name }}`."""
    page = files.get_file_from_path(path)
    assert page is not None
    placeholder = f"{{{{ {name} }}}}"
    assert placeholder in page.content_string, f"{path} has no {placeholder}"
    return page.content_string.replace(placeholder, text)


def _fields() -> str:
    """The fields of a record as tables, from the JSON schema."""
    return "\n\n".join(_tables(json_schema()))


def _gates() -> str:
    """The limits of every precision's gate as a table."""
    rows = [
        "| gate | cosine | logit | score | tie | the predicted class's cells | all cells |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, gate in {**GATES, "widest": WIDEST}.items():
        cells = "every one" if gate.cells >= 1 else f"{gate.cells:.1%}"
        all_cells = "every one" if gate.cells >= 1 else f"{gate.all_cells:.0%}"
        limits = " | ".join(f"{limit:g}" for limit in (gate.cosine, gate.logit, gate.score, gate.tie))
        rows.append(f"| `{name}` | {limits} | {cells} | {all_cells} |")
    return "\n".join(rows)


def _tables(schema: dict[str, Any]) -> list[str]:
    """One table of fields for the record, and one for each object that it contains."""
    found = []
    for title, part in (("A record", schema), *schema.get("$defs", {}).items()):
        if "properties" not in part:
            continue
        rows = [f"### {title}", "", "| field | type | meaning |", "|---|---|---|"]
        for name, field in part["properties"].items():
            rows.append(f"| `{name}` | {_type(field)} | {field.get('description', '')} |")
        found.append("\n".join(rows))
    return found


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    kind = field.get("type", "")
    if kind == "array":
        return f"array of {_type(field.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
