"""Change the pixels outside the evidence, and see whether the answer and its evidence stay (`--attack-outside`).

A box shows where a score was read, not everything it depends on. Changes by a few grey levels show how much depends on
the rest: random ones, and those that projected gradient descent (PGD, Madry et al., ICLR 2018) finds against the mean
of the scores in the answer. Each is measured in two regions: outside the boxes, and outside the pixels that a cell sees
(`receptive_field`). Pixels are whole numbers throughout, so every changed image could be a file.

By how much the strongest score drops is PAC of Sacha et al., "Interpretability benchmark for evaluating spatial
misalignment of prototypical parts explanations" (AAAI 2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from opal_deploy.artifact.cells import CellGrid
from opal_deploy.artifact.heads import find_contributions, find_strongest, find_values
from opal_deploy.artifact.measurements import ReceptiveField
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.datasets.samples import Sample
from opal_deploy.evaluation.api import EvaluateOptions
from opal_deploy.evaluation.metrics import Figures, Mean, format_rows, mean_with_interval
from opal_deploy.evaluation.session import photographs
from opal_deploy.logs import as_progress
from opal_deploy.model.network import OpalNetwork
from opal_deploy.runtime.session import ImageBatch

# the largest change of a pixel, in grey levels of 255, and the gradient steps of PGD
LEVELS, STEPS = 6, 20
BOXES, FIELD = "outside the boxes", "outside what the cells see"
NOISE, PGD = "random", "PGD"
_BATCH = 8
# first words of the seeds: a stream of its own
_STREAM = (15, 0)


@dataclass(frozen=True)
class Outside(Figures):
    """The effect of one kind of change in one region, over the images that have the region."""

    region: str  # `BOXES` or `FIELD`
    method: str  # `NOISE` or `PGD`
    images: int
    area: float  # mean share of an image's pixels that may change, 0 ... 1
    score_drop: Mean  # relative drop of the strongest score (PAC)
    cells_moved: Mean  # share of the answer's cells that move
    kept: Mean  # share of images that get the same answer


@dataclass(frozen=True)
class Attack(Figures):
    """The figures of `--attack-outside`."""

    images: int  # measured ones; some may have no pixels outside what their cells see
    levels: int  # the largest change, in grey levels of 255
    margin: int  # pixels around a box that stay as they are, too
    steps: int  # of PGD
    outside: list[Outside]

    def describe(self) -> Iterator[str]:
        """Yield a heading and a table: per region and kind of change, means with their 95 % intervals."""
        yield (
            f"attack outside the evidence: changes of at most {self.levels} of 255 grey levels, {self.margin} pixels "
            f"or more from a box; {self.images} images, PGD of {self.steps} steps"
        )
        titles = {"region": "changed", "method": "how", "area": "of the image", "score_drop": "score drops"}
        titles |= {"cells_moved": "cells move", "kept": "same answer"}
        yield from format_rows(self.outside, titles)


@dataclass(frozen=True)
class _Answer:
    """A network's outputs for n images, and the cells of their evidence."""

    outputs: Any  # of the head
    classes: Tensor  # int64 [n], predicted
    channels: Tensor  # int64 [n, k], of the slots in the answer, the strongest first
    listed: Tensor  # bool [n, k], whether there is such a slot
    cells: Tensor  # int64 [n, k], flat cells of the evidence

    def mean_over_slots(self, values: Tensor) -> Tensor:
        """Return the mean of values [n, k] over the slots in each answer: [n]."""
        return (values * self.listed).sum(1) / self.listed.sum(1)


@dataclass(frozen=True)
class Attacker:
    """Attacks a network."""

    network: OpalNetwork  # in evaluation mode; computes on its device
    metadata: Metadata  # of the same model, whose evidence is single cells
    margin: int  # pixels around a box that must not change
    field: ReceptiveField | None  # of the cells; None or without an effective field leaves out the region `FIELD`

    def measure(self, images: ImageBatch, indices: Sequence[int]) -> dict[tuple[str, str], dict[str, Any]]:
        """Return figures per image, float64 [n'], by region and method, for images uint8 [n, H0, W0, 3].

        The n' images are those with pixels in the region. Figures are the fields of `Outside`.

        Args:
            indices: of the images in the split, on which their random changes depend.
        """
        device = next(self.network.parameters()).device
        clean = torch.from_numpy(images).permute(0, 3, 1, 2).float().to(device)
        drawn = [
            np.random.default_rng((*_STREAM, index)).integers(-LEVELS, LEVELS + 1, clean.shape[1:]) for index in indices
        ]
        noise = torch.from_numpy(np.stack(drawn)).to(device)
        answer, measured = self._find_answer(clean), {}
        for region, free in self._find_regions(answer).items():
            has_some = free.flatten(1).any(1)
            noisy = (clean + noise * free).clamp(0, 255)
            for method, changed in ((NOISE, noisy), (PGD, self._descend(clean, noisy, free, answer))):
                figures = self._compare(changed, answer) | {"area": free.flatten(1).float().mean(1)}
                measured[region, method] = {k: values[has_some].double().cpu().numpy() for k, values in figures.items()}
        return measured

    def _explain(self, pixels: Tensor) -> Any:
        """Return the head's outputs for pixels 0 ... 255, float32 [n, 3, H0, W0]."""
        mean, std = (pixels.new_tensor(v).reshape(1, 3, 1, 1) for v in (self.metadata.mean, self.metadata.std))
        return self.network.explain((pixels / 255 - mean) / std)

    def _find_answer(self, clean: Tensor) -> _Answer:
        with torch.no_grad():
            outputs = self._explain(clean)
        classes = outputs.logits.argmax(1)
        predicted = classes.cpu().numpy()
        metadata, class_map = self.metadata, self.metadata.class_map
        kept = class_map.kept[predicted]
        values = class_map.take(find_values(outputs.scores.cpu().numpy(), metadata), predicted)
        if metadata.is_opal:
            slots = np.argsort(np.where(kept, -values, np.inf), axis=1, kind="stable")
            listed = np.take_along_axis(kept, slots, axis=1)
        else:
            # what speaks for the class in a record
            parts = cast(Any, find_contributions(values, predicted, metadata))
            slots, listed = find_strongest(parts, kept & (parts > 0))
        table = np.take_along_axis(class_map.channel_table[predicted], slots, axis=1)
        channels, shown = (torch.from_numpy(array).to(clean.device) for array in (table, listed))
        return _Answer(outputs, classes, channels, shown, outputs.argmax.long().gather(1, channels))

    def _find_regions(self, answer: _Answer) -> dict[str, Tensor]:
        """Return the pixels that may change, bool [n, 1, H0, W0], by region."""
        input_size, grid, field = self.metadata.input_size, self.network.grid, self.field
        regions = {BOXES: outside_boxes(answer.cells, answer.listed, input_size, self.metadata.cells, self.margin)}
        if field is not None and field.effective is not None:
            corner = (field.effective_offset or 0.0) - field.effective / 2
            low = field.stride * torch.stack([answer.cells // grid[1], answer.cells % grid[1]]) + corner
            regions[FIELD] = _outside(low, low + field.effective, answer.listed, input_size)
        return regions

    def _descend(self, clean: Tensor, start: Tensor, free: Tensor, answer: _Answer) -> Tensor:
        """Return the images with the lowest mean of the answer's scores: clean ones, or some of PGD from `start`."""
        change, step, best = start - clean, LEVELS / 4, clean
        lowest = answer.mean_over_slots(answer.outputs.scores.gather(1, answer.channels))
        for number in range(STEPS + 1):
            pixels = (clean + change).clamp(0, 255).round().requires_grad_()
            with torch.enable_grad():
                objective = answer.mean_over_slots(self._explain(pixels).scores.gather(1, answer.channels))
                (gradient,) = torch.autograd.grad(objective.sum(), pixels)
            better = objective.detach() < lowest
            best = torch.where(better[:, None, None, None], pixels.detach(), best)
            lowest = torch.where(better, objective.detach(), lowest)
            if number < STEPS:
                change = (change - step * gradient.sign()).clamp(-LEVELS, LEVELS) * free
        return best

    def _compare(self, changed: Tensor, answer: _Answer) -> dict[str, Tensor]:
        with torch.no_grad():
            after = self._explain(changed)
        strongest = answer.channels[:, :1]
        old, new = (outputs.scores.gather(1, strongest)[:, 0] for outputs in (answer.outputs, after))
        return {
            "kept": after.logits.argmax(1) == answer.classes,
            "score_drop": (old - new) / old.abs().clamp_min(1e-12),
            "cells_moved": answer.mean_over_slots(after.argmax.long().gather(1, answer.channels) != answer.cells),
        }


def outside_boxes(cells: Tensor, listed: Tensor, input_size: tuple[int, int], grid: CellGrid, margin: int) -> Tensor:
    """Return the pixels outside the boxes of some cells, bool [n, 1, H0, W0].

    Args:
        cells: int64 [n, k], flat.
        listed: bool [n, k], whether a cell has a box.
        margin: pixels around a box that count as inside.
    """
    rows, cols = np.divmod(cells.cpu().numpy(), grid.cols)
    boxes = torch.from_numpy(grid.boxes([(0, 0, *input_size[::-1])] * len(cells), rows, cols)).to(cells.device)
    x0, y0, x1, y1 = boxes.round().unbind(2)
    return _outside(torch.stack([y0, x0]) - margin, torch.stack([y1, x1]) + margin, listed, input_size)


def _outside(low: Tensor, high: Tensor, listed: Tensor, input_size: tuple[int, int]) -> Tensor:
    """Return the pixels outside the boxes between `low` and `high`, [2, n, k] in rows and columns."""
    inside = []
    for first, last, length in zip(low, high, input_size, strict=True):
        centres = torch.arange(length, device=listed.device) + 0.5
        inside.append((centres > first[..., None]) & (centres < last[..., None]))  # [n, k, length]
    covered = inside[0][..., :, None] & inside[1][..., None, :] & listed[..., None, None]
    outside: Tensor = ~covered.any(1, keepdim=True)
    return outside


def measure_attack(
    network: OpalNetwork, metadata: Metadata, samples: Sequence[Sample], chosen: Sequence[int],
    field: ReceptiveField | None, options: EvaluateOptions,
) -> Attack:  # fmt: skip
    """Attack the images of the samples with the indices `chosen`; see this module and `Attacker`."""
    attacker = Attacker(network.eval(), metadata, options.attack_margin, field)
    measured = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for images in photographs(
        lambda pixels: None, samples, metadata.form, chosen=chosen, boxes=options.boxes, batch=_BATCH,
        progress=as_progress(options.progress), note="attacking",
    ):  # fmt: skip
        for key, figures in attacker.measure(images.pixels, images.indices).items():
            measured[key].append(figures)
    outside = []
    for (region, method), parts in measured.items():
        values = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if count := len(values["kept"]):
            area = float(values.pop("area").mean())
            means = {name: mean_with_interval(column) for name, column in values.items()}
            outside.append(Outside(region, method, count, area, **means))
    return Attack(len(chosen), LEVELS, options.attack_margin, STEPS, outside)
