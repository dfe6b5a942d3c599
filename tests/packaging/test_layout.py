"""The repository's shape, and that README and documentation name only what exists."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("package", ["train", "export", "bench"])
def test_a_top_level_name_is_a_tracked_link_to_the_package(package):
    listed = subprocess.run(["git", "ls-files", "--stage", package], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert listed.stdout.startswith("120000 ")
    assert (ROOT / package).readlink() == Path("opal_deploy") / package


def test_the_wheel_holds_every_file_that_is_not_code():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"].items()
    folders = {package: ROOT.joinpath(*package.split(".")) for package, _ in patterns}
    packed = {path for package, globs in patterns for glob in globs for path in folders[package].glob(glob)}
    kinds = (".json", ".toml", ".jinja", ".css", ".js", ".onnx", ".typed")
    assert packed == {path for path in (ROOT / "opal_deploy").rglob("*") if path.suffix in kinds}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_point_to_files_that_exist(page):
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")) if "://" not in t]
    # two pages are generated when the site is built
    generated = {ROOT / "docs/reference/cli.md", ROOT / "docs/reference/records.md"}
    missing = [t for t in targets if t and not (page.parent / t).exists()]
    assert [t for t in missing if (page.parent / t).resolve() not in generated] == []


def test_commands_and_options_that_the_pages_name_exist():
    from typer.main import get_command

    from opal_deploy.cli import app

    commands = dict(get_command(app).commands)
    benchmarks = commands["bench"].commands
    options = {
        option
        for command in (*commands.values(), *benchmarks.values())
        for p in command.params
        for option in (*p.opts, *p.secondary_opts)
    } | {"--debug", "--version", "--help"}
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    # options of torchrun, pip, Docker, Kubernetes, Triton, tf2onnx, curl, systemd and Chromium are others
    programs = ("pip (?:download|install|wheel)", "docker (?:build|compose|run)", "kubectl", "tritonserver -", "curl ")
    others = rf"torchrun .*? -m|(?:{'|'.join(programs)}|python -m tf2onnx|systemd-run |chromium )(?:.*\\\n)*.*$"
    text = re.sub(others, "", text, flags=re.MULTILINE)

    named = set(re.findall(r"opal-deploy (?!COMMAND|bench)([a-z]+)\b(?= |`)", text))
    assert {name for name in named if name not in commands} <= {"is", "takes", "demo"}
    measured = set(re.findall(r"opal-deploy bench (\w+)", text))
    assert measured
    assert measured <= benchmarks.keys()
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - options == set()


def test_source_files_that_the_pages_name_exist():
    pattern = r"`((?:opal_deploy|export|train|bench|model|runtime|preprocess)/[\w/.]*)`"
    named = {name for page in PAGES for name in re.findall(pattern, page.read_text("utf-8"))}
    assert named
    assert [n for n in sorted(named) if not (ROOT / n).exists() and not (ROOT / "opal_deploy" / n).exists()] == []
