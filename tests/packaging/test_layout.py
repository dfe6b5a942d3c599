"""The repository's shape (DESIGN: Layout): rooms have one place, and the README's words are true of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("room", ["train", "export", "bench"])
def test_a_top_level_room_is_reached_by_a_tracked_symbolic_link(room: str) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage", f"opal_deploy/{room}"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")

    assert listed.stdout.startswith("120000 ")
    assert (ROOT / "opal_deploy" / room).readlink() == Path("..") / room


def test_readme_links_point_to_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", text) if "://" not in t]

    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_every_verb_and_option_that_the_readme_names_exists() -> None:
    from typer.main import get_command

    from opal_deploy.cli import app

    commands = dict(get_command(app).commands)  # type: ignore[attr-defined]
    benchmarks = commands["bench"].commands
    options = {
        option
        for command in (*commands.values(), *benchmarks.values())
        for p in command.params
        for option in (*p.opts, *p.secondary_opts)
    }
    options |= {"--debug", "--version", "--help"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    measured = set(re.findall(r"^    opal-deploy bench (\w+)", text, re.MULTILINE))
    assert measured
    assert measured <= benchmarks.keys()
    verbs = set(re.findall(r"^    opal-deploy (\w+)", text, re.MULTILINE))
    # torchrun's own options stand before the module that it starts
    ours = re.sub(r"torchrun .*? -m", "", text)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", ours))
    assert verbs
    assert verbs <= commands.keys()
    assert named - options == set()
