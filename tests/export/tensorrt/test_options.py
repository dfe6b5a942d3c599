"""The choice of builder and GPU for an engine, and the options of a build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.errors import MissingExtra, UsageError
from opal_deploy.export.tensorrt.options import (
    BuildOptions,
    EngineRequest,
    EngineTarget,
    choose_engine_targets,
    parse_batch,
    parse_bytes,
)
from opal_deploy.runtime.nvml import Driver, Gpu
from opal_deploy.runtime.tensorrt.compatibility import parse_target

NO_GPU = Driver(problem="no NVIDIA driver found (libnvidia-ml.so.1)")
L4 = Driver("580.95.05", (13, 0), (Gpu(0, "NVIDIA L4", 24 << 30, (8, 9)),))
H200 = Driver("580.95.05", (13, 0), (Gpu(0, "NVIDIA H200", 141 << 30, (9, 0)),))
BOTH = {"tensorrt": "11.4", "tensorrt-rtx": "1.7"}
RTX = {"tensorrt-rtx": "1.7"}
PROPER = {"tensorrt": "11.4"}
NONE: dict[str, str] = {}


def choose(installed: dict[str, str], driver: Driver, builder: str | None, *names: str) -> list[tuple[str, str]]:
    return [(t.builder, t.sm) for t in choose_engine_targets(builder, names, driver, installed.get)]


@pytest.mark.parametrize(
    ("installed", "driver", "builder", "names", "engines"),
    [
        pytest.param(BOTH, L4, None, [], [("tensorrt", "sm89")], id="TensorRT and a GPU"),
        pytest.param(PROPER, H200, None, [], [("tensorrt", "sm90")], id="an H200 with TensorRT"),
        pytest.param(PROPER, H200, None, ["h100"], [("tensorrt", "sm90")], id="the target is the GPU that is here"),
        pytest.param(BOTH, NO_GPU, None, [], [("tensorrt-rtx", "sm80")], id="no GPU"),
        pytest.param(RTX, NO_GPU, None, [], [("tensorrt-rtx", "sm80")], id="a laptop"),
        pytest.param(RTX, L4, None, [], [("tensorrt-rtx", "sm89")], id="for the GPU that is here"),
        pytest.param(BOTH, L4, None, ["a100"], [("tensorrt-rtx", "sm80")], id="for another GPU"),
        pytest.param(BOTH, L4, "tensorrt-rtx", [], [("tensorrt-rtx", "sm89")], id="RTX is forced"),
        pytest.param(BOTH, L4, "tensorrt", [], [("tensorrt", "sm89")], id="TensorRT is forced"),
        pytest.param(
            RTX, NO_GPU, None, ["a100", "sm80", "RTX 4090", "t4", "8.6"],
            [("tensorrt-rtx", sm) for sm in ("sm80", "sm89", "sm75", "sm86")], id="several, each once",
        ),
        pytest.param(RTX, H200, None, ["current"], [("tensorrt-rtx", "sm90")], id="whatever is here"),
    ],
)  # fmt: skip
def test_the_rule(installed: Any, driver: Driver, builder: Any, names: Any, engines: Any) -> None:
    assert choose(installed, driver, builder, *names) == engines


@pytest.mark.parametrize(
    ("installed", "driver", "builder", "names", "line"),
    [
        pytest.param(
            NONE, NO_GPU, None, [], r"needs TensorRT for RTX.*pip install 'opal-deploy\[trt-rtx\]'", id="none"
        ),
        pytest.param(NONE, L4, None, [], r"opal-deploy\[trt-rtx\].*opal-deploy\[trt\]", id="none, with a GPU"),
        pytest.param(PROPER, NO_GPU, None, [], r"opal-deploy\[trt-rtx\]", id="TensorRT without a GPU"),
        pytest.param(RTX, H200, None, [], r"sm90 \(H100, H200\).*install TensorRT.*ONNX Runtime", id="an H200"),
        pytest.param(RTX, NO_GPU, None, ["h100"], "sm90 .*sm75, sm80, sm86, sm89, sm120, sm121;", id="for an H100"),
        pytest.param(RTX, NO_GPU, None, ["pentium"], "'pentium': not a GPU that is known here", id="no GPU at all"),
        pytest.param(RTX, NO_GPU, None, ["current"], "no GPU here .no NVIDIA driver", id="current without one"),
        pytest.param(RTX, L4, "tensorrt", [], r"tensorrt-cu13.*opal-deploy\[trt\]", id="forced and not installed"),
        pytest.param(
            PROPER, NO_GPU, "tensorrt", [], "builds on the GPU that is to run the engine", id="forced, no GPU"
        ),
        pytest.param(
            BOTH, L4, "tensorrt", ["a100"], r"--target sm80: TensorRT builds for .*L4", id="forced, elsewhere"
        ),
    ],
)
def test_what_cannot_be_built_is_one_line(installed: Any, driver: Driver, builder: Any, names: Any, line: str) -> None:
    with pytest.raises(UsageError, match=line) as error:
        choose(installed, driver, builder, *names)
    assert "\n" not in str(error.value)


def test_a_missing_builder_names_the_extra() -> None:
    with pytest.raises(MissingExtra) as error:
        choose(RTX, L4, "tensorrt")
    assert error.value.extra == "trt"


@pytest.mark.parametrize(
    ("text", "sm"),
    [
        ("sm80", "sm80"), ("SM120", "sm120"), ("8.9", "sm89"), ("12.0", "sm120"), ("A100", "sm80"), ("H200", "sm90"),
        ("NVIDIA A100", "sm80"), ("Tesla T4", "sm75"), ("GeForce RTX 4090", "sm89"), ("rtx-4090", "sm89"),
        ("l40s", "sm89"),
    ],
)  # fmt: skip
def test_gpus_are_known_by_name(text: str, sm: str) -> None:
    assert parse_target(text) == sm


def test_batches() -> None:
    assert parse_batch("1:64:256") == BatchRange(1, 64, 256)
    assert parse_batch("8") == BatchRange(8, 8, 8)


@pytest.mark.parametrize("text", ["", "1:2", "0:1:2", "4:2:8", "1:9:8", "a", "1:2:3:4", "-1", "1:64:99999999"])
def test_batches_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--batch"):
        parse_batch(text)


@pytest.mark.parametrize(
    ("text", "size"), [("4G", 4 << 30), ("512M", 512 << 20), ("1.5 GiB", 3 << 29), ("1048576", 1 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "0", "-1G", "4T", "many", "100", "0.1", "9999999999999G"])
def test_sizes_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--workspace"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"version_compatible": True}, "--version-compatible"),
        ({"hardware_compatible": "ampere+"}, "--hardware-compatible"),
        ({"timing_cache": "x"}, "--timing-cache"),
        ({"strip_weights": True}, "--strip-weights"),
        ({"refit": True}, "--refit"),
    ],
)
def test_what_a_builder_does_not_have_is_refused_by_name(options: dict[str, Any], option: str) -> None:
    build = BuildOptions(**options)
    with pytest.raises(UsageError, match=option):
        EngineRequest([EngineTarget("tensorrt-rtx", "sm80", None, "")], Path(), NO_GPU, build)
    EngineRequest([EngineTarget("tensorrt", "sm89", L4.gpus[0], "")], Path(), L4, build)
