"""The wheel: built from the sources alone, installed into an environment of its own, and called."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from opal_deploy import __version__

ROOT = Path(__file__).resolve().parents[2]
# what .dockerignore lets through, too
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "opal_deploy")
pytestmark = [pytest.mark.slow, pytest.mark.network]  # pip fetches setuptools and the dependencies


def run(*command, cwd, check=True):
    """Run a command that sees nothing of this checkout."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    answer = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert not check or answer.returncode == 0, f"{command}: {answer.stdout}\n{answer.stderr}"
    return answer


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built in a copy, because a build in the tree leaves `build/` behind and picks up an older one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    rubbish = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=rubbish)
        else:
            shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_is_pure_python_of_this_version_and_holds_every_tracked_file_and_nothing_else(wheel):
    assert wheel.name == f"opal_deploy-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"opal_deploy-{__version__}.dist-info/METADATA").decode("utf-8").splitlines()
    assert {name.split("/")[0] for name in names} == {"opal_deploy", f"opal_deploy-{__version__}.dist-info"}
    tracked = run("git", "ls-files", *SOURCES[3:], cwd=ROOT).stdout.split()
    code = (".py", ".json", ".toml", ".jinja", ".css", ".js", ".onnx")
    expected = {name.removeprefix("opal_deploy/") for name in tracked if name.endswith(code)}
    assert expected
    assert {f"opal_deploy/{name}" for name in expected} - set(names) == set()
    assert "opal_deploy/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {f"Provides-Extra: {extra}" for extra in declared} <= set(metadata)
