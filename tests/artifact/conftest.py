"""One real export of a tiny network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.options import ExportOptions, ExportTargets
from opal_deploy.model.backbones import Backbone
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.config import NetworkConfig
from opal_deploy.model.head import OpalHead
from opal_deploy.model.network import OpalNetwork

# the second spells the marker that the digest is found by
CLASS_NAMES = ["Sooty Albatross", 'a "file_sha256": "' + "0" * 64, "Äuklet \u2603", "<b>"]


class _TinyBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 7, stride=8, padding=3)
        self.second = nn.Conv2d(12, 24, 5, stride=4, padding=2)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"features": torch.relu(self.second(torch.relu(self.first(images))))}


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 4, (64, 96)))
    network.backbone = Backbone("tiny", _TinyBody(), 24, 32)
    network.head = OpalHead(24, 4, network.config.head)
    source = {"file": "c.pt", "sha256": "1" * 64, "format": "opal-deploy"}
    out = tmp_path_factory.mktemp("exported") / "c.onnx"
    checkpoint = Checkpoint(network.eval(), CLASS_NAMES, source=source)
    export(CheckpointSource(checkpoint, out), ExportTargets({"fp32": out}), ExportOptions(threads=2))
    return out
