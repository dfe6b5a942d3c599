"""Everything that a run depends on besides its pictures. Plain data: importing this module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig

Augment = Literal["paper", "none"]
# of the convolutions while training; `auto`: bfloat16 or float16 on a GPU, float32 on a CPU
TrainingPrecision = Literal["auto", "fp32", "bf16", "fp16"]

# may differ between a run and its continuation: they do not change what is computed, only where and how fast
FREE_TO_CHANGE = ("epochs", "device", "workers", "compile", "cache_megabytes", "save_every", "tensorboard")


@dataclass(frozen=True)
class Options:
    """The defaults are the paper's protocol (Sec. 4.1 and Supp. B.2).

    Attributes:
        backbone: torchvision's name.
        head: see HeadConfig.
        weights: the backbone's, a file or a name of torchvision's; None leaves them random.
        epochs, batch_size, lr: of Adam, fixed. The batch is the global one, whatever the number of processes.
        input_size: (H0, W0) in pixels.
        augment: `paper` or `none`.
        seed: of weights, order and augmentation.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        precision: of the convolutions, see TrainingPrecision.
        tf32: allow TF32 in float32 arithmetic on the GPU.
        compile: run the training step through torch.compile.
        workers: processes that prepare pictures; None chooses, see `setup.default_workers`.
        cache_megabytes: squashed pictures are kept in memory up to this much; 0 decodes them in every epoch.
        save_every: write last.pt every so many steps too, not only after each epoch; 0 does not.
        tensorboard: log each epoch's figures for TensorBoard.
    """

    backbone: str = "convnext_tiny"
    head: HeadConfig = field(default_factory=HeadConfig)
    weights: str | None = None
    epochs: int = 30
    batch_size: int = 64
    lr: float = 1e-4
    input_size: tuple[int, int] = (224, 224)
    augment: Augment = "paper"
    seed: int = 0
    device: str = "auto"
    precision: TrainingPrecision = "auto"
    tf32: bool = False
    compile: bool = False
    workers: int | None = None
    cache_megabytes: int = 1024
    save_every: int = 0
    tensorboard: bool = False

    def check(self) -> None:
        """Raise UsageError for numbers that no run can have."""
        if self.epochs < 1 or self.batch_size < 1 or not self.lr > 0 or not math.isfinite(self.lr):
            raise UsageError("epochs and batch size must be at least 1 and the learning rate a number above 0")
        if self.seed >= 1 << 63 or not math.isfinite(self.head.epsilon):
            raise UsageError("the seed must be below 2^63, and the head's epsilon a number")
        if self.save_every < 0 or self.cache_megabytes < 0 or (self.workers or 0) < 0 or self.seed < 0:
            raise UsageError("save_every, cache_megabytes, workers and seed must not be negative")
        if self.augment not in get_args(Augment):
            raise UsageError(f"augment {self.augment!r}: expected one of {', '.join(get_args(Augment))}")
        if self.precision not in get_args(TrainingPrecision):
            raise UsageError(f"precision {self.precision!r}: expected one of {', '.join(get_args(TrainingPrecision))}")
