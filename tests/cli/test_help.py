"""A bare `pip install opal-deploy`: help, and errors that name what to install."""

import json
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from opal_deploy._version import __version__
from opal_deploy.cli import app
from tests.cli.calls import MAIN, call_without, check, one_line

HEAVY = ("torch", "torchvision", "onnx", "onnxruntime", "onnxscript", "sklearn", "matplotlib", "safetensors")

ROOT_COMMAND = get_command(app)
# every command by the words that call it
CALLS = {
    "": ROOT_COMMAND,
    **ROOT_COMMAND.commands,
    **{f"bench {name}": command for name, command in ROOT_COMMAND.commands["bench"].commands.items()},
}


def test_help_needs_nothing_but_typer():
    for done in call_without((*HEAVY, "numpy", "PIL"), [(*words.split(), "--help") for words in CALLS]):
        assert "Usage: opal-deploy" in check(done).stdout, done.args


@pytest.mark.parametrize(("words", "command"), CALLS.items())
def test_help_fits_80_columns_and_cuts_no_name_off(opal, monkeypatch, words, command):
    monkeypatch.setenv("COLUMNS", "80")
    shown = check(opal(*words.split(), "--help")).stdout
    assert max(map(len, shown.splitlines())) <= 80
    names = {name for param in command.params for name in (*param.opts, *param.secondary_opts) if name[0] == "-"}
    assert names <= set(re.findall(r"--?[a-z][a-z0-9-]*", shown))
    assert set(getattr(command, "commands", {})) <= set(re.findall(r"^ +([a-z]+) ", shown, re.MULTILINE))
    assert "…" not in shown


def test_help_lists_the_exit_codes_and_the_version_is_the_packages(opal):
    assert "130 interrupted" in opal("--help").stdout
    assert opal("--version").stdout == f"opal-deploy {__version__}\n"


@pytest.mark.parametrize("words", [("schema",), ("--version",)])
def test_a_full_device_is_one_line_and_exit_code_5(words):
    with open("/dev/full", "w") as full:
        call = [sys.executable, "-c", MAIN, *words]
        assert "No space left" in one_line(subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True), 5)


def test_a_missing_package_names_the_extra_to_install(exact_model, make_pictures, tmp_path):
    make_pictures(tmp_path / "in", 1)
    model, checkpoint = exact_model, exact_model.with_suffix(".pt")
    calls = [
        (("infer", "in", "--model", model), "cpu"),
        (("infer", "in", "--model", checkpoint), "train"),
        (("verify", model), "cpu"),
        (("export", checkpoint), "export"),
        (("export", model, "--precision", "fp16"), "export"),
        (("export", model, "--trt"), "trt-rtx"),
        (("train", "in"), "train"),
        (("serve", model), "serve"),
    ]
    done = call_without((*HEAVY, "granian"), [call for call, _ in calls], tmp_path)
    for each, (_, extra) in zip(done, calls, strict=True):
        assert f"pip install 'opal-deploy[{extra}]'" in one_line(each), each.args


def test_inspect_and_doctor_need_neither_torch_nor_a_runtime(exact_model):
    calls = [*(("inspect", exact_model.with_suffix(suffix)) for suffix in (".onnx", ".pt")), ("doctor", "--json")]
    *inspected, examined = map(check, call_without(HEAVY, calls))
    assert all("timm:test_resnet" in done.stdout for done in inspected)
    assert json.loads(examined.stdout)["schema"] == 1
