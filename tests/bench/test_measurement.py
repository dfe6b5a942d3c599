"""The schema: measurements come back as they were written; faults are named by file, line and field."""

import json
import math
import socket
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import get_args

import pytest

from opal_deploy.bench.measurement import (
    Figure,
    Kind,
    Measurement,
    Target,
    append_measurement,
    format_command_line,
    provenance,
    read_measurements,
)
from opal_deploy.errors import UsageError

FULL = Measurement(
    kind="throughput",
    target=Target(
        "Übersee \udcff.onnx", "resnet50", "opal", "onnxruntime", "1.31.0", "cpu", "fp32", "uint8 NHWC", (160, 192),
        200, 5, "ab" * 32,
    ),
    case={"batch": 8, "scenario": "offline", "network": True, "limit": 1.5, "threads": None},
    figures={
        "images_per_second": Figure(39.7, "images/s", "higher", (39.1, 39.7, 40.2), (39.2, 40.1)),
        "macs": Figure(4089184256.0, "MACs"),
    },
    settings={"seconds": 3.0, "iterations": [10, 11]},
    timed="from call to numpy arrays",
    marks=("noisy: the repeats differ by 12%",),
    conditions={"sm_clock_mhz": {"min": 1200, "max": 1980}},
    machine={"processor": "Example", "versions": {"numpy": "2.4"}},
    details={"line\u2028separator": ["\u2028", None]},
    command="opal-deploy bench throughput --model m.onnx",
    when="2026-05-01T12:00:00+00:00",
)  # fmt: skip
MINIMAL = Measurement("latency", Target("model.onnx"), {}, {})


def raw(**changes):
    """The full measurement as a parsed line, with some fields replaced."""
    document = json.loads(FULL.to_line())
    return document | changes


def target(**changes):
    return raw()["target"] | changes


def figure(**changes):
    return {"value": 1.0, "unit": "ms"} | changes


def test_every_kind_comes_back_equal(tmp_path):
    path = tmp_path / "new folder" / "lines.jsonl"
    written = [replace(example, kind=kind) for kind in get_args(Kind) for example in (FULL, MINIMAL)]
    for measurement in written:
        append_measurement(path, measurement)
    assert list(read_measurements([path])) == written
    assert path.read_bytes().isascii()
    assert path.read_bytes().count(b"\n") == len(written)


def test_files_of_a_folder_are_read_in_order_whatever_their_line_ends_and_newer_keys(tmp_path):
    newer = raw(weather="fine", target=target(colour="red"), figures={"x": figure(mood="good")}, timed="second")
    (tmp_path / "b.jsonl").write_text(json.dumps(newer))
    # separators that are no line ends
    text = json.dumps(raw(timed="a\u2028b\x85c", target=target(name="model.onnx")), ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f"{text}\r\n\n", encoding="utf-8")
    (tmp_path / "c.json").write_text("no measurements")
    first, second = read_measurements([tmp_path])
    assert (first.timed, second.timed) == ("a\u2028b\x85c", "second")
    assert second.figures == {"x": Figure(1.0, "ms")}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "schema None found, 1 expected"),
        (raw(schema=2), "schema 2 found, 1 expected"),
        (raw(kind="speed"), "line.kind 'speed': Invalid enum value"),
        ({"schema": 1, "target": target(), "case": {}, "figures": {}}, "missing required field `kind`"),
        (raw(case=[]), r"line\.case \[\]: Expected `object`"),
        (raw(case={"batch": [1]}), r"line\.case\[\.\.\.\] .*: Expected `bool \| int \| float \| str \| null`"),
        (raw(figures={"p50": {"unit": "ms"}}), r"line\.figures.*'p50'.*: Object missing required field `value`"),
        (raw(figures={"p50": figure(value="3")}), r"line\.figures.*value .*: Expected `float`, got `str`"),
        (raw(figures={"p50": figure(value=10**400)}), r"line\.figures.*value .*: Number out of range"),
        (raw(figures={"p50": figure(interval=[1])}), r"line\.figures.*interval .*: Expected `array` of length 2"),
        (raw(timed=None), "line.timed None: Expected `str`"),
        pytest.param("{", "not a line of JSON", id="cut"),
        pytest.param("[" * 100_000, "not a line of JSON", id="deep"),
        (FULL.to_line().replace("39.7", "NaN", 1), "not a line of JSON"),
        (FULL.to_line().replace("39.7", "1e999", 1), "not a line of JSON"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_malformed_measurement_is_named_by_file_line_and_field(tmp_path, document, message):
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{FULL.to_line()}\n{document if isinstance(document, str) else json.dumps(document)}\n")
    with pytest.raises(UsageError, match=message) as error:
        list(read_measurements([path]))
    assert str(error.value).startswith(f"{path}:2: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_never_written(tmp_path, value):
    path = tmp_path / "lines.jsonl"
    figures = Figure(value, "ms"), Figure(1.0, "ms", None, (value,))
    changes = [{"figures": {"x": figure}} for figure in figures]
    for change in (*changes, {"case": {"limit": value}}, {"details": {"slope": value}}):
        with pytest.raises(ValueError, match="JSON compliant"):
            append_measurement(path, replace(MINIMAL, **change))
    assert not path.exists() or path.read_text() == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8 text"),
        (lambda path: path.mkdir(), r"a folder without \*\.jsonl"),
    ],
    ids=["missing", "binary", "empty folder"],
)
def test_an_unreadable_file_is_one_line(tmp_path, make, message):
    path = tmp_path / "there"
    make(path)
    with pytest.raises(UsageError, match=message) as error:
        list(read_measurements([path]))
    assert str(error.value).startswith(f"{path}: ")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="choose another --out"):
        append_measurement(tmp_path / "file" / "lines.jsonl", MINIMAL)
    model = tmp_path / "model.onnx"
    model.write_bytes(b"a model")
    with pytest.raises(UsageError, match=r"model\.onnx: exists and is not a \.jsonl file"):
        append_measurement(model, MINIMAL)
    assert model.read_bytes() == b"a model"


def test_the_key_ignores_time_and_versions():
    later = replace(
        FULL, when="2027", command="another", machine={}, marks=(), figures={},
        target=replace(FULL.target, runtime_version="2", sha256=None),
    )  # fmt: skip
    assert later.key == FULL.key
    other = replace(FULL.target, precision="fp16")
    for change in ({"kind": "latency"}, {"case": {**FULL.case, "batch": 16}}, {"target": other}):
        assert replace(FULL, **change).key != FULL.key


def test_a_spread_over_ten_per_cent_is_noisy():
    assert Figure(1.0, "ms").spread is None
    assert Figure.of_repeats([95, 100, 105], "ms").spread == pytest.approx(0.10)
    assert not Figure.of_repeats([95, 100, 105], "ms").is_noisy
    assert Figure.of_repeats([94, 100, 105], "ms").is_noisy
    assert Figure.of_repeats([3, 1, 2], "ms").value == 2


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
