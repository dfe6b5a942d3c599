"""One real export of a tiny network, for everything that reads files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from opal_deploy.export.candidate import ExportOptions
from opal_deploy.export.checkpoint_export import export_checkpoint
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


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = OpalNetwork(NetworkConfig("shufflenet_v2_x0_5", 4, (64, 96)))
    network.backbone = Backbone("tiny", _TinyBody(), 24, 32)
    network.head = OpalHead(24, 4, network.config.head)
    source = {"file": "c.pt", "sha256": "1" * 64, "format": "opal-deploy"}
    names = ["Sooty Albatross", 'a "file_sha256": "' + "0" * 64, "Äuklet \u2603", "<b>"]
    out = tmp_path_factory.mktemp("exported") / "c.onnx"
    checkpoint = Checkpoint(network.eval(), names, source=source)
    return export_checkpoint(checkpoint, out, ExportOptions(out=out, threads=2)).path
