"""The provenance of a measurement, without names of host, home or folders."""

from __future__ import annotations

import json
import socket
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from opal_deploy.bench.machine import describe_machine, format_command_line, provenance


def test_the_machine_has_what_figures_depend_on() -> None:
    machine = describe_machine()
    assert machine["usable_cores"] >= 1
    assert machine["processor"]
    assert machine["memory_gb"] is None or machine["memory_gb"] > 0
    assert {"numpy", "pillow", "onnxruntime", "torch"} <= machine["versions"].keys()


def test_provenance_names_neither_host_nor_home_and_is_in_utc() -> None:
    text = json.dumps(provenance())
    assert socket.gethostname() not in text
    assert str(Path.home()) + "/" not in text
    assert datetime.fromisoformat(provenance()["when"]).utcoffset() == timedelta(0)


def test_files_in_the_command_are_named_without_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a b.onnx").touch()
    arguments = ["/usr/bin/opal", "bench", "--model", "models/a b.onnx", f"--out={tmp_path}/new.jsonl", "~/x/y.pt"]
    assert format_command_line(arguments) == "opal-deploy bench --model 'a b.onnx' --out=new.jsonl y.pt"
    # what is no path that is there stays
    words = ["--batch", "1,2,4", "resnet50", "0.5", "cuda:0", "224x448", "results/new.jsonl"]
    assert format_command_line(["x", *words]) == f"opal-deploy {' '.join(words)}"
