"""The command line: one module per command, which parses, calls and prints; an error is one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from opal_deploy._version import __version__
from opal_deploy.cli.atlas import atlas
from opal_deploy.cli.bench import bench
from opal_deploy.cli.console import CommandGroup, GroupedCommand, one_line, print_message
from opal_deploy.cli.convert import convert, schema
from opal_deploy.cli.demo import demo
from opal_deploy.cli.diff import diff
from opal_deploy.cli.doctor import doctor
from opal_deploy.cli.drift import drift
from opal_deploy.cli.edit import edit
from opal_deploy.cli.evaluate import evaluate
from opal_deploy.cli.explain import explain
from opal_deploy.cli.export import export
from opal_deploy.cli.infer import infer
from opal_deploy.cli.inspect import inspect
from opal_deploy.cli.options import expand_options
from opal_deploy.cli.reproduce import reproduce
from opal_deploy.cli.serve import serve
from opal_deploy.cli.train import train
from opal_deploy.cli.verify import verify
from opal_deploy.errors import ExitCode, OpalError

# reasons why the system refuses a file that the user names
_REFUSED = (
    errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS
)  # fmt: skip
# UsageError of click, which typer bundles or imports
_CallError: Any = typer.BadParameter.__bases__[0]
# our commands by the names that other tools use
_FOREIGN_COMMANDS = {"predict": "infer", "val": "evaluate"}


class ErrorHandlingGroup(CommandGroup):
    """The root command: every failure is one line on stderr and a documented exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that `args` names; click's error for an unknown one suggests ours for another tool's."""
        try:
            return super().resolve_command(ctx, args)
        except _CallError as error:
            if args and (ours := _FOREIGN_COMMANDS.get(args[0])):
                error.message = f"No such command {args[0]!r}. Did you mean {ours!r}?"
            raise

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any) -> Any:
        """Parse `args` (default: `sys.argv[1:]`), run the command, and exit.

        `--debug` is accepted anywhere in `args` and shows the traceback of an error.

        Raises:
            SystemExit: always; with 0, or the exit code of the error.
        """
        typed = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in typed
        arguments = [argument for argument in typed if argument != "--debug"]
        # in standalone mode typer prints its own box of five lines
        extra["standalone_mode"] = False
        try:
            code = super().main(arguments, prog_name or "opal-deploy", *rest, **extra)
            # typer's answer to KeyboardInterrupt
            if code == ExitCode.INTERRUPTED:
                print_message("opal-deploy: interrupted")
            raise SystemExit(code or ExitCode.DONE)
        except _CallError as error:
            # a group without a command printed its help
            if type(error).__name__ != "NoArgsIsHelpError":
                print_message(f"opal-deploy: {one_line(_describe(error))}")
            raise SystemExit(ExitCode.USAGE) from None
        except OpalError as error:
            if debug:
                traceback.print_exc()
            print_message(f"opal-deploy{_rank()}: {one_line(str(error))}")
            raise SystemExit(error.exit_code) from None
        except Exception as error:
            if debug:
                traceback.print_exc()
            if isinstance(error, OSError) and error.errno in _REFUSED and error.filename is not None:
                print_message(f"opal-deploy: {one_line(f'{error.filename}: {error.strerror}')}; give another file")
                raise SystemExit(ExitCode.USAGE) from None
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                place = error.filename or "output"
                print_message(f"opal-deploy: {one_line(f'{place}: {error.strerror}')}; free space there, then repeat")
                raise SystemExit(ExitCode.STOPPED_EARLY) from None
            print_message(
                f"opal-deploy: internal error: {type(error).__name__}: {one_line(str(error))}. "
                "Please report it with the output of the command run with --debug."
            )
            raise SystemExit(ExitCode.BUG) from None


app = typer.Typer(
    name="opal-deploy",
    cls=ErrorHandlingGroup,
    help="Deploy self-explaining OPAL image classifiers.",
    epilog="Exit codes: 0 done; 2 invalid call or input; 3 done, some images failed; 4 verification failed; "
    "5 stopped early; 130 interrupted; 1 bug in opal-deploy.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    train, evaluate, reproduce, export, infer, serve, explain, atlas, convert, diff, drift, verify, inspect, schema,
    doctor, edit, demo,
):  # fmt: skip
    app.command(cls=GroupedCommand)(expand_options(command))
app.add_typer(bench)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"opal-deploy {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the console script `opal-deploy`."""
    # closed streams, as of services: Python has None for them
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # to the end of the process
    # Pillow warns about odd metadata; what matters becomes an error record
    warnings.filterwarnings("ignore", module=r"PIL\b")
    app()


def _describe(error: Any) -> str:
    """Return an error of typer, such as an unknown option, as one line that names the command's help."""
    command = error.ctx.command_path if error.ctx else "opal-deploy"
    text = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    # typer converts values with pydantic, whose text lacks the value
    for details in error.__cause__.errors()[:1] if hasattr(error.__cause__, "errors") else ():
        value, message = repr(details["input"]), str(details["msg"])
        if value not in text:
            text = text.replace(message, f"{value}: {message[:1].lower()}{message.partition(', unable')[0][1:]}")
    return f"{text[:1].lower()}{text[1:]}{' See' if text.endswith('?') else '; see'} {command} --help"


def _rank() -> str:
    """Return " (process RANK)" if torchrun started several processes, else an empty string."""
    return f" (process {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
