"""The page and the Markdown: complete, honest about doubts, and safe whatever a name tries to be."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from opal_deploy.bench.measurement import Figure, Kind, Measurement
from opal_deploy.bench.report.charts import draw_charts
from opal_deploy.bench.report.content import build_report
from opal_deploy.bench.report.drawing import write_charts
from opal_deploy.bench.report.page import to_html, to_markdown
from opal_deploy.bench.report.plots import Scale
from opal_deploy.bench.report.rows import number_rows

Opal = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[..., Path]


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


@pytest.fixture(scope="module")
def page(every_kind: list[Measurement]) -> str:
    return to_html(build_report(every_kind, "Two cores"))


@pytest.fixture(scope="module")
def hostile_page(every_kind: list[Measurement], hostile: str) -> str:
    return to_html(build_report(_hostile(every_kind, hostile), hostile))


def _hostile(measurements: list[Measurement], text: str) -> list[Measurement]:
    """The same with the text wherever a text may stand."""
    return [
        replace(
            m,
            target=m.target and replace(m.target, name=text, backbone=text, head=text, device=text, runtime=text),
            case={**m.case, text: text},
            figures={**m.figures, text: Figure(1.0, text, "higher")},
            settings={text: text},
            timed=text,
            marks=(text,),
            conditions={text: {text: text}},
            machine={"processor": text, text: text, "versions": {text: text}, "gpus": [{"name": text}]},
            details={**m.details, text: text, "ceilings": [{"name": text, "flops": 1e12, "bytes_per_second": 1e11}]},
            command=text,
            when=text,
        )
        for m in measurements
    ]


def test_every_kind_has_a_section(every_kind: list[Measurement]) -> None:
    assert {section.kind for section in build_report(every_kind).sections} == set(get_args(Kind))


@pytest.mark.parametrize(
    ("title", "marks"),
    [
        ("Ratio to the reference", {"<use ": 3}),
        ("Throughput against batch", {"<use ": 12}),
        ("Latency percentiles", {"<use ": 12 * 4}),
        ("Time by stage", {"stroke-width: 16": 2 * 5}),
        ("Memory over time", {}),
        ("Parameters of the head", {"<use ": 3 * 2 * 2}),
        ("Operations of the head, in the paper's convention", {"<use ": 3 * 2 * 2}),
        ("Roofline", {"<use ": 2}),
    ],
)
def test_every_chart_is_there_described_and_shows_every_figure(page: str, title: str, marks: dict[str, int]) -> None:
    charts = re.findall(r'<svg class="chart" role="img" aria-label="(.*?)".*?>(.*?)</svg>', page, flags=re.S)
    ((description, drawing),) = [(d, svg) for d, svg in charts if unescape(d).startswith(f"{title}. ")]
    assert len(description) > len(title) + 20
    for mark, count in marks.items():
        assert drawing.count(mark) == count
    # colours are the page's, light and dark
    assert not re.search(r"(?:fill|stroke): #", drawing)
    assert drawing.count("<line ") > 3


@pytest.mark.parametrize(
    ("low", "high", "logarithmic", "ticks"),
    [
        (0, 43.1, False, [0, 10, 20, 30, 40]),
        (0.925, 1.025, False, [0.94, 0.96, 0.98, 1, 1.02]),
        (0, 1, False, [0, 0.2, 0.4, 0.6, 0.8, 1]),
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


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<svg xmlns="), (".png", b"\x89PNG")])
def test_charts_are_written_as_files(every_kind: list[Measurement], tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"chart{suffix}"
    roofline = number_rows(m for m in every_kind if m.kind == "roofline")
    write_charts(draw_charts("roofline", roofline), "A <heading>", path)
    assert path.read_bytes().startswith(start)
    if suffix == ".svg":
        texts = list(ElementTree.parse(path).getroot().itertext())
        assert {"A <heading>", "Roofline", "NVIDIA L4", "arithmetic intensity, FLOPs per byte"} <= set(texts)
    else:
        with Image.open(path) as image:
            # the roof and the markers have the first series' colour
            assert (np.asarray(image) == (0, 114, 178)).all(axis=2).sum() > 500


def test_the_roofline_of_integers_is_in_operations(one: Callable[..., Measurement]) -> None:
    roof = {"name": "NVIDIA L4", "flops": 242e12, "bytes_per_second": 3e11}
    line = one("roofline", {"intensity": Figure(60.0, "FLOPs/byte")}, case={"batch": 1}, details={"ceilings": [roof]})
    assert line.target is not None
    for precision, unit in (("int8", "TOP/s at most"), ("fp16", "TFLOP/s at most")):
        rows = number_rows([replace(line, target=replace(line.target, precision=precision))])
        assert unit in draw_charts("roofline", rows)[0].svg


def test_tables_have_figures_doubts_and_how_each_was_measured(page: str, every_kind: list[Measurement]) -> None:
    text = Elements(re.sub(r"<svg.*?</svg>", "", page, flags=re.S)).text
    for part in (
        *("0.972", "[0.968, 0.977]", "19.44", "57.87", "37.19", "512", "23.51 M"),
        *("opal-deploy bench compare --model m.onnx", "Timed: from call to numpy arrays"),
        *("Example CPU 9000, 2 cores", "onnxruntime 1.31.0, numpy 2.4.0"),
        *("3 marked as doubtful", "noisy: the repeats differ by 15%"),
    ):
        assert part in text
    assert page.count('<tr class="doubt">') == 3
    markdown = to_markdown(build_report(every_kind))
    assert "| 1 | resnet50 + opal | 0.972 [0.968, 0.977] |" in markdown
    assert "- Rows 1–3: `opal-deploy bench compare --model m.onnx`" in markdown
    assert "**noisy: the repeats differ by 15%**" in markdown


def test_the_page_is_self_contained_titled_and_has_no_script(page: str) -> None:
    elements = Elements(page)
    links = [value or "" for name, value in elements.attributes if name in ("src", "href", "srcset", "data", "action")]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not {"script", "img", "link", "iframe", "image", "foreignobject"} & set(elements.names)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'") in (
        elements.attributes
    )
    assert "<title>Two cores</title>" in page
    assert ("lang", "en") in elements.attributes
    assert elements.names.count("h1") == 1


def test_ids_are_unique_and_every_reference_has_its_target(page: str) -> None:
    ids = [value for name, value in Elements(page).attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page))
    for reference in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert reference in ids


def test_the_same_measurements_make_the_same_page(every_kind: list[Measurement], page: str) -> None:
    assert to_html(build_report(every_kind, "Two cores")) == page


def test_texts_from_outside_cannot_become_markup(hostile_page: str, page: str) -> None:
    elements = Elements(hostile_page)
    assert not {"script", "img"} & set(elements.names)
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
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
    assert not {"script", "img"} & set(elements.names)
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
    # the browser's own policy had nothing to refuse: styles in charts are allowed
    assert b"Content Security Policy" not in run.stderr


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_figures_that_are_not_positive_are_drawn(every_kind: list[Measurement], value: float) -> None:
    odd = [
        replace(m, figures={name: replace(figure, value=value, repeats=()) for name, figure in m.figures.items()})
        for m in every_kind
    ]
    assert to_html(build_report(odd)).count('<svg class="chart"') >= 6


def test_unknown_figures_and_failures_are_in_the_tables(one: Callable[..., Measurement]) -> None:
    strange = one("latency", {"time_to_boredom": Figure(12.5, "yawns", "lower")}, case={"weather": "fine"})
    failed = replace(strange, figures={}, case={"weather": "rain"}, marks=("failed: out of memory",))
    text = Elements(to_html(build_report([strange, failed]))).text
    for part in ("time to boredom", "yawns", "12.5", "weather", "fine", "rain", "failed: out of memory"):
        assert part in text


def test_the_last_measurement_of_a_thing_counts_and_the_report_says_so(one: Callable[..., Measurement]) -> None:
    rates = [one("throughput", {"r": Figure(value, "images/s")}, case={"batch": 1}) for value in (11.5, 22.5)]
    report = build_report(rates)
    assert report.measured == 1
    text = Elements(to_html(report)).text
    assert "22.5" in text
    assert "11.5" not in text
    assert "1 earlier measurement of the same things on the same machine are not shown" in text


def test_machines_are_told_apart(one: Callable[..., Measurement]) -> None:
    here = one("throughput", {"r": Figure(11.5, "images/s")}, case={"batch": 1})
    there = replace(here, machine={"processor": "Other", "gpus": [{"name": "NVIDIA L4"}]})
    report = build_report([here, there])
    assert [m.title for m in report.machines] == ["Example CPU 9000, 2 cores", "NVIDIA L4; Other"]
    assert [cell.text for cell in (row[2] for row in report.sections[0].tables[0].rows)] == ["A", "B"]


def test_markdown_has_whole_tables_and_no_markup_from_outside(every_kind: list[Measurement], hostile: str) -> None:
    hostile_text = to_markdown(build_report(_hostile(every_kind, hostile)))
    for text in (to_markdown(build_report(every_kind)), hostile_text):
        blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
        assert len(blocks) >= 8
        for block in blocks:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", hostile_text.replace(r"\`", ""))
    assert "<script" not in outside_code
    assert "\x1b" not in hostile_text
    hostile_text.encode()


def test_the_command_writes_a_page_by_default(opal: Opal, write_lines: Write, every_kind: list[Measurement]) -> None:
    path = write_lines(*every_kind[:2])
    done = opal("bench", "report", path.name, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert "<h1>Benchmarks</h1>" in (path.parent / "report.html").read_text(encoding="utf-8")


def test_markdown_to_stdout_draws_nothing(opal: Opal, write_lines: Write, every_kind: list[Measurement]) -> None:
    path = write_lines(*every_kind)
    done = opal(
        "bench", "report", path.name, "--markdown", "-", cwd=path.parent, blocked=("matplotlib", "jinja2", "torch")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# Benchmarks\n")
    assert not (path.parent / "report.html").exists()


def test_the_command_never_overwrites_what_it_reads(
    opal: Opal, write_lines: Write, every_kind: list[Measurement]
) -> None:
    path = write_lines(*every_kind[:1])
    before = path.read_bytes()
    done = opal("bench", "report", path.name, "--markdown", path.name, cwd=path.parent)
    assert done.returncode == 2
    assert "is one of the files to read" in done.stderr
    assert path.read_bytes() == before


def test_files_without_measurements_are_a_wrong_call(opal: Opal, write_lines: Write) -> None:
    path = write_lines()
    path.write_text("\n")
    done = opal("bench", "report", path.name, cwd=path.parent)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no measurements in these files" in done.stderr
