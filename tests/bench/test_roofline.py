"""Ceilings, from data sheets or measured, and `bench roofline` as it is called. No test asserts a speed."""

import pytest
import torch

from opal_deploy.bench.measurement import Figure, Measurement, Target, append_measurement, read_measurements
from opal_deploy.bench.roofline import ceiling as ceilings
from opal_deploy.bench.roofline.ceiling import (
    Ceiling,
    compute_share,
    find_by_driver_name,
    find_device,
    known_devices,
    measure_ceiling,
    to_ceiling,
)
from opal_deploy.bench.roofline.work import BYTES_PER_ELEMENT, Layer, Work, count_backbone_work, count_head_work
from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig
from tests.cli.calls import check

# 2000 FLOPs an image; in fp16 100 bytes an image and 40 a batch
WORK = Work("x", (Layer("a", "conv", 400, 10, 10, 15), Layer("b", "linear", 600, 20, 10, 5)))
SLOW_MEMORY = Ceiling("slow memory", {"fp16": 1e6}, 1e3, "made up")
SLOW_ARITHMETIC = Ceiling("slow arithmetic", {"fp16": 1e3}, 1e6, "made up")
TITLES = {
    "NVIDIA A100-SXM4-80GB": "A100 80 GB SXM", "NVIDIA H100 80GB HBM3": "H100 80 GB SXM",
    "cuda:0 NVIDIA H200": "H200 141 GB SXM", "cuda:3 Tesla T4": "T4 16 GB",
    # others are not taken for them
    "NVIDIA L40": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "NVIDIA A100": None, "cpu": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "title"), TITLES.items())
def test_devices_are_known_by_the_whole_names_that_drivers_give_them(name, title):
    ceiling = find_by_driver_name(name)
    assert (ceiling and ceiling.name) == title


def test_every_device_has_plausible_figures_and_a_source():
    assert known_devices()
    for key in known_devices():
        device = find_device(key)
        assert device.flops.keys() <= BYTES_PER_ELEMENT.keys()
        # tensor cores are faster the shorter the numbers
        order = [device.flops[p] for p in ("fp32", "tf32", "fp16", "int8") if p in device.flops]
        assert order == sorted(order)
        assert device.flops["int8"] == pytest.approx(2 * device.flops["fp16"], rel=0.01)
        assert 1e11 < device.bytes_per_second < 1e13
        assert "NVIDIA" in device.source


def test_unknown_devices_and_precisions_are_refused_with_those_known():
    assert find_device("H200-SXM") == find_device("NVIDIA H200")
    with pytest.raises(UsageError, match=r"--gpu 'a100': unknown GPU; expected one of a100-40gb-sxm, .*, t4"):
        find_device("a100")
    with pytest.raises(UsageError, match="T4 16 GB has no figure for bf16; it has fp32, fp16, int8"):
        find_device("t4").peak("bf16")


def test_the_roof_is_the_lower_of_both_bounds():
    assert SLOW_MEMORY.ridge("fp16") == 1000
    assert [SLOW_MEMORY.attainable(x, "fp16") for x in (10, 1000, 5000)] == [1e4, 1e6, 1e6]
    # 8 images move 8 * 100 + 40 bytes
    assert SLOW_MEMORY.images_per_second(WORK, 8, "fp16") == pytest.approx(8 / (840 / 1e3))
    assert SLOW_MEMORY.bound(WORK, 8, "fp16") == "memory"
    for batch in (1, 8):
        assert SLOW_ARITHMETIC.images_per_second(WORK, batch, "fp16") == pytest.approx(1e3 / 2000)
        assert SLOW_ARITHMETIC.bound(WORK, batch, "fp16") == "compute"


@pytest.mark.parametrize(
    ("device", "precision", "measured", "ceiling", "bound", "source"),
    [
        ("cpu", "fp16", SLOW_ARITHMETIC, 0.5, "compute", "made up"),
        ("cuda:0 NVIDIA L4", "fp16", None, 8 / (840 / 300e9), "memory", "L4"),
        ("NVIDIA L4", "fp16", SLOW_MEMORY, 8 / (840 / 1e3), "memory", "made up"),
        ("NVIDIA L4", "int8", SLOW_MEMORY, 8 / (420 / 300e9), "memory", "L4"),
    ],
    ids=["measured", "data sheet", "measured before data sheet", "data sheet where nothing was measured"],
)
def test_a_share_is_measured_over_ceiling(device, precision, measured, ceiling, bound, source):
    share = compute_share(WORK, 8, precision, device, 0.25, measured)
    assert share
    assert (share.ceiling, share.fraction) == (pytest.approx(ceiling), pytest.approx(0.25 / ceiling))
    assert (share.bound, source in share.source) == (bound, True)


def test_there_is_no_share_without_a_ceiling():
    for precision, name in (("fp32", "cpu"), ("bf16", "Tesla T4"), ("fp8", "NVIDIA H200")):
        assert compute_share(WORK, 8, precision, name, 1.0) is None


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(ceilings.MATRIX_SIZE, "cpu", 32)


@pytest.mark.usefixtures("_small")
def test_a_measured_ceiling_is_the_best_of_the_repeats_and_reads_back_in_base_units():
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    done = []
    measured = measure_ceiling("cpu", ("fp32", "tf32", "bf16"), 1, lambda *counts: done.append(counts))
    assert done == [(count, 52) for count in range(1, 53)]
    assert (torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32) == before
    assert measured.figures.keys() == {"copy", "matmul_fp32", "matmul_tf32", "matmul_bf16"}
    for figure in measured.figures.values():
        assert len(figure.repeats) == 10
        assert figure.value == max(figure.repeats) > 0
    noisy = {f"noisy: {name}" for name, figure in measured.figures.items() if figure.is_noisy}
    assert set(measured.marks) == noisy
    assert "32 x 32 by 32 x 32" in measured.timed
    settings = measured.settings
    assert (settings["warm_up"], settings["runs_per_repeat"], measured.case) == (3, 1, {"threads": 1})
    copy = Measurement.from_line(measured.to_line())
    assert copy.figures == measured.figures
    ceiling = to_ceiling(copy)
    assert (ceiling.name, ceiling.source[:8]) == ("cpu, 1 thread", "measured")
    assert ceiling.bytes_per_second == pytest.approx(measured.figures["copy"].value * 1e9)
    assert ceiling.peak("bf16") == pytest.approx(measured.figures["matmul_bf16"].value * 1e12)


@pytest.mark.gpu
def test_a_gpu_is_timed_over_several_runs_without_waiting_for_each():
    measured = measure_ceiling("cuda", ("fp16",))
    sheet = find_by_driver_name(measured.target.device)
    assert measured.settings["runs_per_repeat"] == 10
    assert "CUDA events" in measured.timed
    for figure in measured.figures.values():
        assert figure.value == max(figure.repeats) > 0
    if sheet is not None:
        # nothing is faster than the data sheet says, beyond the precision of its figures
        assert measured.figures["copy"].value * 1e9 < 1.02 * sheet.bytes_per_second
        assert measured.figures["matmul_fp16"].value * 1e12 < 1.02 * sheet.flops["fp16"]


def test_lines_hold_work_and_ceilings_of_backbone_head_and_both(opal, tmp_path):
    lines = tmp_path / "roofline.jsonl"
    case = "--backbone resnet18 --classes 10 --prototypes 3 --size 160x192 --batch 8 --gpu l4"
    done = check(opal("bench", "roofline", *case.split(), "--gpu", "NVIDIA H200", "--out", lines))
    by_part = {m.case["part"]: m for m in read_measurements([lines])}
    body = count_backbone_work("resnet18", (160, 192))
    head = count_head_work("resnet18", 10, HeadConfig(prototypes_per_class=3), (160, 192))
    for part, work in (("backbone", body), ("head", head), ("network", body + head)):
        figures, details = by_part[part].figures, by_part[part].details
        assert figures["macs"].value == work.macs
        assert figures["bytes_fp16"].value == work.bytes_moved(8, "fp16")
        assert figures["intensity"].value == pytest.approx(work.intensity(8, "fp16"))
        assert figures["ceiling L4 24 GB"].value == pytest.approx(find_device("l4").images_per_second(work, 8, "fp16"))
        assert [ceiling["name"] for ceiling in details["ceilings"]] == ["L4 24 GB", "H200 141 GB SXM"]
        assert len(details["layers"]) == len(work.layers)
    assert "L4 24 GB: 121 TFLOP/s fp16, 300 GB/s (NVIDIA L4" in done.stdout


def test_a_measured_ceiling_stands_alone_unless_gpus_are_named(opal, tmp_path):
    path = tmp_path / "ceiling.jsonl"
    target = Target(name="cpu", device="cpu")
    figures = {"copy": Figure(10.0, "GB/s"), "matmul_fp32": Figure(0.5, "TFLOP/s")}
    append_measurement(path, Measurement("ceiling", target, {"threads": 2}, figures, when="2026-01-02T03:04:05+00:00"))
    arguments = (
        "bench", "roofline", "--backbone", "resnet18", "--precision", "fp32", "--ceiling", path, "--format", "markdown"
    )  # fmt: skip
    done = check(opal(*arguments))
    assert "FLOPs/byte | cpu, 2 threads |" in done.stdout
    assert "- cpu, 2 threads: 0.5 TFLOP/s fp32, 10 GB/s (measured: copy and product, 2026-01-02)" in done.stdout
    assert "| cpu, 2 threads | T4 16 GB |" in opal(*arguments, "--gpu", "t4").stdout


@pytest.mark.usefixtures("_small")
def test_a_ceiling_is_measured_first_and_written_down(opal, tmp_path):
    lines = tmp_path / "all.jsonl"
    arguments = "bench roofline --backbone resnet18 --measure-ceiling --threads 1 --precision fp32 --out"
    done = check(opal(*arguments.split(), lines))
    assert [m.kind for m in read_measurements([lines])] == ["ceiling", "roofline", "roofline", "roofline"]
    assert "timed: copy: 0 MiB" in done.stderr
    assert "cpu, 1 thread" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu a100", "--gpu 'a100': unknown GPU"),
        ("--gpu t4 --precision bf16", "none of T4 16 GB has a figure for it"),
        ("--measure-ceiling --precision int8", "--precision int8: expected fp32"),
        ("--measure-ceiling --device cuda:99", "cuda:99"),
        ("--backbone resnet17 --gpu t4", "torchvision has no such classifier"),
        ("--ceiling other.jsonl", "no measured ceiling found"),
    ],
)
def test_wrong_calls_are_one_line(opal, arguments, message, tmp_path):
    append_measurement(tmp_path / "other.jsonl", Measurement("latency", None, {}, {}))
    done = opal("bench", "roofline", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
