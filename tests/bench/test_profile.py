"""Profiles of nodes and layers: real ones of ONNX Runtime on the CPU, those of a GPU as its libraries report them."""

import shutil

import onnx
import pytest

from opal_deploy.bench import speed
from opal_deploy.bench.measurement import Target, read_measurements
from opal_deploy.bench.speed import PARTS, check_profile, profile_batch
from opal_deploy.bench.targets import LoadedTarget
from opal_deploy.bench.timing import random_batches
from opal_deploy.errors import UsageError
from tests.cli.calls import check
from tests.runtime.conftest import make_stand, tiny, tiny_fp16

__all__ = ["make_stand", "tiny", "tiny_fp16"]
QUICK = [
    "--batch", "2", "--device", "cpu", "--threads", "1", "--seconds", "0", "--iterations", "1", "--repeats", "1",
    "--warmup", "0", "--profile",
]  # fmt: skip


def read_profile(opal, path, out):
    done = check(opal("bench", "latency", "--model", path, *QUICK, "--out", out))
    (row,) = read_measurements([out])
    nodes = row.details["profile"]["nodes"]
    assert sum(node["share"] for node in nodes) == pytest.approx(1)
    assert {node["calls"] for node in nodes} == {row.details["profile"]["runs"]}
    sums = {name: figure.value for name, figure in row.figures.items() if name.startswith("profile.")}
    total = sum(node["calls"] * node["mean_us"] for node in nodes) / row.details["profile"]["runs"] / 1e3
    assert sum(sums.values()) == pytest.approx(total)
    return nodes, sums, done.stderr


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_node_is_timed_and_belongs_to_a_part(opal, tiny, tiny_fp16, tmp_path, precision):
    path = tiny.path if precision == "fp32" else tiny_fp16
    nodes, sums, stderr = read_profile(opal, path, tmp_path / "profile.jsonl")
    assert sums.keys() == {f"profile.{part}_ms" for part in PARTS}
    operators = {part: [node["operator"] for node in nodes if node["part"] == part] for part in PARTS}
    # what the optimiser makes of a convolution still is one
    counts = [sum("Conv" in name for name in operators[part]) for part in PARTS]
    assert counts == [2, 1, 0]
    assert {"Softmax", "ReduceMax", "ArgMax"} <= set(operators["head"])
    assert "head " in stderr
    assert any("ArgMax" in line and "head" in line for line in stderr.splitlines())


def test_a_model_without_projection_has_backbone_and_head(opal, linear_model, tmp_path):
    _, sums, _ = read_profile(opal, linear_model, tmp_path / "profile.jsonl")
    assert "profile.backbone_ms" in sums


def test_what_is_no_file_cannot_be_profiled(fake_target):
    with pytest.raises(UsageError, match="--profile takes ONNX files and engines; export it"):
        check_profile(fake_target(0, lambda _: None))


def event(category, name, start, length, **arguments):
    return {"cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def test_on_a_gpu_kernels_are_timed_or_nodes_whose_launches_wait(monkeypatch):
    monkeypatch.setattr(speed, "_WARM_UP", 1)
    runs = [event("Session", "model_run", start, 90) for start in (0, 100)]
    nodes = [event("Node", "conv_kernel_time", start, 5) for start in (10, 110)]
    kernels = [
        event("Kernel", "void cudnn::f()", start, length, parent_name="conv_kernel_time", op_name="Conv")
        for start, length in ((12, 99), (112, 30), (113, 40))
    ]
    assert speed._read_events([*runs, *nodes, *kernels], gpu=True)[1] == {"conv": [30, 40]}
    monkeypatch.delenv(speed.BLOCKING, raising=False)
    with pytest.raises(UsageError, match="without CUDA profiling; set CUDA_LAUNCH_BLOCKING=1"):
        speed._read_events([*runs, *nodes], gpu=True)
    monkeypatch.setenv(speed.BLOCKING, "1")
    assert speed._read_events([*runs, *nodes], gpu=True)[1] == {"conv": [5]}


def test_the_layers_of_an_engine_have_the_parts_of_the_nodes_that_they_fuse(make_stand, tiny):
    stand = make_stand(tiny.path)
    shutil.copy(tiny.path, stand.path.with_name(stand.onnx.name))
    loaded = LoadedTarget(stand.open(), Target("c", device="cuda:0 NVIDIA L4"), None, stand.path)
    convolutions = [node.name for node in onnx.load(tiny.path).graph.node if node.op_type == "Conv"]
    stand.trt.layers = [
        (f"{convolutions[0]} + node_relu", 4.0),
        (convolutions[-1], 1.0),
        ("{ForeignNode[node_softmax...node_argmax]}", 2.0),
        (f"Reformatting CopyNode for Input Tensor 0 to {convolutions[-1]}", 0.5),
        (f"{{ForeignNode[{convolutions[-1]}...node_softmax]}}", 0.25),
        ("__myl_MaxArgMax_myl0_3", 0.25),
    ]
    profile = profile_batch(loaded, 2)
    assert [(node.part, node.calls, node.mean_us) for node in profile.nodes] == [
        ("backbone", 10, 4000), ("projection", 10, 1000), ("head", 10, 2000), ("projection", 10, 500),
        ("projection+head", 10, 250), ("other", 10, 250),
    ]  # fmt: skip
    assert profile.figures()["profile.head_ms"].value == 2
    # afterwards nothing is reported
    stand.trt.layers = None
    loaded.session.run(random_batches(1, 2, loaded.metadata.input_size)[0])
