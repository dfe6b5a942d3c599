"""The script of tasks.py, without `Any` where a type is known, as it stands."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("tasks.py")


def test_the_tasks_are_typed_and_run(exact_model, make_pictures, tmp_path):
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(SCRIPT)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
    make_pictures(tmp_path / "images", 4)
    done = subprocess.run(
        [sys.executable, SCRIPT, exact_model, tmp_path / "images", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.strip().splitlines()[-2:]
    assert "sheet.png 4 abstained" in first
    assert last == "True 0 4 file"
