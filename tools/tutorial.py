"""Write the figures of docs/tutorial.md again, from what its commands print.

    python tools/tutorial.py              # runs `demo`, which takes minutes
    python tools/tutorial.py demo.log     # takes what it printed

A line that the page shows is replaced by the last printed line that differs from it in numbers only. A shown line that
nothing printed is an error: the page is stale. The sentence on the evidence gets its figures from the same lines. The
table of seeds and the sums of the sheet are written by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/tutorial.md"
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_SENTENCE = re.compile(r"\d+ %( lies on a part that distinguishes the species, )[\d.]+ times")
_NUMBER = re.compile(r"\d[\d,.:]*(?:e-?\d+)?(?:\+cu\d+)?")
# made by hand: what no demo prints
_OTHERS = ("$ pip", "$ opal-deploy doctor", "$ opal-deploy explain")


def mask(line: str) -> str:
    """Return a line with its numbers alike, and numbers of several digits after each other as one."""
    return _NUMBER.sub("#", line.strip())


def fill(page: str, printed: list[str]) -> str:
    """Return the page with the printed lines; raise ValueError for a shown line that was not printed."""
    known = {mask(line): line.rstrip() for line in printed}

    def fill_block(match: re.Match[str]) -> str:
        if match[1].startswith(_OTHERS):
            return match[0]
        lines = []
        is_command = False
        for line in match[1].splitlines():
            is_command = line.startswith("$ ") or (is_command and lines[-1].endswith("\\"))
            if not is_command and line.strip() != "...":
                if mask(line) not in known:
                    raise ValueError(f"not printed any more: {line}")
                line = known[mask(line)]
            lines.append(line)
        return "```console\n" + "\n".join(lines) + "\n```"

    pointing = re.search(
        r"on a distinguishing part ([\d.]+) % .*\(random ([\d.]+) %\)$", "\n".join(printed), re.MULTILINE
    )
    if pointing is None or not _SENTENCE.search(page):
        raise ValueError("not printed, or not on the page: the share of the evidence on distinguishing parts")
    share, random = map(float, pointing.groups())
    page = _SENTENCE.sub(rf"{share:.0f} %\g<1>{share / random:.1f} times", page)
    return _BLOCK.sub(fill_block, page)


def main() -> None:
    """Fill the page."""
    if sys.argv[1:]:
        printed = Path(sys.argv[1]).read_text("utf-8")
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "opal_deploy", "demo", "--out", "opal-demo"]
            done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
            printed = done.stdout.decode()
    PAGE.write_text(fill(PAGE.read_text("utf-8"), printed.splitlines()), encoding="utf-8")


if __name__ == "__main__":
    main()
