"""Ceilings: which device is meant, the lower of two bounds, and the share that a measurement reached."""

from __future__ import annotations

import pytest

from opal_deploy.bench.roofline.ceiling import Ceiling, compute_share, find_by_driver_name, find_device, known_devices
from opal_deploy.bench.roofline.work import BYTES_PER_ELEMENT, Layer, Work
from opal_deploy.errors import UsageError

# 2000 FLOPs a picture; in fp16 100 bytes a picture and 40 a batch
WORK = Work("x", (Layer("a", "conv", 400, 10, 10, 15), Layer("b", "linear", 600, 20, 10, 5)))
SLOW_MEMORY = Ceiling("slow memory", {"fp16": 1e6}, 1e3, "made up")
SLOW_ARITHMETIC = Ceiling("slow arithmetic", {"fp16": 1e3}, 1e6, "made up", measured=True)


class TestDevices:
    @pytest.mark.parametrize(
        ("name", "title"),
        [
            ("NVIDIA A100-SXM4-40GB", "A100 40 GB SXM"),
            ("NVIDIA A100-SXM4-80GB", "A100 80 GB SXM"),
            ("NVIDIA A100-PCIE-40GB", "A100 40 GB PCIe"),
            ("NVIDIA A100 80GB PCIe", "A100 80 GB PCIe"),
            ("NVIDIA H100 80GB HBM3", "H100 80 GB SXM"),
            ("NVIDIA H100 PCIe", "H100 80 GB PCIe"),
            ("NVIDIA H100 NVL", "H100 94 GB NVL"),
            ("NVIDIA H200", "H200 141 GB SXM"),
            ("NVIDIA H200 NVL", "H200 141 GB NVL"),
            ("NVIDIA L4", "L4 24 GB"),
            ("Tesla T4", "T4 16 GB"),
            ("cuda:0 NVIDIA H200", "H200 141 GB SXM"),
            ("cuda:3 Tesla T4", "T4 16 GB"),
        ],
    )
    def test_are_known_by_the_names_that_drivers_give_them(self, name: str, title: str) -> None:
        found = find_by_driver_name(name)
        assert found is not None
        assert found.name == title

    @pytest.mark.parametrize(
        "name", ["NVIDIA L40", "NVIDIA L40S", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100", "cpu", ""]
    )
    def test_others_are_not_taken_for_them(self, name: str) -> None:
        assert find_by_driver_name(name) is None

    def test_each_has_figures_that_can_be_and_a_source(self) -> None:
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

    def test_bf16_and_tf32_are_missing_where_tensor_cores_lack_them(self) -> None:
        assert find_device("t4").flops.keys() == {"fp32", "fp16", "int8"}
        with pytest.raises(UsageError, match="T4 16 GB has no figure for bf16; it has fp32, fp16, int8"):
            find_device("t4").peak("bf16")

    def test_may_be_asked_for_by_either_name(self) -> None:
        assert find_device("H200-SXM") == find_device("NVIDIA H200")

    def test_an_unknown_one_is_refused_with_those_known(self) -> None:
        with pytest.raises(UsageError, match=r"--gpu 'a100': no figures for it; known are a100-40gb-sxm, .*, t4"):
            find_device("a100")


class TestTheRoof:
    def test_is_the_lower_of_both_bounds(self) -> None:
        assert SLOW_MEMORY.ridge("fp16") == 1000
        assert SLOW_MEMORY.attainable(10, "fp16") == 1e4
        assert SLOW_MEMORY.attainable(1000, "fp16") == 1e6
        assert SLOW_MEMORY.attainable(5000, "fp16") == 1e6

    def test_by_memory(self) -> None:
        # 8 pictures move 8 * 100 + 40 bytes
        assert SLOW_MEMORY.images_per_second(WORK, 8, "fp16") == pytest.approx(8 / (840 / 1e3))
        assert SLOW_MEMORY.bound(WORK, 8, "fp16") == "memory"

    def test_by_arithmetic_the_batch_does_not_matter(self) -> None:
        for batch in (1, 8):
            assert SLOW_ARITHMETIC.images_per_second(WORK, batch, "fp16") == pytest.approx(1e3 / 2000)
            assert SLOW_ARITHMETIC.bound(WORK, batch, "fp16") == "compute"


class TestShares:
    def test_is_measured_over_ceiling(self) -> None:
        found = compute_share(WORK, 8, "fp16", "cpu", 0.25, SLOW_ARITHMETIC)
        assert found is not None
        assert (found.ceiling, found.fraction, found.bound) == (pytest.approx(0.5), pytest.approx(0.5), "compute")
        assert found.source == "made up"

    def test_of_a_known_gpu_comes_from_its_data_sheet(self) -> None:
        found = compute_share(WORK, 8, "fp16", "cuda:0 NVIDIA L4", 1e6)
        assert found is not None
        assert found.ceiling == pytest.approx(8 / (840 / 300e9))
        assert "L4" in found.source

    def test_what_was_measured_goes_before_a_data_sheet(self) -> None:
        found = compute_share(WORK, 8, "fp16", "NVIDIA L4", 1.0, SLOW_MEMORY)
        assert found is not None
        assert found.source == "made up"

    def test_a_measured_one_without_the_precision_leaves_it_to_the_data_sheet(self) -> None:
        found = compute_share(WORK, 8, "int8", "NVIDIA L4", 1.0, SLOW_MEMORY)
        assert found is not None
        assert "L4" in found.source

    @pytest.mark.parametrize(("precision", "device"), [("fp32", "cpu"), ("bf16", "Tesla T4"), ("fp8", "NVIDIA H200")])
    def test_is_none_where_no_ceiling_is_known(self, precision: str, device: str) -> None:
        assert compute_share(WORK, 8, precision, device, 1.0) is None
