"""A session on a checkpoint in PyTorch: the reference that every other session is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import FloatArray, Outputs
from opal_deploy.artifact.test_vectors import Reference
from opal_deploy.errors import OutOfMemory, StoppedEarly, UsageError, first_line
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
            source: a file, or a loaded checkpoint.
            device: `cpu`, `cuda`, `cuda:1`, or `auto`.
            threads: of PyTorch in this process; None leaves their number.

        Raises:
            CheckpointError: not a checkpoint.
            UsageError: the requested GPU is not there.
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
        """Run with convolutions that sum in another order; the difference from `run` is float32's rounding."""
        self._network.to(memory_format=torch.channels_last)
        try:
            return self.run(images)
        finally:
            self._network.to(memory_format=torch.contiguous_format)

    def run_reference(self, images: ImageBatch) -> Reference:
        """Return the outputs together with the relative lead of each channel's best cell over its second."""
        check_batch(images, self.metadata)
        tensors = self._explain(normalise(images, self.metadata.mean, self.metadata.std))
        top2_margin = None if tensors.attention is None else _top2_margin(tensors.attention)
        return Reference(images, to_outputs(tensors), top2_margin)

    def run_normalised(self, images: FloatArray) -> Outputs:
        """Run float32 [N, 3, H0, W0], already normalised; the outputs hold the attention maps too."""
        return to_outputs(self._explain(images), attention=True)

    def run_with_attention(self, images: ImageBatch) -> Outputs:
        """See `AttentionSession.run_with_attention`."""
        return self.run_normalised(normalise(images, self.metadata.mean, self.metadata.std))

    def _explain(self, images: FloatArray) -> HeadOutputs:
        try:
            with torch.inference_mode():
                return self._network.explain(torch.from_numpy(images).to(self._device))
        except RuntimeError as error:
            raise _translate_error(error, len(images)) from None


def _translate_error(error: RuntimeError, batch: int) -> Exception:
    """Return OutOfMemory or StoppedEarly for a full memory or a lost device; every other error is a bug of ours."""
    line = first_line(error)
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in line:
        return OutOfMemory(f"PyTorch failed on a batch of {batch} ({line}); use a smaller --batch")
    if "CUDA error" in line:
        return StoppedEarly(f"PyTorch failed on a batch of {batch} ({line}); see `opal-deploy doctor`")
    return error


def to_outputs(tensors: HeadOutputs, *, attention: bool = False) -> Outputs:
    """Copy the network's tensors to arrays on the host, the large attention maps on request."""
    if tensors.scores is None or tensors.argmax is None or tensors.attention is None:
        return Outputs(_numpy(tensors.logits))
    cells = tensors.argmax.cpu().numpy().astype(np.int32)
    maps = _numpy(tensors.attention) if attention else None
    return Outputs(_numpy(tensors.logits), cells, _numpy(tensors.scores), maps)


def _top2_margin(attention: torch.Tensor) -> FloatArray:
    """Return [N, K]: (best - second) / best over the cells of each channel; infinite for a single cell."""
    cells = attention.flatten(2)
    if cells.shape[2] < 2:
        return np.full(cells.shape[:2], np.inf, np.float32)
    best = cells.topk(2, dim=2).values  # [N, K, 2]
    return _numpy((best[..., 0] - best[..., 1]) / best[..., 0].abs().clamp_min(1e-30))


def _numpy(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.float().cpu().numpy()
    return array


def torch_device(name: str) -> torch.device:
    """Return PyTorch's device for `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        UsageError: anything else, or a GPU that is not there.
    """
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
