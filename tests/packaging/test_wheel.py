"""The wheel: built from the sources alone, installed into an environment of its own, and called."""

from __future__ import annotations

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
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "opal_deploy", "train", "export", "bench")
IMAGE = "from PIL import Image; Image.new('RGB', (64, 64), 'teal').save('images/a.png')"

pytestmark = [pytest.mark.slow, pytest.mark.network]  # pip fetches setuptools and the dependencies


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of this checkout."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    answer = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert not check or answer.returncode == 0, f"{command}: {answer.stdout}\n{answer.stderr}"
    return answer


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    run(binaries / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return binaries


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_file_name_says_pure_python_and_the_version(wheel: Path) -> None:
    assert wheel.name == f"opal_deploy-{__version__}-py3-none-any.whl"


def test_nothing_but_opal_deploy_lands_in_site_packages(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel)} == {"opal_deploy", f"opal_deploy-{__version__}.dist-info"}


def test_every_tracked_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    tracked = run("git", "ls-files", *SOURCES[3:], cwd=ROOT).stdout.split()
    code = (".py", ".json", ".toml", ".jinja", ".css", ".js")
    expected = {name.removeprefix("opal_deploy/") for name in tracked if name.endswith(code) and "results" not in name}

    assert expected
    assert {f"opal_deploy/{name}" for name in expected} - set(names(wheel)) == set()


def test_type_checkers_find_the_marker_and_lawyers_the_licence(wheel: Path) -> None:
    assert "opal_deploy/py.typed" in names(wheel)
    assert any(name.endswith("/LICENSE") for name in names(wheel))


def test_installing_it_brings_no_runtime_and_no_torch(installed: Path, tmp_path: Path) -> None:
    answer = run(installed / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path)
    found = {package["name"].lower() for package in json.loads(answer.stdout)}

    assert "opal-deploy" in found
    assert not found & {"torch", "torchvision", "onnx", "onnxruntime", "onnxruntime-gpu", "scikit-learn", "matplotlib"}


def test_pip_finds_nothing_missing(installed: Path, tmp_path: Path) -> None:
    run(installed / "python", "-m", "pip", "check", cwd=tmp_path)


def test_help_lists_the_commands(installed: Path, tmp_path: Path) -> None:
    answer = run(installed / "opal-deploy", "--help", cwd=tmp_path)

    for command in ("train", "evaluate", "export", "infer", "bench", "inspect", "verify", "doctor", "demo"):
        assert f" {command} " in answer.stdout + answer.stderr, command


def test_doctor_answers_and_says_what_to_install(installed: Path, tmp_path: Path) -> None:
    answer = run(installed / "opal-deploy", "doctor", cwd=tmp_path)

    assert answer.stdout == ""
    assert "pip install 'opal-deploy[cpu]'" in answer.stderr
    assert "CUDA session: never run on hardware" in answer.stderr


def test_doctor_writes_json(installed: Path, tmp_path: Path) -> None:
    document = json.loads(run(installed / "opal-deploy", "doctor", "--json", cwd=tmp_path).stdout)

    assert document["opal_deploy"] == __version__
    assert document["usable"] == {"cpu": False, "gpu": False, "any": False}


def test_a_health_check_without_a_runtime_fails_in_one_line(installed: Path, tmp_path: Path) -> None:
    answer = run(installed / "opal-deploy", "doctor", "--json", "--require", "any", cwd=tmp_path, check=False)

    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "pip install 'opal-deploy[cpu]'" in answer.stderr


def test_infer_without_a_runtime_names_the_extra_in_one_line(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    run(installed / "python", "-c", IMAGE, cwd=tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a")
    answer = run(installed / "opal-deploy", "infer", "images", "--model", "model.onnx", cwd=tmp_path, check=False)

    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "pip install 'opal-deploy[cpu]'" in answer.stderr


@pytest.mark.parametrize(
    "extra", ["cpu", "gpu", "trt", "trt-rtx", "train", "export", "bench", "docs", "dev", "all-cpu"]
)
def test_extras_are_declared(wheel: Path, extra: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode("utf-8").splitlines()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    assert extra in declared
    assert f"Provides-Extra: {extra}" in lines
