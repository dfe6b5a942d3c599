"""Measurements as Markdown: complete, with their marks, and safe whatever a name tries to be."""

import re
from dataclasses import replace

from opal_deploy.bench.measurement import Figure, Measurement, Target
from opal_deploy.bench.report import build_report, format_measurement
from tests.cli.calls import check

HOSTILE = "<script>alert(1)</script>\"'&|`$x$\n\udcff\x1b[31m</title><img src=x onerror=alert(2)>_{{7*7}}.onnx"
MACHINE = {
    "processor": "Example CPU 9000", "usable_cores": 2, "memory_gb": 25.2, "python": "3.12.1",
    "versions": {"onnxruntime": "1.31.0", "numpy": "2.4.0"},
}  # fmt: skip
MODEL = Target("resnet50 + opal", "resnet50", "opal", "onnxruntime", "1.31.0", "cpu", "fp32", "", (224, 224), 200, 5)


def measured(kind, figures, **changes):
    values = {
        "target": MODEL, "case": {}, "machine": MACHINE, "when": "2026-05-01T12:00:00+00:00",
        "command": f"opal-deploy bench {kind} --model m.onnx", "timed": "from call to numpy arrays",
    }  # fmt: skip
    return Measurement(kind, figures=figures, **(values | changes))


def rates(value, spread=0.02):
    return Figure.of_repeats((value * (1 - spread / 2), value, value * (1 + spread / 2)), "images/s", "higher")


EVERYTHING = [
    measured("compare", {"ratio": Figure(0.972, "ratio", "higher", (), (0.968, 0.977))}, case={"batch": 8}),
    *(
        measured(
            "throughput",
            {"images_per_second": rates(rate, 0.15 if batch == 4 else 0.02), "peak_memory": Figure(512, "MB", "lower")},
            case={"batch": batch, "threads": 2},
            marks=("noisy: the repeats differ by 15%",) if batch == 4 else (),
        )
        for batch, rate in ((1, 19.44), (4, 25.0))
    ),
    measured("pipeline", {f"infer.{n}.wall": Figure(n, "ms/image") for n in range(11)}),
    measured("overhead", {"backbone_params": Figure(23508032, "parameters")}, timed=""),
]  # fmt: skip


def test_tables_have_figures_marks_and_the_commands_that_repeat_them():
    text = build_report(EVERYTHING)
    for line in (
        "**Machine 1**: processor Example CPU 9000; usable cores 2; memory GB 25.2; versions: onnxruntime 1.31.0; "
        "versions: numpy 2.4.0; python 3.12.1",
        "## throughput",
        "All rows: runtime onnxruntime 1.31.0; device cpu; precision fp32; backbone resnet50; head opal; "
        "input 224x224; classes 200; prototypes per class 5; threads 2.",
        "| # | name | batch | images per second (images/s) ↑ | peak memory (MB) ↓ | marks |",
        "| 1 | resnet50 + opal | 1 | 19.44 (spread 2.0%) | 512 |  |",
        "| 2 | resnet50 + opal | 4 | 25 (spread 15.0%) | 512 | noisy: the repeats differ by 15% |",
        "| 1 | resnet50 + opal | 0.972 (0.968 to 0.977) |",
        "| 1 | resnet50 + opal | 23.51 M |",
        # many figures become rows
        "| infer, 10, wall (ms/image) | 10 |",
        "- 1, 2: opal-deploy bench throughput --model m.onnx",
        "  Timed: from call to numpy arrays.",
    ):
        assert line in text.splitlines()
    assert build_report([]) == ""


def test_one_measurement_is_a_line_or_with_many_figures_a_table_and_shows_its_notes_and_doubts():
    batch = EVERYTHING[2]
    assert format_measurement(batch).splitlines() == [
        "  resnet50 + opal, batch 4, threads 2: images per second 25 images/s (spread 15.0%), peak memory 512 MB",
        "    noisy: the repeats differ by 15%",
    ]
    lines = format_measurement(replace(EVERYTHING[3], details={"notes": ["bound by compute"]})).splitlines()
    assert lines[0] == "  resnet50 + opal:"
    assert "infer, 10, wall  10 ms/image" in lines
    assert lines[-1] == "    bound by compute"
    ratio = replace(EVERYTHING[0], figures={"ratio": EVERYTHING[0].figures["ratio"]})
    assert format_measurement(ratio).endswith("ratio 0.972 (0.968 to 0.977)")
    failed = replace(batch, figures={}, marks=("failed: out of memory",))
    assert format_measurement(failed).endswith("threads 2: failed\n    failed: out of memory")


def test_texts_from_outside_cannot_become_markup():
    odd = replace(
        EVERYTHING[1],
        target=Target(HOSTILE, HOSTILE, HOSTILE, HOSTILE, device=HOSTILE),
        case={HOSTILE: HOSTILE},
        figures={HOSTILE: Figure(1.0, HOSTILE, "higher")},
        timed=HOSTILE,
        marks=(HOSTILE,),
        machine={"processor": HOSTILE, HOSTILE: HOSTILE, "gpus": [{"name": HOSTILE}]},
        command=HOSTILE,
    )
    text = build_report([odd])
    table = re.findall(r"^\|.*$", text, flags=re.M)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "<script" not in text
    assert "\x1b" not in text
    text.encode()


def test_the_last_measurement_of_a_thing_on_a_machine_counts():
    first, last = (measured("throughput", {"r": Figure(v, "images/s")}, case={"batch": 1}) for v in (11.5, 22.5))
    text = build_report([first, last])
    assert "22.5" in text
    assert "11.5" not in text
    there = replace(last, machine={"processor": "Other", "gpus": [{"name": "NVIDIA L4"}]})
    text = build_report([last, there])
    assert "**Machine 2**: processor Other; GPU: 1: name NVIDIA L4" in text
    assert "| 2 | resnet50 + opal | 2 | 22.5 |" in text


def test_the_command_writes_markdown_to_stdout(opal, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(m.to_line() + "\n" for m in EVERYTHING))
    done = check(opal("bench", "report", path, blocked=("torch", "onnxruntime")))
    assert done.stdout == build_report(EVERYTHING)
    path.write_text("\n")
    done = opal("bench", "report", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no measurements in these files" in done.stderr
