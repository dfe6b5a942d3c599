"""`python -m opal_deploy.bench.load SCENARIO`: start `serve`, load it, and write what happened as JSON."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer

from opal_deploy.errors import ExitCode, OpalError, require


def main(
    scenario: Annotated[Literal["soak", "overload", "hostile", "sigterm"], typer.Argument()],
    model: Annotated[Path, typer.Option(help="The file to serve.")],
    images: Annotated[Path, typer.Option(help="A folder of photographs.")],
    hostile: Annotated[Path | None, typer.Option(help="A folder of pictures that are broken, huge or odd.")] = None,
    seconds: Annotated[float, typer.Option(min=5, help="Of each phase.")] = 60.0,
    users: Annotated[int, typer.Option(min=1, help="That send photographs one after the other.")] = 8,
    hostile_users: Annotated[int, typer.Option(min=1)] = 8,
    draw: Annotated[float, typer.Option(min=0, max=1, help="Share of /explain in soak that asks for a sheet.")] = 0.0,
    serve_option: Annotated[list[str] | None, typer.Option(help="More for `serve`, such as --batch=16.")] = None,
    work: Annotated[Path | None, typer.Option(help="Keep logs here; default: a temporary folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the summary here; default: stdout.")] = None,
) -> None:
    """Load a server, and say whether it held."""
    for package in ("locust", "psutil"):
        require(package, "load", "python -m opal_deploy.bench.load")
    from opal_deploy.bench.load.scenarios import LoadOptions, run_scenario

    with tempfile.TemporaryDirectory(prefix="opal-load-") as scratch:
        options = LoadOptions(
            model, images, hostile, seconds, users, hostile_users, draw, work or Path(scratch), serve_option or ()
        )
        try:
            text = json.dumps(run_scenario(scenario, options), indent=1, ensure_ascii=False)
        except OpalError as error:
            typer.echo(f"opal-deploy: {error}", err=True)
            raise typer.Exit(ExitCode.STOPPED_EARLY) from None
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
