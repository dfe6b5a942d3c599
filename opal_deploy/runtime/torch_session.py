"""PyTorch, the reference that every other session is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError
from opal_deploy.model import checkpoint as checkpoints
from opal_deploy.model.checkpoint import Checkpoint
from opal_deploy.model.head import HeadOutputs
from opal_deploy.preprocess.resize import normalise
from opal_deploy.runtime.session import ImageBatch, check_batch


class TorchSession:
    """A checkpoint in PyTorch, float32, TF32 off.

    Attributes:
        metadata: of the checkpoint.
        description: engine, device, threads, precision.
    """

    def __init__(self, source: Path | Checkpoint, *, device: str = "auto", threads: int | None = None) -> None:
        """Load a checkpoint.

        Args:
            source: a file, or a checkpoint already loaded.
            device: `cpu`, `cuda`, `cuda:1`, or `auto`.
            threads: of PyTorch in this process; None leaves them.

        Raises:
            CheckpointError: not a checkpoint. UsageError: a GPU was asked for and there is none.
        """
        checkpoint = source if isinstance(source, Checkpoint) else checkpoints.load(source)
        self.metadata: Metadata = checkpoints.build_metadata(checkpoint)
        self._device = torch_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self._network = checkpoint.network.to(self._device).eval()
        note = f", {torch.get_num_threads()} threads" if self._device.type == "cpu" else ""
        self.description = f"PyTorch {torch.__version__} on {self._device}{note}, fp32"

    def run(self, images: ImageBatch) -> Outputs:
        """See `Session.run`."""
        return self.run_reference(images).outputs

    def run_channels_last(self, images: ImageBatch) -> Outputs:
        """The same answers from convolutions that sum in another order: what float32 leaves open."""
        self._network.to(memory_format=torch.channels_last)
        try:
            return self.run(images)
        finally:
            self._network.to(memory_format=torch.contiguous_format)

    def run_reference(self, images: ImageBatch) -> Reference:
        """Outputs together with each channel's lead of its best cell over its second."""
        check_batch(images, self.metadata)
        found = self._explain(normalise(images, self.metadata.mean, self.metadata.std))
        return Reference(images, to_outputs(found), None if found.attention is None else _gap(found.attention))

    def run_normalised(self, images: FloatArray) -> Outputs:
        """`run` for float32 [N, 3, H0, W0], already normalised, and with the attention maps."""
        return to_outputs(self._explain(images), attention=True)

    def run_with_attention(self, images: ImageBatch) -> Outputs:
        """See `AttentionSession.run_with_attention`."""
        return self.run_normalised(normalise(images, self.metadata.mean, self.metadata.std))

    def _explain(self, images: FloatArray) -> HeadOutputs:
        try:
            with torch.inference_mode():
                return self._network.explain(torch.from_numpy(images).to(self._device))
        except RuntimeError as error:
            raise _named(error, len(images)) from None


def _named(error: RuntimeError, batch: int) -> Exception:
    """A full memory or a lost device in our words; what else PyTorch raises is our bug, and stays what it is."""
    line = " ".join(str(error).split())[:200]
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in line:
        return OutOfMemory(f"PyTorch failed on a batch of {batch} ({line}); use a smaller --batch")
    if "CUDA error" in line:
        return StoppedEarly(f"PyTorch failed on a batch of {batch} ({line}); see `opal-deploy doctor`")
    return error


def to_outputs(found: HeadOutputs, *, attention: bool = False) -> Outputs:
    """The network's tensors as arrays on the host, the large attention maps on request."""
    if found.scores is None or found.argmax is None or found.attention is None:
        return Outputs(_numpy(found.logits))
    cells = found.argmax.cpu().numpy().astype(np.int32)
    maps = _numpy(found.attention) if attention else None
    return Outputs(_numpy(found.logits), cells, _numpy(found.scores), maps)


def _gap(attention: torch.Tensor) -> FloatArray:
    cells = attention.flatten(2)
    if cells.shape[2] < 2:
        return np.full(cells.shape[:2], np.inf, np.float32)
    best = cells.topk(2, dim=2).values  # [N, K, 2]
    return _numpy((best[..., 0] - best[..., 1]) / best[..., 0].abs().clamp_min(1e-30))


def _numpy(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array


def torch_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises UsageError: anything else, or a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device {name}: PyTorch sees no CUDA GPU; see `opal-deploy doctor`, or use --device cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {name}: PyTorch sees {torch.cuda.device_count()} CUDA GPUs, counted from 0")
    return device
