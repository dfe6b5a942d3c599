"""Fine-tune a ResNet-18 in plain PyTorch, and measure the evidence of an exported model: the two steps of a table.

    python tools/classifier_slots.py train DATA WEIGHTS.safetensors CLASSIFIER.pt EPOCHS
    opal-deploy export CLASSIFIER.pt --arch torchvision:resnet18 --classes CLASSIFIER.txt --preprocess stretch ..
        --slots DATA --out MODEL.onnx (birds: --crop boxes)
    python tools/classifier_slots.py measure DATA MODEL

The second prints what `opal-deploy evaluate DATA --split test` does, with consistency and stability, which it measures
of checkpoints only: here the maps of the slots are taken from the ONNX graph.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from opal_deploy.artifact.files import model_kind
from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.datasets.registry import read_dataset
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.inputs import read_inputs
from opal_deploy.evaluation.interventions import measure_interventions
from opal_deploy.evaluation.pointing import play_pointing_game
from opal_deploy.evaluation.session import evaluate_session
from opal_deploy.export.graph_edit import producers, with_outputs
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.select import open_sessions
from opal_deploy.runtime.session import ImageBatch, Session
from opal_deploy.synthetic import read_annotations


class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """A data set's training images, cropped to their boxes, where it has any."""

    def __init__(self, root: Path) -> None:
        """List them."""
        data = read_dataset(root, needs_validation=lambda _: False)
        self.samples, self.class_names = data.train, data.class_names
        self.transform = transforms.Compose([
            transforms.RandomResizedCrop(224, scale=(0.4, 1)), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ])  # fmt: skip

    def __len__(self) -> int:
        """Return their number."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return one with its class."""
        sample = self.samples[index]
        image = Image.open(sample.path).convert("RGB")
        return self.transform(image if sample.box is None else image.crop(tuple(map(int, sample.box)))), sample.label


def train(root: Path, weights: Path, out: Path, epochs: int) -> None:
    """Fine-tune all layers with AdamW and one cycle of the learning rate, and save the state dict and class names."""
    torch.manual_seed(0)
    data = Photographs(root)
    network = torchvision.models.resnet18(weights=None)
    network.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    network.fc = torch.nn.Linear(512, len(data.class_names))
    batches = DataLoader(data, 32, shuffle=True)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=epochs * len(batches))
    for _ in range(epochs):
        for images, labels in batches:
            loss = torch.nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    torch.save(network.state_dict(), out)
    out.with_suffix(".txt").write_text("\n".join(data.class_names))


class MapSession(OnnxSession):
    """A file's session that also returns the maps in which its graph finds the slots' cells."""

    def __init__(self, path: Path) -> None:
        """Open the file, and its graph up to the maps."""
        super().__init__(path, device="cpu")
        model = onnx.load(path)
        node = producers(model.graph)["argmax"]
        self._maps = producers(model.graph)[node.input[0]].input[0]
        changed = with_outputs(model, [*self.metadata.outputs, self._maps])
        self._runner: Any = onnxruntime.InferenceSession(changed.SerializeToString())

    def run_with_attention(self, images: ImageBatch) -> Outputs:
        """Return outputs with maps for images uint8 [n, H0, W0, 3]."""
        return self.run_normalised(normalise(np.asarray(images), self.metadata.mean, self.metadata.std))

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Return the same for normalised images, float32 [n, 3, H0, W0]."""
        names = [*self.metadata.outputs, self._maps]
        arrays = dict(zip(names, self._runner.run(names, {"images": images}), strict=True))
        maps = arrays.pop(self._maps)
        return Outputs.from_arrays({**arrays, "attention": maps.reshape(*maps.shape[:2], *self.metadata.grid)})


def measure(root: Path, path: Path) -> None:
    """Print accuracy, consistency, stability and purity, pointing, and for creatures interventions."""
    session: Session = MapSession(path) if model_kind(path) == "onnx" else open_sessions(path, device="cpu")[0]
    options = EvaluateOptions(split="test", limit=60)
    inputs = read_inputs(root, path, session.metadata, options)
    result = evaluate_session(session, inputs.samples, parts=inputs.annotations.located)
    print(f"accuracy {result.metrics.accuracy:.1%}", result.parts, sep="\n")
    game = play_pointing_game(result, inputs.annotations, session.metadata)
    print(*(game.describe() if game else ["pointing game: no correctly classified image has an annotation"]), sep="\n")
    if (root / "parts.jsonl").is_file():
        first = read_annotations(root)[0]
        print(*measure_interventions(session, (first.height, first.width), options).describe(), sep="\n")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(*map(Path, sys.argv[2:5]), int(sys.argv[5]))
    else:
        measure(Path(sys.argv[2]), Path(sys.argv[3]))
