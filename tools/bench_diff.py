"""List figures of two files of `opal-deploy bench --out` that changed by more than their noise; exit with 1 if worse.

    python tools/bench_diff.py OLD.jsonl NEW.jsonl [TOLERANCE_PERCENT]

A figure has changed if it moved by more than the tolerance (3 %) and by more than the spread of its repeats in either
file; if both have confidence intervals, these must not overlap instead. Changes in marked lines (noisy, throttled) are
doubtful, and never fail. Of several lines that measure the same thing the last counts.
"""

import json
import sys
from pathlib import Path
from typing import Any

# fields of a target that may change between two measurements of the same thing
CHANGING = ("session", "runtime_version", "sha256", "layout")


def read(path: str) -> dict[str, dict[str, Any]]:
    """Return the measurements of a file by what they measure."""
    measurements = {}
    for line in filter(str.strip, Path(path).read_text(encoding="utf-8").split("\n")):
        measured = json.loads(line)
        target = {key: value for key, value in measured["target"].items() if key not in CHANGING}
        measurements[json.dumps([measured["kind"], target, measured["case"]], sort_keys=True)] = measured
    return measurements


def judge(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> float:
    """Return the relative change of a figure, positive if it became better; 0 if that is within the noise."""
    change = (new["value"] - old["value"]) / abs(old["value"] or 1)
    if old["interval"] and new["interval"]:
        is_beyond = new["interval"][0] > old["interval"][1] or new["interval"][1] < old["interval"][0]
    else:
        repeats = [figure["repeats"] or [0] for figure in (old, new)]
        spreads = [(max(row) - min(row)) / abs(old["value"] or 1) for row in repeats]
        is_beyond = abs(change) > max(spreads)
    return (change if new["better"] == "higher" else -change) if is_beyond and abs(change) > tolerance else 0.0


def main() -> None:
    """Compare two files."""
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: {sys.argv[0]} OLD.jsonl NEW.jsonl [TOLERANCE_PERCENT]")
    old, new, tolerance, worse = read(sys.argv[1]), read(sys.argv[2]), float([*sys.argv, "3"][3]) / 100, 0
    for before, after in ((old[key], new[key]) for key in old if key in new):
        for name, figure in after["figures"].items():
            was = before["figures"].get(name)
            if was and figure["better"] and (change := judge(was, figure, tolerance)):
                verdict = "doubtful" if before["marks"] or after["marks"] else "better" if change > 0 else "WORSE"
                worse += verdict == "WORSE"
                values = f"{was['value']:.4g} -> {figure['value']:.4g} {figure['unit']} ({change:+.1%})"
                print(f"{verdict}: {after['target']['name']}, {after['case']}, {name}: {values}")
    print(f"{len(old.keys() & new.keys())} measurements compared, {len(old.keys() ^ new.keys())} in one file only")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
