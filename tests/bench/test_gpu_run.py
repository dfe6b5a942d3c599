"""The script that measures everything on a GPU: its syntax, and every command line that it would run."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import typer

from opal_deploy.cli import app

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu_run.sh"
MAIN = "from opal_deploy.cli import main; main()"


def list_commands(tmp_path, **environment):
    """Return the steps that a run would do: name and command line."""
    done = subprocess.run(
        ["bash", SCRIPT, "-", tmp_path / "out"],
        env={**os.environ, **environment, "PRINT": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [shlex.split(line) for line in done.stdout.splitlines()]


def parse(arguments):
    """Parse a command line of opal-deploy to its command and parameters; raise what a wrong one raises."""
    command, context = typer.main.get_command(app), None
    name = "opal-deploy"
    while hasattr(command, "resolve_command"):
        context = command.make_context(name, list(arguments), parent=context)
        name, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
    return name, command.make_context(name, list(arguments), parent=context).params


@pytest.mark.parametrize("environment", [{}, {"DRY": "1"}], ids=["gpu", "dry"])
def test_every_command_of_the_gpu_script_parses(tmp_path, environment):
    steps = list_commands(tmp_path, **environment)
    commands = {name: line[line.index(MAIN) + 1 :] for name, *line in steps if MAIN in line}
    assert len(commands) > 10
    parsed = {name: parse(arguments) for name, arguments in commands.items()}
    assert {name for name, _ in parsed.values()} >= {"pipeline", "throughput", "latency", "compare", "demo"}
    assert not (tmp_path / "out" / "bench.jsonl").exists()
