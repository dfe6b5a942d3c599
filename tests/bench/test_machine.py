"""What is recorded of the machine, and what is not."""

from __future__ import annotations

import json
import socket
from datetime import datetime
from pathlib import Path

import pytest

from opal_deploy.bench.machine import describe_machine, format_command_line, peak_megabytes, provenance, reset_peak


def test_it_says_what_figures_depend_on() -> None:
    found = describe_machine()

    assert found["usable_cores"] >= 1
    assert found["processor"]
    assert found["memory_gb"] is None or found["memory_gb"] > 0
    assert {"numpy", "pillow", "onnxruntime", "torch"} <= found["versions"].keys()


def test_it_names_neither_host_nor_home() -> None:
    text = json.dumps(provenance())

    assert socket.gethostname() not in text
    assert str(Path.home()) + "/" not in text


def test_the_time_is_utc() -> None:
    offset = datetime.fromisoformat(provenance()["when"]).utcoffset()
    assert offset is not None
    assert not offset


def test_files_in_the_command_are_named_without_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a b.onnx").touch()
    arguments = ["/usr/bin/opal", "bench", "--model", "models/a b.onnx", f"--out={tmp_path}/new.jsonl", "~/x/y.pt"]

    assert format_command_line(arguments) == "opal-deploy bench --model 'a b.onnx' --out=new.jsonl y.pt"


@pytest.mark.parametrize("argument", ["--batch", "1,2,4", "resnet50", "0.5", "cuda:0", "224x448", "results/new.jsonl"])
def test_what_is_no_place_on_this_machine_stays(argument: str) -> None:
    assert format_command_line(["x", argument]) == f"opal-deploy {argument}"


def test_the_peak_of_memory_can_begin_again() -> None:
    block = bytearray(200 << 20)
    for page in range(0, len(block), 4096):
        block[page] = 1
    high = peak_megabytes()
    del block
    reset_peak()

    # where the system cannot forget the peak it stays
    assert peak_megabytes() < high - 100 or peak_megabytes() == high
