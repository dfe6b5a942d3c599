"""The command line as a person runs it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MAIN = "import sys; sys.argv[0] = 'opal-deploy'; from opal_deploy.cli import main; main()"
Opal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def opal() -> Opal:
    """Runs `opal-deploy`; `blocked` names packages that it cannot import."""

    def run(
        *arguments: str | Path, cwd: Path | None = None, blocked: tuple[str, ...] = (), **options: object
    ) -> subprocess.CompletedProcess[str]:
        hide = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); " if blocked else ""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, "-c", hide + MAIN, *map(str, arguments)],
            cwd=cwd,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=120,
            **options,  # type: ignore[call-overload]
        )

    return run
