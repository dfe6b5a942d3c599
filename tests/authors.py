"""The authors' networks, module by module as in net/net_model.py of their repository."""

from collections import OrderedDict

import torch
import torchvision

from opal_deploy.model import backbones
from tests.builders import build_anchors


class AuthorsModel(torch.nn.Module):
    """Modules and forward pass of the authors' NNModel and NNModel_softmax (net/net_model.py), with random weights."""

    def __init__(
        self, name, num_classes=4, ch_last_conv=3, classifier="norm_prototypes_dist", softmax=True, pooling="max"
    ):
        torch.manual_seed(0)
        super().__init__()
        model = torchvision.models.get_model(name)
        self.backbone = model
        if name.startswith("resnet"):
            kept = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
            self.backbone = torch.nn.Sequential(OrderedDict((child, getattr(model, child)) for child in kept))
        elif name.startswith("efficientnet"):
            self.backbone = torch.nn.Sequential(OrderedDict(features=model.features))
        else:
            model.avgpool = model.classifier = model.fc = torch.nn.Identity()
        width = backbones.build(name, device="meta").num_features
        self.softmax, self.pooling, channels = softmax, pooling, num_classes * ch_last_conv or width
        self.final_conv_layer = torch.nn.Conv2d(width, channels, 1) if ch_last_conv else torch.nn.Identity()
        if classifier == "linear":
            self.classifier = torch.nn.Linear(channels, num_classes)
        else:
            self.classifier = torch.nn.Module()
            self.classifier.register_buffer("prototypes", build_anchors(num_classes, ch_last_conv))

    def forward(self, images):
        maps = self.final_conv_layer(self.backbone(images))
        cells = (maps.softmax(1) if self.softmax else maps).flatten(2)
        pooled = cells.amax(2) if self.pooling == "max" else cells.mean(2)
        z = pooled / (pooled.norm(dim=1, keepdim=True) + 1e-8)
        if isinstance(self.classifier, torch.nn.Linear):
            return self.classifier(z)
        return -torch.cdist(z, self.classifier.prototypes)
