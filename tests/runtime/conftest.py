"""A tiny network as a checkpoint and as the files exported from it; another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.onnx_source import OnnxSource
from opal_deploy.export.options import ExportOptions, ExportTargets
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork


class _TinyBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 7, stride=8, padding=3)
        self.second = nn.Conv2d(12, 24, 5, stride=4, padding=2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"features": torch.relu(self.second(torch.relu(self.first(images))))}


@dataclass(frozen=True)
class Pair:
    """One network as a checkpoint and as the file that was exported from it."""

    checkpoint: Checkpoint
    path: Path


def _tiny_checkpoint(seed: int = 0) -> Checkpoint:
    torch.manual_seed(seed)
    network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 4, (64, 96)))
    network.backbone = Backbone("tiny", _TinyBody(), 24, 32)
    network.head = OpalHead(24, 4, network.config.head)
    assert isinstance(network.head.projection, nn.Conv2d)
    with torch.no_grad():
        network.head.projection.weight.mul_(10)
    source = {"file": f"c{seed}.pt", "sha256": f"{seed:064x}", "format": "opal-deploy"}
    return Checkpoint(network.eval(), ["a", "b", "c", "d"], source=source)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    checkpoint, out = _tiny_checkpoint(), tmp_path_factory.mktemp("tiny") / "c.onnx"
    export(CheckpointSource(checkpoint, out), ExportTargets({"fp32": out}), ExportOptions(threads=2))
    return Pair(checkpoint, out)


@pytest.fixture(scope="session")
def tiny_fp16(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny16") / "c.fp16.onnx"
    export(OnnxSource(tiny.path), ExportTargets({"fp16": out}), ExportOptions(threads=2))
    return out


@pytest.fixture(scope="session")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("another") / "other.onnx"
    export(CheckpointSource(_tiny_checkpoint(1), out), ExportTargets({"fp32": out}), ExportOptions(threads=2))
    return out
