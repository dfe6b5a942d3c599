"""The same model in a plain script: one process, Pillow, torchvision's transforms, PyTorch eager.

As in the paper authors' evaluation: open, convert to RGB, resize, ToTensor, Normalize, stack to a batch; then the
forward pass with each channel's argmax cell, and read the predictions. Nothing overlaps, and nothing is written.
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
    """A checkpoint in PyTorch eager, with torchvision's transform of its images."""

    def __init__(self, path: Path, device: str, threads: int | None) -> None:
        """Load a checkpoint.

        Args:
            path: the checkpoint that the measured model was exported from.
            device: PyTorch's name.
            threads: PyTorch's threads in this process; None leaves their number.

        Raises:
            CheckpointError: not a checkpoint.
        """
        self._path = path
        checkpoint = checkpoints.load(path)
        self._network = checkpoint.network.to(device).eval()
        self._device = device
        self.threads = threads
        metadata = checkpoints.build_metadata(checkpoint)
        self._transform = transforms.Compose(
            [
                transforms.Resize(metadata.input_size),
                transforms.ToTensor(),
                transforms.Normalize(metadata.mean, metadata.std),
            ]
        )

    def check_source(self, exported: Metadata) -> None:
        """Check that a model was exported from this checkpoint.

        Raises:
            UsageError: its metadata names another file.
        """
        sha256 = exported.source.get("sha256")
        if sha256 is not None and sha256 != compute_sha256(self._path):
            raise UsageError(
                f"--plain {self._path}: the model was exported from another checkpoint, {exported.source.get('file')} "
                f"with sha256 {sha256[:12]}...; give that one"
            )

    def measure(self, items: Sequence[Item], batch: int) -> Pass:
        """Time one pass over the images that Pillow can read.

        Raises:
            UsageError: there are none.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        images = 0
        cpu, started = time.process_time(), time.perf_counter()
        for first in range(0, len(items), batch):
            tensors = []
            for item in items[first : first + batch]:
                try:
                    with Image.open(Path(str(item.path))) as image:
                        tensors.append(self._transform(image.convert("RGB")))
                except Exception:  # Pillow raises many classes; a script would skip the image too
                    continue
            if tensors:
                images += len(self._predict(torch.stack(tensors)))
        if not images:
            raise UsageError("--plain: Pillow can read none of the images")
        return Pass(images, time.perf_counter() - started, time.process_time() - cpu)

    def _predict(self, images: torch.Tensor) -> list[int]:
        with torch.inference_mode():
            outputs = self._network.explain(images.to(self._device))
        if outputs.argmax is not None:
            outputs.argmax.cpu()
        classes: list[int] = outputs.logits.argmax(1).tolist()
        return classes
