"""The choice of builder and GPU for an engine, and the options of a build."""

from pathlib import Path

import pytest

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.errors import UsageError
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
A100 = Driver("580.95.05", (13, 0), (Gpu(0, "NVIDIA A100", 80 << 30, (8, 0)),))
BOTH = {"tensorrt": "11.4", "tensorrt-rtx": "1.7"}
RTX = {"tensorrt-rtx": "1.7"}
PROPER = {"tensorrt": "11.4"}
NONE = {}


def choose(installed, driver, builder, *names):
    return [(t.builder, t.sm) for t in choose_engine_targets(builder, names, driver, installed.get)]


THE_RULE = {
    "TensorRT and a GPU": (BOTH, L4, None, [], [("tensorrt", "sm89")]),
    "the target is the GPU that is here": (PROPER, H200, None, ["h100"], [("tensorrt", "sm90")]),
    "no GPU": (BOTH, NO_GPU, None, [], [("tensorrt-rtx", "sm80")]),
    "for the GPU that is here": (RTX, L4, None, [], [("tensorrt-rtx", "sm89")]),
    "for another GPU": (BOTH, L4, None, ["a100"], [("tensorrt-rtx", "sm80")]),
    "RTX is forced": (BOTH, L4, "tensorrt-rtx", [], [("tensorrt-rtx", "sm89")]),
    "TensorRT is forced": (BOTH, L4, "tensorrt", [], [("tensorrt", "sm89")]),
    "several, each once": (
        RTX, NO_GPU, None, ["a100", "sm80", "RTX 4090", "t4", "8.6"],
        [("tensorrt-rtx", sm) for sm in ("sm80", "sm89", "sm75", "sm86")],
    ),
    "whatever is here": (RTX, H200, None, ["current"], [("tensorrt-rtx", "sm90")]),
}  # fmt: skip
# what to say to whom, in one line
UNBUILDABLE = {
    "none": (NONE, NO_GPU, None, [], r"needs TensorRT for RTX.*pip install 'opal-deploy\[trt-rtx\]'"),
    "none, with a GPU": (NONE, L4, None, [], r"opal-deploy\[trt-rtx\].*opal-deploy\[trt\]"),
    "an H200": (RTX, H200, None, [], r"sm90 \(H100, H200\).*install TensorRT.*ONNX Runtime"),
    "for an H100": (RTX, NO_GPU, None, ["h100"], "sm90 .*sm75, sm80, sm86, sm89, sm120, sm121;"),
    "no GPU at all": (RTX, NO_GPU, None, ["pentium"], "'pentium': not a GPU that is known here"),
    "too old": (RTX, NO_GPU, None, ["sm70"], "runs on sm75 and newer"),
    "current without one": (RTX, NO_GPU, None, ["current"], "no GPU here .no NVIDIA driver"),
    "forced and not installed": (RTX, L4, "tensorrt", [], r"tensorrt-cu13.*opal-deploy\[trt\]"),
    "forced, no GPU": (PROPER, NO_GPU, "tensorrt", [], "builds on the GPU that is to run the engine"),
    "forced, elsewhere": (BOTH, L4, "tensorrt", ["a100"], r"--target sm80: TensorRT builds for .*L4"),
}


@pytest.mark.parametrize("case", THE_RULE)
def test_the_rule(case):
    installed, driver, builder, names, engines = THE_RULE[case]
    assert choose(installed, driver, builder, *names) == engines


def test_on_an_a100_without_tensorrt_the_doubt_is_told_before_building():
    (target,) = choose_engine_targets(None, [], A100, RTX.get)
    assert (target.builder, target.sm) == ("tensorrt-rtx", "sm80")
    for part in ("does not list sm80", "infer prefers the ONNX file", "pip install 'opal-deploy[trt]'"):
        assert part in target.reason
    (target,) = choose_engine_targets(None, [], L4, RTX.get)
    assert "does not list" not in target.reason


@pytest.mark.parametrize("case", UNBUILDABLE)
def test_what_cannot_be_built_is_one_line(case):
    installed, driver, builder, names, line = UNBUILDABLE[case]
    with pytest.raises(UsageError, match=line) as error:
        choose(installed, driver, builder, *names)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "sm"),
    [
        ("sm80", "sm80"), ("SM120", "sm120"), ("8.9", "sm89"), ("12.0", "sm120"), ("A100", "sm80"), ("H200", "sm90"),
        ("NVIDIA A100", "sm80"), ("Tesla T4", "sm75"), ("GeForce RTX 4090", "sm89"), ("rtx-4090", "sm89"),
        ("l40s", "sm89"),
    ],
)  # fmt: skip
def test_gpus_are_known_by_name(text, sm):
    assert parse_target(text) == sm


def test_batches_and_sizes():
    assert (parse_batch("1:64:256"), parse_batch("8")) == (BatchRange(1, 64, 256), BatchRange(8, 8, 8))
    sizes = {"4G": 4 << 30, "512M": 512 << 20, "1.5 GiB": 3 << 29, "1048576": 1 << 20}
    assert {text: parse_bytes(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    ("parse", "option", "text"),
    [
        *((parse_batch, "--batch", text) for text in (
            "", "1:2", "0:1:2", "4:2:8", "1:9:8", "a", "1:2:3:4", "-1", "1:64:99999999",
        )),
        *((parse_bytes, "--workspace", text) for text in (
            "", "G", "0", "-1G", "4T", "many", "100", "0.1", "9999999999999G",
        )),
    ],
)  # fmt: skip
def test_batches_and_sizes_that_make_no_sense(parse, option, text):
    with pytest.raises(UsageError, match=option):
        parse(text)


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
def test_what_a_builder_does_not_have_is_refused_by_name(options, option):
    build = BuildOptions(**options)
    with pytest.raises(UsageError, match=option):
        EngineRequest([EngineTarget("tensorrt-rtx", "sm80", None, "")], Path(), NO_GPU, build)
    EngineRequest([EngineTarget("tensorrt", "sm89", L4.gpus[0], "")], Path(), L4, build)
