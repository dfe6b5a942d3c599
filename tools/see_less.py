"""Train a network whose later convolutions see less, to compare it with `train --adversarial`.

    python tools/see_less.py DATA best.pt less.pt --layers layer3.1 layer3.0.conv2 --seed 1
    opal-deploy evaluate DATA --model less.pt --attack-outside --limit 40

The 3x3 convolutions of these layers keep their middle weights only, as in BagNets (Brendel and Bethge, ICLR 2019), and
are trained on: 12 epochs of Adam, batches of 16, at 2e-4 with warm-up and cosine. The result is an ordinary checkpoint.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from opal_deploy.datasets.registry import read_dataset
from opal_deploy.model import checkpoint
from opal_deploy.nn import save_checkpoint
from opal_deploy.train.augmentation import PaperAugmentation
from opal_deploy.train.images import Batches, TrainImages, normalize
from opal_deploy.train.losses import DROP, NetworkTerms, find_logit_scale

EPOCHS, BATCH, RATE = 12, 16, 2e-4


def find_kernels(body: nn.Module, layers: list[str]) -> list[nn.Parameter]:
    """Return the weights of the 3x3 convolutions in some layers of a backbone."""
    found = [
        module.weight
        for name, module in body.named_modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)
        if any(f"{name}.".startswith(f"{layer}.") for layer in layers)
    ]
    if not found:
        raise SystemExit(f"no 3x3 convolution in {', '.join(layers)}")
    return found


def keep_middle(kernels: list[nn.Parameter]) -> None:
    """Set all weights but those of the middle cell to 0."""
    for kernel in kernels:
        middle = kernel.data[:, :, 1, 1].clone()
        kernel.data.zero_()[:, :, 1, 1] = middle


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("start", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", nargs="+", required=True)
    parser.add_argument("--adversarial", type=float, default=0.0, help="as in train")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    loaded = checkpoint.load(arguments.start)
    network, config = loaded.network, loaded.network.config
    kernels = find_kernels(network.backbone.body, arguments.layers)
    keep_middle(kernels)
    images = TrainImages(
        read_dataset(arguments.data, needs_validation=True).train, config.input_size,
        augmentation=PaperAugmentation(config.input_size), seed=arguments.seed,
    )  # fmt: skip
    batches = Batches(images, BATCH, shuffle_seed=arguments.seed, workers=0)
    terms = NetworkTerms(network, adversarial=arguments.adversarial > 0)
    scale = find_logit_scale(network.head, 0.9)
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    steps = EPOCHS * math.ceil(len(images) / BATCH)

    def rate_at(step: int) -> float:
        return min(10 * step / steps, 1.0) * (1 + math.cos(math.pi * step / steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    for epoch in range(1, EPOCHS + 1):
        batches.epoch = epoch
        network.train()
        for pixels, labels in batches:
            found = terms(normalize(pixels[..., :3], config.mean, config.std), labels, None)
            loss = functional.cross_entropy(scale * found.logits, labels)
            if arguments.adversarial:
                changed = functional.cross_entropy(scale * found.changed, labels)
                loss = loss + arguments.adversarial * (changed + DROP * found.drop.mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            keep_middle(kernels)
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    save_checkpoint(network.eval(), loaded.class_names, arguments.out)


if __name__ == "__main__":
    main()
