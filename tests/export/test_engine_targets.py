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
}  # fmt: skip
# what to say to whom, in one line
UNBUILDABLE = {
    "none": (NONE, NO_GPU, None, [], r"opal-deploy\[trt-rtx\]"),
    "an H200": (RTX, H200, None, [], r"sm90 \(H100, H200\).*opal-deploy\[trt\]"),
    "no GPU at all": (RTX, NO_GPU, None, ["pentium"], "'pentium': unknown GPU"),
    "too old": (RTX, NO_GPU, None, ["sm70"], "sm70: .*builds for sm75"),
    "forced and not installed": (RTX, L4, "tensorrt", [], r"tensorrt-cu13.*opal-deploy\[trt\]"),
    "forced, no GPU": (PROPER, NO_GPU, "tensorrt", [], "for the GPU present, no NVIDIA"),
    "forced, elsewhere": (BOTH, L4, "tensorrt", ["a100"], "for the GPU present, NVIDIA L4"),
}


@pytest.mark.parametrize("case", THE_RULE)
def test_the_rule(case):
    installed, driver, builder, names, engines = THE_RULE[case]
    assert choose(installed, driver, builder, *names) == engines


@pytest.mark.parametrize("case", UNBUILDABLE)
def test_what_cannot_be_built_is_one_line(case):
    installed, driver, builder, names, line = UNBUILDABLE[case]
    with pytest.raises(UsageError, match=rf"\A.*{line}.*\Z"):
        choose(installed, driver, builder, *names)


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


def test_batches():
    assert EngineOptions().batch_range == EngineOptions(batch="1:64:256").batch_range == BatchRange(1, 64, 256)
    assert EngineOptions(batch=8).batch_range == EngineOptions(batch="8").batch_range == BatchRange(8, 8, 8)


@pytest.mark.parametrize("text", ["", "1:2", "0:1:2", "4:2:8", "1:9:8", "a", "1:64:99999999"])
def test_batches_that_make_no_sense_are_refused(text):
    with pytest.raises(UsageError, match="--batch"):
        EngineOptions(batch=text)
