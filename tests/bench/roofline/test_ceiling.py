"""Ceilings: which device a name means, the lower of two bounds, and the share that a measurement reached."""

from __future__ import annotations

import pytest

from opal_deploy.bench.roofline.ceiling import Ceiling, compute_share, find_by_driver_name, find_device, known_devices
from opal_deploy.bench.roofline.work import BYTES_PER_ELEMENT, Layer, Work
from opal_deploy.errors import UsageError

# 2000 FLOPs an image; in fp16 100 bytes an image and 40 a batch
WORK = Work("x", (Layer("a", "conv", 400, 10, 10, 15), Layer("b", "linear", 600, 20, 10, 5)))
SLOW_MEMORY = Ceiling("slow memory", {"fp16": 1e6}, 1e3, "made up")
SLOW_ARITHMETIC = Ceiling("slow arithmetic", {"fp16": 1e3}, 1e6, "made up", measured=True)
TITLES = {
    "NVIDIA A100-SXM4-40GB": "A100 40 GB SXM", "NVIDIA A100-SXM4-80GB": "A100 80 GB SXM",
    "NVIDIA A100-PCIE-40GB": "A100 40 GB PCIe", "NVIDIA A100 80GB PCIe": "A100 80 GB PCIe",
    "NVIDIA H100 80GB HBM3": "H100 80 GB SXM", "NVIDIA H100 PCIe": "H100 80 GB PCIe",
    "NVIDIA H100 NVL": "H100 94 GB NVL", "NVIDIA H200": "H200 141 GB SXM", "NVIDIA H200 NVL": "H200 141 GB NVL",
    "NVIDIA L4": "L4 24 GB", "Tesla T4": "T4 16 GB", "cuda:0 NVIDIA H200": "H200 141 GB SXM",
    "cuda:3 Tesla T4": "T4 16 GB",
    # others are not taken for them
    "NVIDIA L40": None, "NVIDIA L40S": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "NVIDIA A100": None,
    "cpu": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "title"), TITLES.items())
def test_devices_are_known_by_the_whole_names_that_drivers_give_them(name: str, title: str | None) -> None:
    ceiling = find_by_driver_name(name)
    assert (ceiling and ceiling.name) == title


def test_every_device_has_plausible_figures_and_a_source() -> None:
    assert len(known_devices()) == 11
    for key in known_devices():
        device = find_device(key)
        assert device.flops.keys() <= BYTES_PER_ELEMENT.keys()
        # tensor cores are faster the shorter the numbers
        order = [device.flops[p] for p in ("fp32", "tf32", "fp16", "int8") if p in device.flops]
        assert order == sorted(order)
        assert device.flops["int8"] == pytest.approx(2 * device.flops["fp16"], rel=0.01)
        assert 1e11 < device.bytes_per_second < 1e13
        assert "NVIDIA" in device.source


def test_a_precision_that_tensor_cores_lack_is_missing() -> None:
    assert find_device("t4").flops.keys() == {"fp32", "fp16", "int8"}
    with pytest.raises(UsageError, match="T4 16 GB has no figure for bf16; it has fp32, fp16, int8"):
        find_device("t4").peak("bf16")


def test_a_device_has_two_names_and_an_unknown_one_is_refused_with_those_known() -> None:
    assert find_device("H200-SXM") == find_device("NVIDIA H200")
    with pytest.raises(UsageError, match=r"--gpu 'a100': no figures for it; known are a100-40gb-sxm, .*, t4"):
        find_device("a100")


def test_the_roof_is_the_lower_of_both_bounds() -> None:
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
def test_a_share_is_measured_over_ceiling(
    device: str, precision: str, measured: Ceiling | None, ceiling: float, bound: str, source: str
) -> None:
    share = compute_share(WORK, 8, precision, device, 0.25, measured)
    assert share is not None
    assert (share.ceiling, share.fraction) == (pytest.approx(ceiling), pytest.approx(0.25 / ceiling))
    assert share.bound == bound
    assert source in share.source


@pytest.mark.parametrize(("precision", "device"), [("fp32", "cpu"), ("bf16", "Tesla T4"), ("fp8", "NVIDIA H200")])
def test_there_is_no_share_without_a_ceiling(precision: str, device: str) -> None:
    assert compute_share(WORK, 8, precision, device, 1.0) is None
