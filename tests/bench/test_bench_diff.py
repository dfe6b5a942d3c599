"""`tools/bench_diff.py`: what counts as a change."""

import subprocess
import sys
from pathlib import Path

import pytest

from opal_deploy.bench.measurement import Figure, Measurement, Target

SCRIPT = Path(__file__).parents[2] / "tools" / "bench_diff.py"


def write(path, figure, marks=(), session="1.31"):
    target = Target("m.onnx", session=session)
    line = Measurement("latency", target, {"batch": 1}, {"p50_ms": figure}, marks=marks, machine={}).to_line()
    path.write_text(f"{line}\n")
    return path


@pytest.mark.parametrize(
    ("old", "new", "marks", "verdict"),
    [
        (Figure(10, "ms", "lower"), Figure(11, "ms", "lower"), (), "WORSE"),
        (Figure(10, "ms", "lower"), Figure(9, "ms", "lower"), (), "better"),
        (Figure(10, "/s", "higher"), Figure(9, "/s", "higher"), (), "WORSE"),
        (Figure(10, "ms", "lower"), Figure(11, "ms", "lower"), ("noisy",), "doubtful"),
        (Figure(10, "ms", "lower"), Figure(10.2, "ms", "lower"), (), None),
        (Figure(10, "ms", "lower", (9, 10, 11)), Figure(11, "ms", "lower"), (), None),
        (Figure(10, "ms"), Figure(11, "ms"), (), None),
        # intervals tell more than the spread
        (Figure(1, "", "higher", (0.5, 1.5), (0.95, 1.05)), Figure(0.9, "", "higher", (), (0.88, 0.92)), (), "WORSE"),
        (Figure(1, "", "higher", (), (0.9, 1.1)), Figure(0.9, "", "higher", (), (0.85, 0.95)), (), None),
    ],
)
def test_a_change_beyond_the_noise_is_judged(tmp_path, old, new, marks, verdict):
    files = write(tmp_path / "old.jsonl", old), write(tmp_path / "new.jsonl", new, marks, session="1.32")
    done = subprocess.run([sys.executable, SCRIPT, *files], capture_output=True, text=True)
    assert done.returncode == (verdict == "WORSE"), done.stderr
    *changes, summary = done.stdout.splitlines()
    assert [line.split(":")[0] for line in changes] == ([verdict] if verdict else [])
    assert summary == "1 measurements compared, 0 in one file only"
