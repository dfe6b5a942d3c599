"""Helpers of the tests of commands: reading their records, and the one line of a refused call."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Opal = Callable[..., "subprocess.CompletedProcess[str]"]
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
