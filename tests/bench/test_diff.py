"""Regressions and noise between two sets of measurements; the command's lines and exit codes."""

import json
from dataclasses import replace

import pytest

from opal_deploy.bench.diff import compare_measurements
from opal_deploy.bench.measurement import Figure, Measurement, Target

MODEL = Target("m.onnx", runtime="onnxruntime", runtime_version="1.30.0", device="cpu")
MACHINE = {"processor": "Example CPU 9000", "usable_cores": 2, "versions": {"onnxruntime": "1.30.0"}}


def line(figure, **changes):
    values = {"target": MODEL, "case": {"batch": 8}, "machine": MACHINE}
    return Measurement("throughput", figures={"images_per_second": figure}, **(values | changes))


def rate(value, spread=0.0, interval=None):
    repeats = (value * (1 - spread / 2), value, value * (1 + spread / 2)) if spread else ()
    return Figure(value, "images/s", "higher", repeats, interval)


def time(value):
    return Figure(value, "ms", "lower")


def only(difference):
    (change,) = difference.changes
    return change


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (rate(100), rate(100), "unchanged"),
        (rate(100), rate(97.1), "unchanged"),
        (rate(100), rate(96), "regression"),
        (rate(100), rate(104), "improvement"),
        (time(100), time(104), "regression"),
        (time(100), time(96), "improvement"),
        # the spread of either side is noise
        (rate(100, spread=0.06), rate(95), "unchanged"),
        (rate(100), rate(95, spread=0.06), "unchanged"),
        (rate(100, spread=0.04), rate(95, spread=0.04), "regression"),
        # intervals, where both have them, judge instead of spreads
        (rate(100, interval=(99, 101)), rate(95, interval=(94, 99.5)), "unchanged"),
        (rate(100, interval=(99, 101)), rate(95, interval=(94, 96)), "regression"),
        (rate(100, 0.09, (99, 101)), rate(95, 0.09, (94, 96)), "regression"),
        (rate(100, interval=(99.9, 100.1)), rate(98, interval=(97.9, 98.1)), "unchanged"),
        (rate(100, 0.09, (99, 101)), rate(95), "unchanged"),
        # from nothing, any change is beyond any share
        (time(0), time(0.1), "regression"),
        (time(0), time(0), "unchanged"),
        (Figure(-10.0, "dB", "lower"), Figure(-9.0, "dB", "lower"), "regression"),
    ],
)
def test_a_change_counts_beyond_tolerance_and_noise(old, new, verdict):
    assert only(compare_measurements([line(old)], [line(new)])).verdict == verdict


def test_marked_measurements_are_never_certain():
    for value, before, after in ((50, ("noisy: 12%",), ()), (200, (), ("throttled: hw_slowdown",))):
        change = only(compare_measurements([line(rate(100), marks=before)], [line(rate(value), marks=after)]))
        assert (change.verdict, change.marks) == ("doubtful", before + after)


def test_versions_machines_and_time_do_not_keep_measurements_apart():
    newer = line(
        rate(90), when="2027", target=replace(MODEL, runtime_version="1.31.0", sha256="ab"),
        machine={**MACHINE, "processor": "Other CPU", "versions": {"onnxruntime": "1.31.0"}},
    )  # fmt: skip
    difference = compare_measurements([line(rate(100))], [newer])
    assert only(difference).verdict == "regression"
    assert difference.machines == ("processor Example CPU 9000 -> Other CPU",)
    assert difference.software == ("versions: onnxruntime 1.30.0 -> 1.31.0",)


def test_measurements_and_figures_of_one_side_are_listed():
    old = [line(rate(100)), line(rate(100), case={"batch": 16})]
    both = Measurement("throughput", MODEL, {"batch": 8}, {"images_per_second": rate(100), "p50_ms": time(3)})
    difference = compare_measurements(old, [both, line(rate(1), case={"batch": 32})])
    assert difference.only_old == ("throughput: m.onnx, batch 16",)
    assert difference.only_new == ("throughput: m.onnx, batch 32", "throughput: m.onnx, batch 8: p50 ms")
    assert difference.missing == 3


def test_other_units_and_directions_are_not_compared_and_those_without_direction_not_judged():
    for new in (Figure(100.0, "queries/s", "higher"), Figure(100.0, "images/s", "lower")):
        difference = compare_measurements([line(rate(100))], [line(new)])
        assert (difference.changes, len(difference.not_comparable)) == ((), 1)
    assert compare_measurements([line(Figure(1.0, "MACs"))], [line(Figure(2.0, "MACs"))]).changes == ()


def test_of_several_measurements_of_one_thing_the_last_counts():
    difference = compare_measurements([line(rate(100)), line(rate(50))], [line(rate(1)), line(rate(51))])
    assert only(difference).verdict == "unchanged"
    assert difference.repeated == ("OLD: throughput: m.onnx", "NEW: throughput: m.onnx")


@pytest.fixture
def diff(opal, tmp_path):
    def run(old, new, *options):
        for name, measurements in (("old.jsonl", old), ("new.jsonl", new)):
            (tmp_path / name).write_text("".join(m.to_line() + "\n" for m in measurements))
        return opal("bench", "diff", "old.jsonl", "new.jsonl", *options, cwd=tmp_path)

    return run


OTHER = {"case": {"batch": 16}}
RED = replace(MODEL, name="\x1b[31mred\n\udcff.onnx")


@pytest.mark.parametrize(
    ("old", "new", "options", "code", "texts"),
    [
        (
            [line(rate(100))], [line(rate(80))], [], 1,
            [
                "throughput: m.onnx: images per second 100 -> 80 images/s (-20.0%; noise up to 3.0%)",
                "\nfailed: 1 regression beyond the noise; exit code 1\n",
            ],
        ),
        (
            [line(rate(100)), line(rate(100), **OTHER)],
            [line(rate(50), marks=("noisy: 20%",)), line(rate(150), **OTHER)], [], 0,
            [
                "doubtful, since a measurement is marked (1):", "marked noisy: 20%", "improvements (1):",
                "\nno regression beyond the noise\n",
            ],
        ),
        ([line(rate(100)), line(rate(9), **OTHER)], [line(rate(100))], [], 0, ["only in OLD (1):"]),
        ([line(rate(100)), line(rate(9), **OTHER)], [line(rate(100))], ["--strict"], 1, ["1 not in both (--strict)"]),
        (
            [line(rate(100))], [line(rate(100), machine={**MACHINE, "usable_cores": 64})], [], 0,
            ["DIFFERENT MACHINES", "usable cores 2 -> 64"],
        ),
        ([line(rate(100))], [line(rate(80))], ["--tolerance", "25"], 0, ["no regression"]),
        ([line(rate(100), target=RED)], [line(rate(80), target=RED)], [], 1, [r"\x1b[31mred \udcff.onnx"]),
    ],
    ids=["regression", "doubt and improvement", "missing", "strict", "machines", "tolerance", "control characters"],
)  # fmt: skip
def test_the_command_lists_changes_and_fails_on_regressions(diff, old, new, options, code, texts):
    done = diff(old, new, *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert [text for text in texts if text not in done.stderr] == []
    assert "bug" not in done.stderr
    assert "\x1b" not in done.stderr


def test_json_has_every_change(diff):
    (change,) = json.loads(diff([line(rate(100))], [line(rate(92))], "--json").stdout)["changes"]
    assert (change["verdict"], change["relative"]) == ("regression", pytest.approx(-0.08))
