"""Where ONNX Runtime places the nodes of exported networks: every one on the GPU, in half precision in NHWC."""

import subprocess
import sys
from collections import Counter

import pytest

from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.onnx_session import CUDA
from tests.gpu_stubs.conftest import ROOT

# one of each of the paper's families, and others with different blocks
NETWORKS = (
    "resnet50", "efficientnet_v2_s", "convnext_tiny", "timm:ghostnet_100", "timm:mobilenetv4_conv_small",
    "timm:regnety_004",
)  # fmt: skip
# PyTorch would load the real libraries of CUDA into this process
EXPORT = """
import sys
from pathlib import Path
import torch
from opal_deploy.bench.networks import build_random_network, write_model
from opal_deploy.model.neighbours import Neighbours
network = build_random_network(sys.argv[1], 10, (64, 64))
plain = network.checkpoint.network
plain.neighbours = Neighbours.fit(torch.rand(20, plain.backbone.num_features), torch.arange(20) % 10)
for precision in ("fp32", "fp16"):
    write_model(network, precision, Path(sys.argv[2], precision)).rename(Path(sys.argv[2], f"{precision}.onnx"))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NETWORKS)
def test_all_nodes_of_a_network_are_on_the_gpu_and_nhwc_needs_one_transposition(sessions, tmp_path, name):
    subprocess.run([sys.executable, "-c", EXPORT, name, tmp_path], cwd=ROOT, check=True, timeout=800)
    for precision in ("fp32", "fp16"):
        open_onnx_session(tmp_path / f"{precision}.onnx", device="cuda:0").close()
    options = [session.get_provider_options()[CUDA] for session in sessions]
    assert [(chosen["use_tf32"], chosen["prefer_nhwc"]) for chosen in options] == [("0", "0"), ("0", "1")]
    placed = [session.get_provider_graph_assignment_info() for session in sessions]
    assert {part.ep_name for parts in placed for part in parts} == {CUDA}
    fp16 = Counter(node.op_type for part in placed[1] for node in part.get_nodes())
    assert fp16["Transpose"] == 1, "the images' own"
