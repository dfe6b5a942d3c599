"""The command line: `main` dispatches, each verb is a module, errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from typing import Annotated

import typer

from opal_deploy._version import __version__
from opal_deploy.cli.atlas import atlas
from opal_deploy.cli.bench import bench
from opal_deploy.cli.console import one_line, print_message
from opal_deploy.cli.convert import convert
from opal_deploy.cli.demo import demo
from opal_deploy.cli.diff import diff
from opal_deploy.cli.doctor import doctor
from opal_deploy.cli.evaluate import evaluate
from opal_deploy.cli.explain import explain
from opal_deploy.cli.export import export
from opal_deploy.cli.infer import infer
from opal_deploy.cli.inspect import inspect
from opal_deploy.cli.reproduce import reproduce
from opal_deploy.cli.schema import schema
from opal_deploy.cli.train import train
from opal_deploy.cli.verify import verify
from opal_deploy.errors import OpalError

INTERRUPTED = 130
BUG = 1

app = typer.Typer(
    name="opal-deploy",
    help="Put OPAL image classifiers, which explain themselves, into production.",
    epilog="Exit codes: 0 done; 2 the call or an input is wrong; 3 done, some images failed; 4 verification failed; "
    "5 stopped early; 130 interrupted; 1 our bug.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    train, evaluate, reproduce, export, infer, explain, atlas, convert, diff, verify, inspect, schema, doctor, demo
):  # fmt: skip
    app.command()(verb)
app.add_typer(bench)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"opal-deploy {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def main() -> None:
    """The console script: runs the app, and exits with DESIGN's codes."""
    # before the verb is parsed, so that it works wherever it stands
    debug = "--debug" in sys.argv
    sys.argv = [sys.argv[0], *(argument for argument in sys.argv[1:] if argument != "--debug")]
    # Pillow warns of odd metadata, which is no user's business: what matters becomes an error record
    warnings.filterwarnings("ignore", module=r"PIL\b")
    try:
        app()
    except SystemExit as stop:
        # typer has turned the interrupt into this
        if stop.code == INTERRUPTED:
            print_message("opal-deploy: interrupted")
        raise
    except OpalError as error:
        if debug:
            traceback.print_exc()
        print_message(f"opal-deploy{_process()}: {one_line(str(error))}")
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        print_message(
            f"opal-deploy: this is a bug of ours: {type(error).__name__}: {one_line(str(error))}; "
            "please report it with the output of the same command with --debug"
        )
        raise SystemExit(BUG) from None


def _process() -> str:
    """Which of the processes that torchrun started, where it started several."""
    return f" (process {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
