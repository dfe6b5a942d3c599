"""Multiply-accumulates of convolutions and matrix products, counted on real modules and tensors without memory."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from opal_deploy.model import backbones


def count_macs(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Of one input through a module whose parameters live on `meta`.

    Bias, normalisation, activation and pooling are not multiply-accumulates and count nothing. PyTorch's own counter
    counts floating-point operations, two for each.

    Args:
        module: in evaluation mode.
        input_shape: without the batch.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        module(torch.empty(1, *input_shape, device="meta"))
    return int(counter.get_total_flops()) // 2


@cache
def backbone_macs(name: str, input_size: tuple[int, int]) -> int:
    """Of one picture through a backbone, cut before its pooling.

    Raises:
        UsageError: no such backbone.
    """
    return count_macs(backbones.build(name, device="meta").eval(), (3, *input_size))
