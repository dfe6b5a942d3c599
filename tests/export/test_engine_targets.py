"""The choice of builder and GPU for an engine, and the options of a build."""

import pytest

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.errors import UsageError
from opal_deploy.export.builder import choose_engine_targets
from opal_deploy.export.options import EngineOptions
from opal_deploy.runtime.devices import Driver, Gpu
from opal_deploy.runtime.tensorrt import parse_target

NO_GPU = Driver(problem="no NVIDIA driver found (libnvidia-ml.so.1)")
L4 = Driver("580.95.05", (13, 0), (Gpu(0, "NVIDIA L4", 24 << 30, (8, 9)),))
H200 = Driver("580.95.05", (13, 0), (Gpu(0, "NVIDIA H200", 141 << 30, (9, 0)),))
A100 = Driver("580.95.05", (13, 0), (Gpu(0, "NVIDIA A100", 80 << 30, (8, 0)),))
BOTH = {"tensorrt": "11.4", "tensorrt-rtx": "1.7"}
RTX = {"tensorrt-rtx": "1.7"}
PROPER = {"tensorrt": "11.4"}
NONE = {}


def choose(installed, driver, builder, *names):
    options = EngineOptions(builder=builder, target=names)
    return [(t.builder, t.sm) for t in choose_engine_targets(options, driver, installed.get)]


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
    "no GPU at all": (RTX, NO_GPU, None, ["pentium"], "'pentium': unknown GPU"),
    "too old": (RTX, NO_GPU, None, ["sm70"], "run on sm75 and newer"),
    "current without one": (RTX, NO_GPU, None, ["current"], "no GPU here .no NVIDIA driver"),
    "forced and not installed": (RTX, L4, "tensorrt", [], r"tensorrt-cu13.*opal-deploy\[trt\]"),
    "forced, no GPU": (PROPER, NO_GPU, "tensorrt", [], "builds only on the GPU that runs the engine"),
    "forced, elsewhere": (BOTH, L4, "tensorrt", ["a100"], r"--target sm80: TensorRT builds only for .*L4"),
}


@pytest.mark.parametrize("case", THE_RULE)
def test_the_rule(case):
    installed, driver, builder, names, engines = THE_RULE[case]
    assert choose(installed, driver, builder, *names) == engines


def test_on_an_a100_without_tensorrt_the_doubt_is_told_before_building():
    (target,) = choose_engine_targets(EngineOptions(), A100, RTX.get)
    assert (target.builder, target.sm) == ("tensorrt-rtx", "sm80")
    for part in ("does not list sm80", "infer prefers the ONNX file", "pip install 'opal-deploy[trt]'"):
        assert part in target.reason
    (target,) = choose_engine_targets(EngineOptions(), L4, RTX.get)
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
    assert EngineOptions().batch_range == EngineOptions(batch="1:64:256").batch_range == BatchRange(1, 64, 256)
    assert EngineOptions(batch=8).batch_range == EngineOptions(batch="8").batch_range == BatchRange(8, 8, 8)
    sizes = {"4G": 4 << 30, "512M": 512 << 20, "1.5 GiB": 3 << 29, 1048576: 1 << 20}
    assert {text: EngineOptions(workspace=text).workspace_bytes for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "1:2", "0:1:2", "4:2:8", "1:9:8", "a", "1:2:3:4", "-1", "1:64:99999999"])
def test_batches_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="--batch"):
        EngineOptions(batch=text)


@pytest.mark.parametrize("text", ["", "G", "0", "-1G", "4T", "many", "100", "0.1", "9999999999999G"])
def test_sizes_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="--workspace"):
        EngineOptions(workspace=text)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"version_compatible": True}, "--version-compatible"),
        ({"hardware_compatible": "ampere+"}, "--hardware-compatible"),
        ({"timing_cache": "x"}, "--timing-cache"),
        ({"strip_weights": True}, "--strip-weights"),
    ],
)
def test_an_option_that_a_builder_lacks_is_refused_by_name(options, flag):
    with pytest.raises(UsageError, match=flag):
        choose_engine_targets(EngineOptions(**options), NO_GPU, RTX.get)
    assert choose_engine_targets(EngineOptions(**options), L4, PROPER.get)
