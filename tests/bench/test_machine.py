"""The provenance of a measurement, without names of host, home or folders."""

import json
import socket
from datetime import datetime, timedelta
from pathlib import Path

from opal_deploy.bench.measurement import format_command_line, provenance


def test_provenance_names_neither_host_nor_home_and_is_in_utc():
    text = json.dumps(provenance())
    assert socket.gethostname() not in text
    assert str(Path.home()) + "/" not in text
    assert datetime.fromisoformat(provenance()["when"]).utcoffset() == timedelta(0)


def test_files_in_the_command_are_named_without_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a b.onnx").touch()
    arguments = ["/usr/bin/opal", "bench", "--model", "models/a b.onnx", f"--out={tmp_path}/new.jsonl", "~/x/y.pt"]
    assert format_command_line(arguments) == "opal-deploy bench --model 'a b.onnx' --out=new.jsonl y.pt"
    # what is no path that is there stays
    words = ["--batch", "1,2,4", "resnet50", "0.5", "cuda:0", "224x448", "results/new.jsonl"]
    assert format_command_line(["x", *words]) == f"opal-deploy {' '.join(words)}"
