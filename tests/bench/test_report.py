"""The page, the Markdown and the charts: complete, honest about doubts, and safe whatever a name tries to be."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from opal_deploy.bench.measurement import Figure, Kind, Measurement, Target
from opal_deploy.bench.report.charts import draw_charts
from opal_deploy.bench.report.content import build_report
from opal_deploy.bench.report.drawing import Scale, write_charts
from opal_deploy.bench.report.page import to_html, to_markdown

Opal = Callable[..., subprocess.CompletedProcess[str]]
HOSTILE = "<script>alert(1)</script>\"'&|`$x$\n\udcff\x1b[31m</title><img src=x onerror=alert(2)>_{{7*7}}.onnx"
MACHINE = {
    "processor": "Example CPU 9000", "usable_cores": 2, "memory_gb": 25.2, "python": "3.12.1",
    "versions": {"onnxruntime": "1.31.0", "numpy": "2.4.0"},
}  # fmt: skip
MODEL = Target("resnet50 + opal", "resnet50", "opal", "onnxruntime", "1.31.0", "cpu", "fp32", "", (224, 224), 200, 5)


def measured(kind: Any, figures: dict[str, Figure], **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "target": MODEL, "case": {}, "machine": MACHINE, "when": "2026-05-01T12:00:00+00:00",
        "command": f"opal-deploy bench {kind} --model m.onnx", "timed": "from call to numpy arrays",
    }  # fmt: skip
    return Measurement(kind, figures=figures, **(values | changes))


def rates(value: float, spread: float = 0.02) -> Figure:
    return Figure.of_repeats((value * (1 - spread / 2), value, value * (1 + spread / 2)), "images/s", "higher")


def measure_everything() -> list[Measurement]:
    """Every kind, several rows where a chart wants several, with invented figures."""
    out = []
    for backbone, share in (("resnet50", 0.972), ("convnext_tiny", 0.991), ("efficientnet_v2_s", 0.987)):
        ratio = Figure(share, "ratio", "higher", (share - 0.01, share, share + 0.01), (share - 0.004, share + 0.005))
        who = replace(MODEL, name=f"{backbone} + opal", backbone=backbone)
        case = {"question": "head", "reference": "linear", "batch": 8, "threads": 2}
        out.append(measured("compare", {"ratio": ratio, "images_per_second": rates(25 * share)}, target=who, case=case))
        for batch in (1, 2, 4, 8):
            rate, case = 20 * share * batch**0.2, {"batch": batch, "threads": 2}
            figures = {"images_per_second": rates(rate, 0.15 if batch == 4 else 0.02)}
            marks = ("noisy: the repeats differ by 15%",) if batch == 4 else ()
            out.append(measured("throughput", figures, target=who, case=case, marks=marks))
            times = {f"p{p}_ms": Figure(1000 * batch / rate * (1 + p / 400), "ms", "lower") for p in (50, 90, 95, 99)}
            out.append(measured("latency", {**times, "mean_ms": times["p50_ms"]}, target=who, case=case))
        for dataset, classes in (("cub", 200), ("flowers", 102)):
            counts = {"backbone_params": Figure(23508032, "parameters"), "backbone_macs": Figure(4.1e9, "MACs")}
            for head, size in (("linear", 0.3), ("opal", 8.7)):
                for quantity in ("params", "macs_paper", "flops"):
                    counts[f"{head}_{quantity}_percent"] = Figure(size * classes / 200 * share, "%")
            what = replace(who, num_classes=classes, runtime="", device="")
            out.append(measured("overhead", counts, target=what, case={"dataset": dataset}, timed=""))
    for workers in (1, 2):
        figures = {"bare": rates(27), "infer": rates(25 * workers / 2), "peak_memory": Figure(512, "MB", "lower")}
        for stage, wall in (("read", 0.2), ("decode", 4.1), ("resize", 1.5), ("compute", 37.0), ("write", 0.1)):
            figures[f"infer.{stage}.wall"] = Figure.of_repeats((wall, wall * 1.01), "ms/image")
            figures[f"infer.{stage}.cpu"] = Figure(wall * 0.9, "ms/image", "lower")
        curve = {"seconds": [0.0, 0.5, 1.0], "megabytes": [400.0, 505.0, 512.0], "samples": 3}
        details: dict[str, Any] = {"memory": {"infer": curve}}
        out.append(measured("pipeline", figures, case={"workers": workers, "batch": 8}, details=details))
    served = {"queries_per_second": Figure(21.0, "queries/s", "higher"), "p99_ms": Figure(93.0, "ms", "lower")}
    out.append(measured("server", served, case={"limit_ms": 100.0}))
    for part, intensity in (("backbone", 60.0), ("head", 3.0), ("network", 58.0)):
        counts = {"macs": Figure(4.1e9, "MACs"), "intensity": Figure(intensity, "FLOPs/byte")}
        details = {"ceilings": [{"name": "NVIDIA L4", "flops": 121e12, "bytes_per_second": 3e11, "bound": "memory"}]}
        out.append(measured("roofline", counts, case={"batch": 1, "part": part}, timed="", details=details))
    out.append(measured("ceiling", {"copy": Figure(2.1e10, "bytes/s", "higher")}, target=None))
    return out


EVERYTHING = measure_everything()
# the same with a hostile text wherever a text may stand
HOSTILE_MEASUREMENTS = [
    replace(
        m,
        target=m.target and Target(HOSTILE, HOSTILE, HOSTILE, HOSTILE, device=HOSTILE),
        case={**m.case, HOSTILE: HOSTILE},
        figures={**m.figures, HOSTILE: Figure(1.0, HOSTILE, "higher")},
        settings={HOSTILE: HOSTILE},
        timed=HOSTILE,
        marks=(HOSTILE,),
        conditions={HOSTILE: {HOSTILE: HOSTILE}},
        machine={"processor": HOSTILE, HOSTILE: HOSTILE, "versions": {HOSTILE: HOSTILE}, "gpus": [{"name": HOSTILE}]},
        details={**m.details, HOSTILE: HOSTILE, "ceilings": [{"name": HOSTILE, "flops": 1e12, "bytes_per_second": 1}]},
        command=HOSTILE,
        when=HOSTILE,
    )
    for m in EVERYTHING
]  # fmt: skip


class Elements(HTMLParser):
    """Names of the elements, their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data

    def assert_inert(self) -> None:
        assert not {"script", "img", "link", "iframe", "image", "foreignobject"} & set(self.names)
        assert not [name for name, _ in self.attributes if name.startswith("on")]


@pytest.fixture(scope="module")
def page() -> str:
    return to_html(build_report(EVERYTHING, "Two cores"))


@pytest.fixture(scope="module")
def hostile_page() -> str:
    return to_html(build_report(HOSTILE_MEASUREMENTS, HOSTILE))


@pytest.mark.parametrize(
    ("title", "mark", "count"),
    [
        ("Ratio to the reference", "<polygon ", 3),
        # with a marker in the legend for each of the three
        ("Throughput against batch", "<polygon ", 12 + 3),
        ("Latency percentiles", "<polygon ", 12 * 4 + 4),
        ("Time by stage", 'stroke-width="16"', 2 * 5),
        ("Memory over time", "<polyline ", 17),
        ("Parameters of the head", "<polygon ", 3 * 2 * 2 + 2),
        ("Operations of the head, in the paper's convention", "<polygon ", 3 * 2 * 2 + 2),
        ("Roofline", "<polygon ", 2 + 1),
    ],
)
def test_every_chart_is_described_and_shows_every_figure(page: str, title: str, mark: str, count: int) -> None:
    charts = re.findall(r'<svg role="img" aria-label="(.*?)".*?>(.*?)</svg>', page, flags=re.S)
    ((description, drawing),) = [(d, svg) for d, svg in charts if d.replace("&#39;", "'").startswith(f"{title}. ")]
    assert len(description) > len(title) + 20
    assert drawing.count(mark) == count


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "ticks"),
    [
        (0, 43.1, False, [0, 10, 20, 30, 40]),
        (0.925, 1.025, False, [0.94, 0.96, 0.98, 1, 1.02]),
        (1, 512, True, [1, 3, 10, 30, 100, 300]),
        (0.04, 0.2, True, [0.05, 0.1, 0.2]),
    ],
)
def test_scales_have_round_ticks_in_their_places(
    low: float, high: float, logarithmic: bool, ticks: list[float]
) -> None:
    scale = Scale(low, high, logarithmic)
    assert scale.ticks(6) == pytest.approx(ticks)
    middle = (low * high) ** 0.5 if logarithmic else (low + high) / 2
    assert [scale(low), scale(middle), scale(high)] == pytest.approx([0, 0.5, 1])


def test_charts_are_written_as_files(tmp_path: Path) -> None:
    charts = draw_charts("roofline", [m for m in EVERYTHING if m.kind == "roofline"])
    write_charts(charts, "A <heading>", tmp_path / "chart.svg")
    texts = list(ElementTree.parse(tmp_path / "chart.svg").getroot().itertext())
    assert {"A <heading>", "Roofline", "NVIDIA L4", "arithmetic intensity, FLOPs per byte"} <= set(texts)
    write_charts(charts, "A <heading>", tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as image:
        # the roof has the first series' colour
        assert (np.asarray(image) == (0, 114, 178)).all(axis=2).sum() > 500


@pytest.mark.parametrize(("precision", "unit"), [("int8", "TOP/s at most"), ("fp16", "TFLOP/s at most")])
def test_the_roofline_of_integers_is_in_operations(precision: str, unit: str) -> None:
    line = next(m for m in EVERYTHING if m.kind == "roofline")
    assert unit in draw_charts("roofline", [replace(line, target=replace(MODEL, precision=precision))])[0].svg


def test_tables_have_figures_doubts_and_how_each_was_measured(page: str) -> None:
    report = build_report(EVERYTHING)
    assert {section.kind for section in report.sections} == set(get_args(Kind))
    text = Elements(re.sub(r"<svg.*?</svg>", "", page, flags=re.S)).text
    for part in (
        *("0.972", "[0.968, 0.977]", "19.44", "57.87", "37.19", "512", "23.51 M"),
        *("opal-deploy bench compare --model m.onnx", "Timed: from call to numpy arrays"),
        *("Example CPU 9000, 2 cores", "onnxruntime 1.31.0, numpy 2.4.0"),
        *("3 marked as doubtful", "noisy: the repeats differ by 15%"),
    ):
        assert part in text
    assert page.count('<tr class="doubt">') == 3
    markdown = to_markdown(report)
    assert "| 1 | resnet50 + opal | 0.972 [0.968, 0.977] |" in markdown
    assert "- Rows 1–3: `opal-deploy bench compare --model m.onnx`" in markdown
    assert "**noisy: the repeats differ by 15%**" in markdown


def test_the_page_is_titled_self_contained_and_the_same_every_time(page: str) -> None:
    elements = Elements(page)
    elements.assert_inert()
    ids = [value for name, value in elements.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value or "" for name, value in elements.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links
    assert all(link[0] == "#" and link[1:] in ids for link in links)
    assert "url(" not in page
    assert "@import" not in page
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'") in (
        elements.attributes
    )
    assert "<title>Two cores</title>" in page
    assert ("lang", "en") in elements.attributes
    assert elements.names.count("h1") == 1
    assert to_html(build_report(EVERYTHING, "Two cores")) == page


def test_texts_from_outside_cannot_become_markup(hostile_page: str) -> None:
    elements = Elements(hostile_page)
    elements.assert_inert()
    assert "<script>alert(1)</script>\"'&|`$x$ \\udcff\\x1b[31m</title>" in elements.text
    assert "{{7*7}}" in elements.text
    hostile_page.encode()
    assert "\x1b" not in hostile_page


@pytest.mark.browser
def test_a_real_browser_runs_and_fetches_nothing_and_finds_the_charts(hostile_page: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    path = tmp_path / "report.html"
    path.write_text(hostile_page, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    run = subprocess.run(
        [chromium, *flags.split(), "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    elements = Elements(run.stdout.decode())
    assert {"title", "h1", "table", "svg", "figure"} <= set(elements.names)
    elements.assert_inert()
    # the browser's own policy had nothing to refuse: styles in charts are allowed
    assert b"Content Security Policy" not in run.stderr


def test_markdown_has_whole_tables_and_no_markup_from_outside() -> None:
    hostile_text = to_markdown(build_report(HOSTILE_MEASUREMENTS))
    for text in (to_markdown(build_report(EVERYTHING)), hostile_text):
        blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
        assert len(blocks) >= 8
        for block in blocks:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", hostile_text.replace(r"\`", ""))
    assert "<script" not in outside_code
    assert "\x1b" not in hostile_text
    hostile_text.encode()


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_figures_that_are_not_positive_are_drawn(value: float) -> None:
    odd = [
        replace(m, figures={name: replace(figure, value=value, repeats=()) for name, figure in m.figures.items()})
        for m in EVERYTHING
    ]
    assert to_html(build_report(odd)).count('<svg role="img"') >= 6


def test_unknown_figures_and_failures_are_in_the_tables() -> None:
    strange = measured("latency", {"time_to_boredom": Figure(12.5, "yawns", "lower")}, case={"weather": "fine"})
    failed = replace(strange, figures={}, case={"weather": "rain"}, marks=("failed: out of memory",))
    text = Elements(to_html(build_report([strange, failed]))).text
    for part in ("time to boredom", "yawns", "12.5", "weather", "fine", "rain", "failed: out of memory"):
        assert part in text


def test_the_last_measurement_of_a_thing_on_a_machine_counts_and_the_report_says_so() -> None:
    first, last = (measured("throughput", {"r": Figure(v, "images/s")}, case={"batch": 1}) for v in (11.5, 22.5))
    report = build_report([first, last])
    assert report.measured == 1
    text = Elements(to_html(report)).text
    assert "22.5" in text
    assert "11.5" not in text
    assert "Earlier measurements of the same things on the same machine, replaced by these: 1." in text
    there = replace(last, machine={"processor": "Other", "gpus": [{"name": "NVIDIA L4"}]})
    report = build_report([last, there])
    assert [title for _, title, _ in report.machines] == ["Example CPU 9000, 2 cores", "NVIDIA L4; Other"]
    assert [row[2].text for row in report.sections[0].tables[0].rows] == ["A", "B"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(m.to_line() + "\n" for m in EVERYTHING[:2]))
    return path


def test_the_command_writes_a_page_by_default(opal: Opal, lines: Path) -> None:
    done = opal("bench", "report", lines.name, cwd=lines.parent)
    assert done.returncode == 0, done.stderr
    assert "<h1>Benchmarks</h1>" in (lines.parent / "report.html").read_text(encoding="utf-8")


def test_markdown_to_stdout_draws_nothing(opal: Opal, lines: Path) -> None:
    blocked = ("matplotlib", "jinja2", "torch")
    done = opal("bench", "report", lines.name, "--markdown", "-", cwd=lines.parent, blocked=blocked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Benchmarks\n")
    assert not (lines.parent / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "is one of the files to read"), ("\n", "no measurements in these files")]
)
def test_the_command_never_overwrites_what_it_reads(opal: Opal, lines: Path, content: str | None, message: str) -> None:
    if content:
        lines.write_text(content)
    before = lines.read_bytes()
    done = opal("bench", "report", lines.name, "--markdown", "out.md" if content else lines.name, cwd=lines.parent)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr
    assert lines.read_bytes() == before
