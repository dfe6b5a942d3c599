"""The same model as a research script runs it: one process, one picture after the other through Pillow, PyTorch eager.

As the paper's authors evaluate: open, RGB, squashed, ToTensor, Normalize, stacked to a batch; then the forward pass
with each channel's argmax cell, and the answers read off. No overlap, no records, nothing written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torchvision import transforms

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.bench.pipeline.bottleneck import Pass
from opal_deploy.errors import UsageError
from opal_deploy.inference.sources.items import Item
from opal_deploy.model import checkpoint as checkpoints


class EagerBaseline:
    """A checkpoint, and the transform of its pictures."""

    def __init__(self, path: Path, device: str, threads: int | None) -> None:
        """Load it.

        Args:
            path: of the checkpoint that the measured model was exported from. device: as PyTorch calls it.
            threads: of PyTorch in this process; None leaves them.

        Raises:
            CheckpointError: not a checkpoint.
        """
        self._path = path
        loaded = checkpoints.load(path)
        self._network = loaded.network.to(device).eval()
        self._device = device
        self.threads = threads
        about = checkpoints.build_metadata(loaded)
        self._transform = transforms.Compose(
            [
                transforms.Resize(about.input_size),
                transforms.ToTensor(),
                transforms.Normalize(about.mean, about.std),
            ]
        )

    def check_same(self, exported: Metadata) -> None:
        """That a model was exported from this checkpoint.

        Raises:
            UsageError: it says that it was not.
        """
        said = exported.source.get("sha256")
        if said is not None and said != compute_sha256(self._path):
            raise UsageError(
                f"--plain {self._path}: the model was exported from another file, {exported.source.get('file')} of "
                f"sha256 {said[:12]}...; give its checkpoint"
            )

    def measure(self, items: Sequence[Item], batch: int) -> Pass:
        """One pass over the pictures that Pillow can read.

        Raises:
            UsageError: there are none.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        answered = 0
        cpu, started = time.process_time(), time.perf_counter()
        for first in range(0, len(items), batch):
            tensors = []
            for item in items[first : first + batch]:
                try:
                    with Image.open(item.path) as image:
                        tensors.append(self._transform(image.convert("RGB")))
                except Exception:  # Pillow raises nearly anything; a script would leave it out too
                    continue
            if tensors:
                answered += len(self._answer(torch.stack(tensors)))
        if not answered:
            raise UsageError("no picture that Pillow can read from a path")
        return Pass(answered, time.perf_counter() - started, time.process_time() - cpu)

    def _answer(self, images: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            found = self._network.explain(images.to(self._device))
        if found.argmax is not None:
            found.argmax.cpu()
        classes: list[int] = found.logits.argmax(1).tolist()
        return classes
