"""Measurements of every kind as the commands write them, with invented figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opal_deploy.bench.measurement import Figure, Measurement, Target, append_measurement

HOSTILE = "<script>alert(1)</script>\"'&|`$x$\n\udcff\x1b[31m</title><img src=x onerror=alert(2)>_{{7*7}}.onnx"
MACHINE = {
    "processor": "Example CPU 9000", "usable_cores": 2, "memory_gb": 25.2, "python": "3.12.1",
    "versions": {"onnxruntime": "1.31.0", "numpy": "2.4.0"},
}  # fmt: skip


def subject(name: str = "resnet50 + opal", **changes: Any) -> Target:
    values: dict[str, Any] = {
        "backbone": "resnet50", "head": "opal", "runtime": "onnxruntime", "runtime_version": "1.31.0", "device": "cpu",
        "precision": "fp32", "input_size": (224, 224), "num_classes": 200, "prototypes_per_class": 5,
    }  # fmt: skip
    return Target(name, **(values | changes))


def measured(kind: Any, figures: dict[str, Figure], **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "target": subject(), "case": {}, "machine": MACHINE, "when": "2026-05-01T12:00:00+00:00",
        "command": f"opal-deploy bench {kind} --model m.onnx", "timed": "from call to numpy arrays",
    }  # fmt: skip
    return Measurement(kind, figures=figures, **(values | changes))


def rates(value: float, spread: float = 0.02) -> Figure:
    return Figure.of_repeats((value * (1 - spread / 2), value, value * (1 + spread / 2)), "images/s", "higher")


def one_of_each(name: str = "resnet50") -> list[Measurement]:
    """Every kind, several rows where a plot wants several."""
    out = []
    for backbone, share in ((name, 0.972), ("convnext_tiny", 0.991), ("efficientnet_v2_s", 0.987)):
        ratio = Figure(share, "ratio", "higher", (share - 0.01, share, share + 0.01), (share - 0.004, share + 0.005))
        who = subject(f"{backbone} + opal", backbone=backbone)
        case = {"question": "head", "reference": "linear", "batch": 8, "threads": 2}
        out.append(measured("compare", {"ratio": ratio, "images_per_second": rates(25 * share)}, target=who, case=case))
        for batch in (1, 2, 4, 8):
            rate = 20 * share * batch**0.2
            figures = {
                "images_per_second": rates(rate, 0.15 if batch == 4 else 0.02),
                "share_of_ceiling": Figure(62.5 * share, "%", "higher"),
            }
            marks = ("noisy: the repeats differ by 15%",) if batch == 4 else ()
            case = {"batch": batch, "threads": 2}
            out.append(measured("throughput", figures, target=who, case=case, marks=marks))
            times = {f"p{p}_ms": Figure(1000 * batch / rate * (1 + p / 400), "ms", "lower") for p in (50, 90, 95, 99)}
            out.append(measured("latency", {**times, "mean_ms": times["p50_ms"]}, target=who, case=case))
        for dataset, classes in (("cub", 200), ("flowers", 102)):
            counts = {"backbone_params": Figure(23508032, "parameters"), "backbone_macs": Figure(4.1e9, "MACs")}
            for head, size in (("linear", 0.3), ("opal", 8.7)):
                for quantity in ("params", "macs_paper", "flops"):
                    counts[f"{head}_{quantity}_percent"] = Figure(size * classes / 200 * share, "%")
            what = subject(f"{backbone} + opal", backbone=backbone, num_classes=classes, runtime="", device="")
            out.append(measured("overhead", counts, target=what, case={"dataset": dataset}, timed=""))
    for workers in (1, 2):
        figures = {"bare": rates(27), "infer": rates(25 * workers / 2), "peak_memory": Figure(512, "MB", "lower")}
        for stage, wall in (("read", 0.2), ("decode", 4.1), ("resize", 1.5), ("compute", 37.0), ("write", 0.1)):
            figures[f"infer.{stage}.wall"] = Figure.of_repeats((wall, wall * 1.01), "ms/image")
            figures[f"infer.{stage}.cpu"] = Figure(wall * 0.9, "ms/image", "lower")
        curve = {"seconds": [0.0, 0.5, 1.0], "megabytes": [400.0, 505.0, 512.0], "samples": 3}
        details = {"memory": {"infer": curve}, "bound": {"infer": {"line": "bound by compute"}}}
        out.append(measured("pipeline", figures, case={"workers": workers, "batch": 8}, details=details))
    tried = [{"rate": rate, "p99_ms": rate * 4.5, "held": rate < 22} for rate in (10.0, 20.0, 21.0, 24.0)]
    served = {"queries_per_second": Figure(21.0, "queries/s", "higher"), "p99_ms": Figure(93.0, "ms", "lower")}
    out.append(measured("server", served, case={"limit_ms": 100.0}, details={"tried": tried}))
    for part, intensity in (("backbone", 60.0), ("head", 3.0), ("network", 58.0)):
        counted = {"macs": Figure(4.1e9, "MACs"), "intensity": Figure(intensity, "FLOPs/byte")}
        roof = {"name": "NVIDIA L4", "flops": 121e12, "bytes_per_second": 3e11, "bound": "memory"}
        case = {"batch": 1, "part": part}
        out.append(measured("roofline", counted, case=case, timed="", details={"ceilings": [roof]}))
    out.append(measured("ceiling", {"copy": Figure(2.1e10, "bytes/s", "higher")}, target=None))
    return out


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write measurements to a file."""

    def write(*measurements: Measurement, name: str = "lines.jsonl") -> Path:
        for measurement in measurements:
            append_measurement(tmp_path / name, measurement)
        return tmp_path / name

    return write


@pytest.fixture(scope="session")
def every_kind() -> list[Measurement]:
    """Every kind, with what each plot needs."""
    return one_of_each()


@pytest.fixture(scope="session")
def hostile() -> str:
    """Markup, Jinja, Markdown, mathematics of matplotlib's, control characters and half a surrogate pair."""
    return HOSTILE


@pytest.fixture(scope="session")
def one() -> Callable[..., Measurement]:
    """Make a measurement: kind, figures, and fields to replace."""
    return measured
