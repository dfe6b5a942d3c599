"""The wheel: built from the sources alone, installed into an environment of its own, and called."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from opal_deploy import __version__

ROOT = Path(__file__).resolve().parents[2]
# what .dockerignore lets through, too
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "opal_deploy")
IMAGE = "from PIL import Image; Image.new('RGB', (64, 64), 'teal').save('images/a.png')"

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


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of an environment that holds the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    run(binaries / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return binaries


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


def test_installing_it_brings_no_runtime_and_no_torch_and_nothing_is_missing(installed, tmp_path):
    answer = run(installed / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path)
    found = {package["name"].lower() for package in json.loads(answer.stdout)}
    assert "opal-deploy" in found
    assert not found & {"torch", "torchvision", "onnx", "onnxruntime", "onnxruntime-gpu", "scikit-learn", "matplotlib"}
    run(installed / "python", "-m", "pip", "check", cwd=tmp_path)


@pytest.mark.parametrize(
    "call", [["doctor", "--json", "--require", "any"], ["infer", "images", "--model", "model.onnx"]], ids=" ".join
)
def test_without_a_runtime_a_command_names_the_extra_in_one_line(installed, tmp_path, call):
    (tmp_path / "images").mkdir()
    run(installed / "python", "-c", IMAGE, cwd=tmp_path)
    shutil.copy(ROOT / "opal_deploy/cli/demo/creatures.onnx", tmp_path / "model.onnx")
    answer = run(installed / "opal-deploy", *call, cwd=tmp_path, check=False)
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "pip install 'opal-deploy[cpu]'" in answer.stderr
