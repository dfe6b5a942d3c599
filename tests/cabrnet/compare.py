"""Compare exported PIP-Net and ProtoPNet files with CaBRNet itself: `make test-cabrnet` (7 minutes).

CaBRNet builds each network with a ResNet-18 of ImageNet weights; two epochs on photographs of birds train it, with
CaBRNet's modules and cross-entropy alone, which is enough for weights and scores as in use. Exits with 1 where a logit
differs by more than 1e-5 of the largest one, or a cell that is not tied.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from cabrnet.archs.generic.model import CaBRNet
from loguru import logger
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import opal_deploy
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.onnx_session import OnnxSession

DATA = Path(__file__).parents[2].parent / "shared/data"
BIRDS, WEIGHTS = DATA / "cub_mini", DATA / "weights/resnet18_ktb_small.safetensors"
SIDE, CLASSES, EPOCHS, BATCH = 224, 10, 2, 16
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ADD_ON = {
    "init_mode": "PROTOPNET",
    "conv1": {"type": "Conv2d", "params": {"out_channels": 64, "kernel_size": 1}},
    "relu1": {"type": "ReLU"},
    "conv2": {"type": "Conv2d", "params": {"out_channels": 64, "kernel_size": 1}},
    "sigmoid1": {"type": "Sigmoid"},
}
VECTORS = {"num_features": 64, "num_proto_per_class": 10, "proto_init_mode": "UNIFORM"}
# settings of the classifier and of the extracted layer, and the similarity
NETWORKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "PIPNet": ({}, {}, "None"),
    "ProtoPNet": (VECTORS, {"add_on": ADD_ON}, "ProtoPNetSimilarity"),
}


def build(name: str, folder: Path, postprocess: dict[str, Any] | None = None, num_classes: int = CLASSES) -> Any:
    """Return CaBRNet's network, after writing its architecture; with other strides if `postprocess` has them."""
    settings, layer, similarity = NETWORKS[name]
    backbone = {} if postprocess is None else {"postprocess": postprocess}
    module = f"cabrnet.archs.{name.lower()}"
    params = {"num_classes": num_classes, **settings}
    document = {
        "extractor": {
            "backbone": {"arch": "resnet18", "weights": "None", **backbone},
            "convnet": {"source_layer": "layer4", **layer},
        },
        "classifier": {"module": f"{module}.decision", "name": f"{name}Classifier", "params": params},
        "top_arch": {"module": f"{module}.model", "name": name},
        "similarity": {"name": similarity},
    }
    path = folder / "model_arch.yml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    network = CaBRNet.build_from_config(str(path))
    weights = {key: value.float() for key, value in load_file(WEIGHTS).items()}
    network.extractor.convnet.load_state_dict(weights, strict=False)
    return network


def read(split: str) -> tuple[np.ndarray, torch.Tensor]:
    """Return the photographs of a split, uint8 [N, 224, 224, 3], and their classes."""
    marks = dict(line.split() for line in (BIRDS / "train_test_split.txt").read_text().splitlines())
    rows = [line.split() for line in (BIRDS / "images.txt").read_text().splitlines()]
    names = [name for number, name in rows if marks.get(number) == split and (BIRDS / "images" / name).is_file()]
    images = [Image.open(BIRDS / "images" / name).convert("RGB") for name in names]
    pixels = [np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for image in images]
    return np.stack(pixels), torch.tensor([int(name.split(".")[0]) - 1 for name in names])


def train(network: Any, name: str, pixels: np.ndarray, labels: torch.Tensor, epochs: int = EPOCHS) -> None:
    """Train all layers with cross-entropy; PIP-Net's logits as its own loss takes them."""
    groups = ((network.extractor, 1e-4), (network.classifier, 3e-3))
    optimizer = torch.optim.Adam([{"params": part.parameters(), "lr": rate} for part, rate in groups])
    network.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            logits, _ = answer(network, name, pixels[rows.numpy()])
            loss = nn.functional.cross_entropy(torch.log1p(logits**2) if name == "PIPNet" else logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()


def answer(network: Any, name: str, pixels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CaBRNet's logits and its map, of which the largest cell counts, [N, P, cells]."""
    features = network.extractor(torch.from_numpy(normalise(pixels, MEAN, STD)))
    if name == "PIPNet":
        cells, _, logits = network.classifier(features)
    else:
        logits, _ = network.classifier(features)
        cells = -network.classifier.distances(features)
    return logits, cells.flatten(2)


def compare(name: str, folder: Path) -> bool:
    """Print how an exported network differs from CaBRNet's, and return whether that is little."""
    torch.manual_seed(0)
    network = build(name, folder)
    train(network, name, *read("1"))
    torch.save(network.state_dict(), folder / "model_state.pth")
    opal_deploy.export_model(
        folder / "model_state.pth", arch=str(folder / "model_arch.yml"), images=BIRDS / "images", log=lambda text: None
    )
    session = OnnxSession(folder / "model_state.onnx", device="cpu")
    pixels, labels = read("0")
    different, ties, furthest, largest, right = 0, 0, 0.0, 0.0, 0
    for start in range(0, len(pixels), BATCH):
        outputs = session.run(pixels[start : start + BATCH])
        with torch.no_grad():
            logits, cells = answer(network, name, pixels[start : start + BATCH])
        best = cells.topk(2, 2)
        lead = (best.values[..., 0] - best.values[..., 1]) / best.values[..., 0].abs().clamp_min(1e-3)
        tied = (lead < 1e-4).numpy()
        ties += int(tied.sum())
        different += int(((outputs.argmax != best.indices[..., 0].numpy()) & ~tied).sum())
        furthest = max(furthest, float(np.abs(outputs.logits - logits.numpy()).max()))
        largest = max(largest, float(logits.abs().max()))
        right += int((outputs.logits.argmax(1) == labels[start : start + BATCH].numpy()).sum())
    count = len(pixels) * session.metadata.num_prototypes - ties
    print(
        f"{name}: {len(pixels)} photographs, accuracy {right / len(pixels):.1%}; largest difference of a logit "
        f"{furthest:.2g} of {largest:.3g}; {different} of {count:,} cells differ, {ties} ties left out"
    )
    return different == 0 and furthest <= 1e-5 * largest


def main() -> None:
    """Compare all networks."""
    logger.remove()
    passed = []
    for name in NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            passed.append(compare(name, Path(folder)))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
