"""Helpers of the tests of commands: reading their records, and the one line of a refused call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAIN = "import sys; sys.argv[0] = 'opal-deploy'; from opal_deploy.cli import main; main()"


def read_results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]


def one_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """Return the only line of a refused call."""
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("opal-deploy: ")
    return line


def check(done: subprocess.CompletedProcess[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    """Return an ended call after checking its exit code; a failure shows what it said."""
    assert done.returncode == code, done.stderr
    return done


_CALL_ALL = """
import json, sys
blocked, calls = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(blocked))
from typer.testing import CliRunner
from opal_deploy.cli import app
for call in calls:
    sys.argv = ["opal-deploy", *call]
    done = CliRunner().invoke(app, call, prog_name="opal-deploy")
    print(json.dumps([done.exit_code, done.stdout, done.stderr]))
"""


def call_without(
    blocked: Iterable[str], calls: Iterable[Iterable[object]], cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands one after the other in a process of their own that cannot import these packages."""
    words = [[str(word) for word in call] for call in calls]
    done = subprocess.run(
        [sys.executable, "-c", _CALL_ALL], input=json.dumps([list(blocked), words]), cwd=cwd, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = (json.loads(line) for line in done.stdout.splitlines())
    return [subprocess.CompletedProcess(call, *answer) for call, answer in zip(words, answers, strict=True)]
