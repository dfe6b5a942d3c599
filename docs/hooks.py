"""MkDocs hooks: pages generated from the code, so that they stay in step with it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.resources import as_file
from importlib.resources import files as package_files
from inspect import Parameter, formatannotation
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from opal_deploy.api.infer import InferOptions
from opal_deploy.api.options import AtlasOptions
from opal_deploy.auditing.options import DiffOptions, DriftOptions, VerifyOptions
from opal_deploy.cli import app
from opal_deploy.editing.api import EditOptions
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.export.options import EngineOptions, OnnxOptions, TritonOptions, WebOptions
from opal_deploy.options import Options, default_of, option_fields
from opal_deploy.records.record import json_schema
from opal_deploy.records.tables import COLUMNS
from opal_deploy.runtime.gates import GATES, WIDEST
from opal_deploy.train.options import TrainOptions
from opal_deploy.web.site import Site

# of `make ort-web`; without it the page that runs a model is left out
_ORT_WEB = Path(__file__).parents[1] / ".ort-web/node_modules/onnxruntime-web"
_TRY_IT = {
    True: (
        '<iframe src="demo/index.html" title="A page that runs the model of the demo" allow="camera" '
        'style="width: 100%; height: 60rem; border: 1px solid var(--md-default-fg-color--lightest)"></iframe>\n\n'
        '<a href="demo/index.html" target="_blank">Open the page by itself</a>. Browsers run it from a web server '
        "only: `python -m http.server --directory build/site`."
    ),
    False: "This build lacks the page: run `make ort-web`, which needs npm, then `make docs`.",
}
# functions by the options class of their keywords
_FUNCTIONS: dict[str, type[Options]] = {
    "create_atlas": AtlasOptions,
    "diff": DiffOptions,
    "edit_model": EditOptions,
    "evaluate_model": EvaluateOptions,
    "export_engines": EngineOptions,
    "export_model": OnnxOptions,
    "export_triton": TritonOptions,
    "export_web": WebOptions,
    "find_drift": DriftOptions,
    "run_inference": InferOptions,
    "train_model": TrainOptions,
    "verify": VerifyOptions,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated: the commands, the fields of a record, the limits of the gates."""
    pages = {
        "reference/cli.md": _commands(),
        "reference/records.md": _fill(files, "reference/records.md", fields=_fields(), columns=_columns()),
        "reference/python.md": _fill(
            files, "reference/python.md", **{name: _keywords(options) for name, options in _FUNCTIONS.items()}
        ),
        "precision.md": _fill(files, "precision.md", gates=_gates()),
        "try-it.md": _fill(files, "try-it.md", page=_TRY_IT[_ORT_WEB.is_dir()]),
    }
    for path, text in pages.items():
        existing = files.get_file_from_path(path)
        if existing is not None:
            files.remove(existing)
        files.append(File.generated(config, path, content=text))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write the page that runs the model of the demo, which try-it.md shows."""
    if _ORT_WEB.is_dir():
        with as_file(package_files("opal_deploy.cli.demo") / "creatures.onnx") as model:
            Site(Path(config.site_dir, "demo"), _ORT_WEB, overwrite=True).write(model)


def _commands() -> str:
    """Return every command with its options, as `--help` shows them."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="opal-deploy")
    text = get_docs_for_click(obj=command, ctx=context, name="opal-deploy", title="Commands")
    head, heading, bench = text.partition("## `opal-deploy bench`")
    text = _with_summaries(head, command) + heading + _with_summaries(bench, command.commands["bench"])
    # escape placeholders such as DATA/<class>/*.jpg, but not in code
    return re.sub(r"(`[^`]*`)|<(?=[A-Za-z])", lambda match: match[1] or "&lt;", text)


def _with_summaries(text: str, group: Any) -> str:
    """Return the list of a group's commands with whole summaries, which the generator cuts off."""
    for name, command in group.commands.items():
        line = f"* `{name}`: " + (command.help or "").partition("\n")[0].strip()
        text = re.sub(rf"^\* `{name}`: .*$", lambda _, line=line: line, text, flags=re.MULTILINE)
    return text


def _fill(files: Files, path: str, **texts: str) -> str:
    """Return the hand-written page with each text in place of its `{{ name }}`."""
    page = files.get_file_from_path(path)
    assert page is not None
    content = page.content_string
    # on the site every name has its own entry
    content = re.sub(r"<!-- signatures -->.*?<!-- /signatures -->", "", content, flags=re.DOTALL)
    for name, text in texts.items():
        placeholder = f"{{{{ {name} }}}}"
        assert placeholder in content, f"{path} has no {placeholder}"
        content = content.replace(placeholder, text)
    return content


def _keywords(options: type[Options]) -> str:
    """Return the keywords of a function as a table, from the options class that declares them."""
    rows = ["| keyword | type | default | meaning |", "|---|---|---|---|"]
    for field, annotation, option in option_fields(options):
        if option is not None:
            default = option.default or (f"`{value!r}`" if (value := default_of(field)) is not Parameter.empty else "")
            meaning = option.help.replace("|", "\\|")
            rows.append(f"| `{field.name}` | {_annotation(annotation)} | {default} | {meaning} |")
    return "\n".join(rows)


def _annotation(annotation: Any) -> str:
    """Return a keyword's type: choices one by one, everything else as in code without `None`."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice!r}`" for choice in get_args(annotation))
    if get_origin(annotation) in (tuple, Sequence):
        return f"sequence of {_annotation(get_args(annotation)[0])}"
    if get_origin(annotation) in (Union, UnionType):
        kinds = [_annotation(each) for each in get_args(annotation) if each is not type(None)]
        return " or ".join(dict.fromkeys("path" if "PathLike" in kind else kind for kind in kinds))
    return f"`{formatannotation(annotation)}`"


def _columns() -> str:
    """Return the names of a table's columns."""
    return ", ".join(f"`{name}`" for name in COLUMNS)


def _fields() -> str:
    """Return the fields of a record as tables, from the JSON schema."""
    return "\n\n".join(_tables(json_schema()))


def _gates() -> str:
    """Return the limits of every precision's gate as a table."""
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
    """Return a table of fields for each kind of record, and for each object that they contain."""
    found = []
    for title, part in schema["$defs"].items():
        rows = [f"### {title}", "", part["description"], "", "| field | type | meaning |", "|---|---|---|"]
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
        entries = field.get("prefixItems")
        return f"array of {len(entries)} {_type(entries[0])}s" if entries else f"array of {_type(field['items'])}"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)
