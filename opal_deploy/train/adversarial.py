"""Adversarial training against changes outside the boxes (`--adversarial`); the exported graph stays the same.

A box shows the decisive pixels only if changes outside it have no effect. Each image is trained on twice: as it is, and
changed by a few grey levels outside the boxes of the labelled class. The change is one step along the gradient's sign
from a random start (Goodfellow et al., ICLR 2015; Wong et al., ICLR 2020) against the mean of the class's scores, which
`evaluate --attack-outside` attacks in more steps. The loss gains

    weight * (cross-entropy of the changed image + 4 * mean over the m slots of the drop of their score)

with the drop taken at the cells of the unchanged image. The changed image is seen with the batch statistics of
unchanged ones, as in inference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opal_deploy.evaluation.attack import outside_boxes
from opal_deploy.evaluation.options import EvaluateOptions
from opal_deploy.model.config import NetworkConfig

# the attack that `evaluate` measures, in one step
_LEVELS, _MARGIN = EvaluateOptions.attack_levels, EvaluateOptions.attack_margin
# weight of the drop relative to the changed image's cross-entropy
DROP = 4.0


class Adversary:
    """Changes images outside the boxes of some cells so that scores drop.

    Args:
        config: of the network that is attacked.
        grid: (H, W) of its feature map.
    """

    def __init__(self, config: NetworkConfig, grid: tuple[int, int]) -> None:
        self._input_size, self._grid = config.input_size, grid
        mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (config.mean, config.std))
        self._limit, self._darkest, self._brightest = _LEVELS / 255 / std, -mean / std, (1 - mean) / std

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def change(self, images: Tensor, cells: Tensor, listed: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the changed images, normalised, float32 [n, 3, H0, W0].

        Args:
            images: normalised.
            cells: int64 [n, m], flat, of the labelled class's slots.
            listed: bool [n, m], False for dropped slots.
            score: from images to the value to minimise, [n].
        """
        free = outside_boxes(cells, listed, self._input_size, self._grid, _MARGIN)
        limit, darkest, brightest = (each.to(images.device) for each in (self._limit, self._darkest, self._brightest))
        # half of what is allowed at random, so that the step has room
        start = (images + (torch.rand_like(images) - 0.5) * limit * free).requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(score(start).sum(), start)
        change = (start.detach() - images - limit * gradient.sign()).clamp(-limit, limit) * free
        return (images + change).clamp(darkest, brightest)
