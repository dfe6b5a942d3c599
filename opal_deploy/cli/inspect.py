"""`opal-deploy inspect`: the contents of a model file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opal_deploy.cli.console import print_json, print_output


def inspect(
    model: Annotated[Path, typer.Argument(help="Exported ONNX file or engine, or checkpoint (ours or the authors').")],
    card: Annotated[bool, typer.Option("--card", help="Write a model card to stdout, in Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write everything to stdout as JSON.")] = False,
) -> None:
    """Show what a model is, where it comes from, and what was checked. Nothing in the file is run."""
    from opal_deploy.auditing import inspection

    if card:
        print_output(inspection.write_card(model))
        return
    contents = inspection.inspect(model)
    if as_json:
        print_json(contents.document)
    else:
        print_output(str(contents))
