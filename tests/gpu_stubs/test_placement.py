"""Where ONNX Runtime places the nodes of exported networks: every one on the GPU, with few transpositions."""

import subprocess
import sys
from collections import Counter

import onnxruntime
import pytest

from opal_deploy.errors import UsageError
from opal_deploy.runtime.cuda_options import CudaOptions
from opal_deploy.runtime.cuda_session import open_onnx_session
from opal_deploy.runtime.onnx_session import CUDA
from tests.gpu_stubs.conftest import ROOT

# the paper's backbones and ten of timm's with other blocks: transpositions of the fp16 file in NCHW and in NHWC, the
# images' own included
TRANSPOSITIONS = {
    "resnet50": (1, 1), "resnet101": (1, 1), "resnet152": (1, 1),
    "efficientnet_v2_s": (1, 1), "efficientnet_v2_m": (1, 1), "efficientnet_v2_l": (1, 1),
    "convnext_tiny": (43, 1), "convnext_small": (79, 1), "convnext_base": (79, 1),
    "timm:convnextv2_atto": (33, 1), "timm:densenet121": (1, 1), "timm:efficientnet_b0": (1, 1),
    "timm:ghostnet_100": (1, 1), "timm:mobilenetv3_small_050": (1, 1), "timm:mobilenetv4_conv_small": (1, 1),
    "timm:regnety_004": (1, 1), "timm:repvgg_a0": (1, 1), "timm:resnet50d": (1, 1), "timm:seresnet50": (1, 1),
}  # fmt: skip
# PyTorch would load the real libraries of CUDA into this process
EXPORT = """
import sys
from pathlib import Path
import torch
from opal_deploy.bench.networks import build_random_network, write_onnx
from opal_deploy.model.neighbours import Neighbours
network = build_random_network(sys.argv[1], 10, (64, 64))
plain = network.checkpoint.network
plain.neighbours = Neighbours.fit(torch.rand(20, plain.backbone.num_features), torch.arange(20) % 10)
for precision in ("fp32", "fp16"):
    write_onnx(network, precision, Path(sys.argv[2], f"{precision}.onnx"))
"""


@pytest.fixture
def sessions(gpu, monkeypatch):
    """The sessions that ONNX Runtime makes from now on."""
    made, make = [], onnxruntime.InferenceSession

    def keep(*arguments, **options):
        made.append(make(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(onnxruntime, "InferenceSession", keep)
    return made


def count_nodes(session):
    """Return the number of nodes by provider and operator."""
    parts = session.get_provider_graph_assignment_info()
    return Counter((part.ep_name, node.op_type) for part in parts for node in part.get_nodes())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRANSPOSITIONS)
def test_all_nodes_of_a_network_are_on_the_gpu_and_nhwc_needs_one_transposition(sessions, tmp_path, name):
    subprocess.run([sys.executable, "-c", EXPORT, name, tmp_path], cwd=ROOT, check=True, timeout=800)
    files = [("fp32", CudaOptions()), ("fp16", CudaOptions(prefer_nhwc=False)), ("fp16", CudaOptions())]
    for precision, options in files:
        # files of random weights have no test vectors, which other options are checked with
        path = tmp_path / f"{precision}.onnx"
        open_onnx_session(path, device="cuda:0", check_digest=False, cuda_options=options).close()
    counted = [count_nodes(session) for session in sessions]
    assert [key for count in counted for key in count if key[0] != CUDA] == []
    assert tuple(count[CUDA, "Transpose"] for count in counted[1:]) == TRANSPOSITIONS[name]


def test_a_graph_with_a_node_on_the_cpu_has_no_cuda_graph(gpu, shape_model):
    open_onnx_session(shape_model, device="cuda:0").close()
    with pytest.raises(UsageError, match=r"enable_cuda_graph=1 .* computes Cast, Squeeze on the CPU; export it again"):
        open_onnx_session(shape_model, device="cuda:0", cuda_options=CudaOptions(enable_cuda_graph=True))
