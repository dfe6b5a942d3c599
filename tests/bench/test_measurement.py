"""Lines of JSON, tables, and what they say about the machine."""

import json
import math
import socket
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from opal_deploy.bench.measurement import Figure, Measurement, Target, append_measurement, format_command_line
from opal_deploy.errors import UsageError

RATE = Figure(39.7, "images/s", "higher", (39.1, 39.7, 40.2))
LINE = Measurement(
    "throughput", Target("Übersee \udcff\n.onnx", runtime="onnxruntime", precision="fp32"), {"batch": 8}, {"rate": RATE}
)


def test_lines_are_appended(tmp_path):
    path = tmp_path / "new folder" / "lines.jsonl"
    for batch in (1, 8):
        append_measurement(path, replace(LINE, case={"batch": batch}))
    assert path.read_bytes().isascii()
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["case"], second["case"]) == ({"batch": 1}, {"batch": 8})
    assert (first["schema"], first["target"]["name"]) == (1, LINE.target.name)
    assert first["figures"]["rate"] == {
        "value": 39.7, "unit": "images/s", "better": "higher", "repeats": [39.1, 39.7, 40.2], "interval": None
    }  # fmt: skip


def test_other_files_are_not_written_to_and_nan_never(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        append_measurement(tmp_path / "lines.jsonl", replace(LINE, figures={"x": Figure(math.nan, "ms")}))
    assert not list(tmp_path.iterdir())
    model = tmp_path / "model.onnx"
    model.write_bytes(b"a model")
    for path in (model, model / "lines.jsonl"):
        with pytest.raises(UsageError, match="another"):
            append_measurement(path, LINE)
    assert model.read_bytes() == b"a model"


def test_the_line_names_neither_host_nor_home_and_is_in_utc():
    text = LINE.to_line()
    assert socket.gethostname() not in text
    assert f"{Path.home()}/" not in text
    assert datetime.fromisoformat(LINE.when).utcoffset() == timedelta(0)


def test_files_in_the_command_are_named_without_their_folders():
    arguments = ["/usr/bin/opal", "bench", "--model", "models/a b.onnx", "--out=/home/me/new.jsonl", "~/x/y.pt", "in/"]
    assert format_command_line(arguments) == "opal-deploy bench --model 'a b.onnx' --out=new.jsonl y.pt in/"
    words = ["--batch", "1,2,4", "resnet50", "0.5", "cuda:0", "224x448", "prefer_nhwc=1"]
    assert format_command_line(["x", *words]) == f"opal-deploy {' '.join(words)}"


def test_a_spread_over_ten_per_cent_is_noisy():
    assert Figure(1.0, "ms").spread is None
    assert Figure.of_repeats([95, 100, 105], "ms").spread == pytest.approx(0.10)
    assert Figure.of_repeats([95, 100, 105], "ms").marks == ()
    assert Figure.of_repeats([94, 100, 105], "ms").marks == ("noisy: the repeats differ by 11%",)
    assert Figure.of_repeats([3, 1, 2], "ms").value == 2


def test_a_figure_has_its_unit_and_uncertainty():
    assert str(RATE) == "39.7 images/s (spread 2.8%)"
    assert str(Figure(1.25, "ratio", "higher", (1.2, 1.25), (1.2, 1.3))) == "1.25 (1.2 to 1.3)"
    assert str(Figure(23508032, "parameters")) == "23,508,032 parameters"
