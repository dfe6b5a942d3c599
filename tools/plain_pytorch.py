"""Answer photographs with a plain PyTorch loop: the baseline of the speed of `infer` in docs/reference/runtimes.md.

    python tools/plain_pytorch.py ckpt.pt images/ out.jsonl

One worker process decodes, the network runs in batches of 16, and each answer is a JSON line. Prints images per second,
the model's loading left out.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader
from torchvision.transforms.v2 import Compose, Normalize, Resize, ToDtype, ToImage

from opal_deploy.model import checkpoint as checkpoints

_BATCH, _WORKERS = 16, 1


class Photographs(torch.utils.data.Dataset[tuple[str, torch.Tensor]]):
    """The photographs of a folder: path, and float32 [3, H0, W0], normalised."""

    def __init__(self, folder: Path, transform: Compose) -> None:
        """List the files."""
        self.paths = sorted(str(path) for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        self.transform = transform

    def __len__(self) -> int:
        """Return their number."""
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]:
        """Return one."""
        return self.paths[index], self.transform(default_loader(self.paths[index]))


def main(checkpoint: Path, folder: Path, out: Path) -> None:
    """Answer all photographs of a folder."""
    loaded = checkpoints.load(checkpoint)
    network = loaded.network.eval()
    metadata = checkpoints.build_metadata(loaded)
    transform = Compose([
        ToImage(), Resize(metadata.input_size), ToDtype(torch.float32, scale=True),
        Normalize(metadata.mean, metadata.std),
    ])  # fmt: skip
    data = Photographs(folder, transform)
    start = time.perf_counter()
    with out.open("w") as file, torch.inference_mode():
        for paths, images in DataLoader(data, _BATCH, num_workers=_WORKERS):
            outputs = network.explain(images)
            assert outputs.scores is not None
            assert outputs.argmax is not None
            rows = zip(paths, outputs.logits.tolist(), outputs.scores.tolist(), outputs.argmax.tolist(), strict=True)
            for path, logits, scores, cells in rows:
                best = logits.index(max(logits))
                slots = metadata.class_map.channel_table[best].tolist()
                record = {
                    "image": path, "label": metadata.class_names[best], "logit": logits[best],
                    "evidence": [{"score": scores[slot], "cell": cells[slot]} for slot in slots],
                }  # fmt: skip
                file.write(json.dumps(record) + "\n")
    print(f"{len(data) / (time.perf_counter() - start):.1f} images/s")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
